"""Published weights: rounding to bfloat16, and deltas that lose nothing."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pscore.errors import DecodeError
from pscore.publish import codec
from pscore.publish.codec import Delta, Form

GOLDEN = Path(__file__).parents[3] / "golden" / "publish" / "deltas.json"
EVERY = np.arange(1 << 16, dtype=np.uint16)


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def versions(kind: str, numel: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns two versions of a slice, `(numel,) uint16` each."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, numel).astype(np.uint16)
    if kind == "random":
        return old, rng.integers(0, 1 << 16, numel).astype(np.uint16)
    if kind == "ulps":
        return old, old + rng.integers(-3, 4, numel).astype(np.uint16)
    share = {"equal": 0.0, "rare": 2e-5, "few": 0.01, "some": 0.3}[kind]
    steps = rng.integers(-200, 200, numel) * (rng.random(numel) < share)
    return old, old + steps.astype(np.uint16)


def delta_of(old: np.ndarray, new: np.ndarray) -> Delta:
    order = [np.where(x < 0x8000, x, 0x7FFF - x.astype(np.int32)) for x in (old, new)]
    return codec.encode((order[1] - order[0]).astype(np.int16), new)


def test_rounding_is_that_of_torch() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    ties = EVERY.astype(np.uint32) << np.uint32(16) | np.uint32(0x8000)
    for values in (floats(bits), ties.view(np.float32), floats(EVERY.astype(np.uint32) << 16)):
        ours = codec.round_to_bf16(values)
        theirs = torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
        is_nan = np.isnan(values)
        np.testing.assert_array_equal(ours[~is_nan], theirs[~is_nan])


def test_nan_keeps_its_sign_and_payload_and_zero_its_sign() -> None:
    bits = np.array([0x7FC12345, 0xFFE00000, 0x7F800001, 0x80000000, 0], dtype=np.uint32)
    expected = [0x7FC1, 0xFFE0, 0x7FC0, 0x8000, 0]
    assert codec.round_to_bf16(floats(bits)).tolist() == expected


def test_every_bf16_stays_what_it_is() -> None:
    wide = np.empty(EVERY.size, dtype=np.float32)
    codec.widen(EVERY, wide)
    quiet = np.isnan(wide) & ((EVERY & 0x40) == 0)
    back = codec.round_to_bf16(wide)
    np.testing.assert_array_equal(back[~quiet], EVERY[~quiet])
    np.testing.assert_array_equal(back[quiet], EVERY[quiet] | 0x40)


@pytest.mark.parametrize("numel", [1, 2, 7, 64, 255, 1000, 200_001])
@pytest.mark.parametrize("kind", ["equal", "rare", "few", "some", "ulps", "random"])
def test_a_delta_leads_to_the_same_bits(kind: str, numel: int) -> None:
    old, new = versions(kind, numel, seed=numel)
    delta = delta_of(old, new)
    held = old.copy()
    codec.apply(delta, held)
    np.testing.assert_array_equal(held, new)
    assert delta.payload.nbytes <= 2 * numel, "longer than dense"


@pytest.mark.parametrize("form", [Form.SPARSE, Form.MASK, Form.NIBBLE])
def test_each_form_alone_holds_any_difference(form: Form) -> None:
    """Each 16-bit difference from each of some bits, though another form would be smaller."""
    for start in (0, 1, 0x7F80, 0x7FFF, 0x8000, 0xFFFF):
        old = np.full(1 << 16, start, dtype=np.uint16)
        steps = EVERY.view(np.int16)
        payload = np.zeros(1 << 19, dtype=np.uint8)
        nbytes = codec.WRITERS[form](steps, payload)
        held = old.copy()
        codec.apply(Delta(form=form, payload=payload[:nbytes]), held)
        assert len(set(held.tolist())) == 1 << 16, "two differences lead to the same bits"
        codec.apply(Delta(form=form, payload=payload[:nbytes]), held)
        back = (-steps.astype(np.int32)).astype(np.int16)
        nbytes = codec.WRITERS[form](back, payload)
        for _ in range(2):
            codec.apply(Delta(form=form, payload=payload[:nbytes]), held)
        np.testing.assert_array_equal(held, old)


def test_moving_keeps_the_version_and_its_delta_together() -> None:
    rng = np.random.default_rng(2)
    weights = rng.standard_normal(5000).astype(np.float32)
    bits = codec.round_to_bf16(weights)
    follower = bits.copy()
    for _ in range(20):
        weights += 1e-3 * rng.standard_normal(5000).astype(np.float32)
        delta = codec.move(bits, weights)
        np.testing.assert_array_equal(bits, codec.round_to_bf16(weights))
        codec.apply(delta, follower)
        assert codec.fingerprint(follower) == codec.fingerprint(bits) != 0


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("equal", Form.SPARSE),
        ("few", Form.SPARSE),
        ("some", Form.MASK),
        ("ulps", Form.NIBBLE),
        ("random", Form.DENSE),
    ],
)
def test_the_smallest_form_is_written(kind: str, form: Form) -> None:
    old, new = versions(kind, 10_000)
    delta = delta_of(old, new)
    assert delta.form is form
    codec.apply(delta, old)
    np.testing.assert_array_equal(old, new)
    steps = np.zeros(10_000, dtype=np.int16)
    codec._move(np.zeros(10_000, dtype=np.uint32), versions(kind, 10_000)[0], steps)
    sizes = [20_000]
    for write in codec.WRITERS.values():
        sizes.append(write(steps, np.zeros(60_000, dtype=np.uint8)))
    assert codec.smallest(steps)[1] == min(sizes)


def test_golden_bytes() -> None:
    """The bytes of each form, as the first version of this program wrote them."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for name, entry in golden.items():
        old = np.array(entry["old"], dtype=np.uint16)
        new = np.array(entry["new"], dtype=np.uint16)
        delta = delta_of(old, new)
        assert (delta.form.name, delta.payload.tobytes().hex()) == (entry["form"], entry["bytes"])
        codec.apply(delta, old)
        assert old.tolist() == entry["new"], name
    long = delta_of(*versions("few", 100_000, seed=9)).payload.tobytes()
    assert hashlib.sha256(long).hexdigest()[:16] == "1a7807a57003f222"


@pytest.mark.parametrize("form", list(Form))
def test_a_payload_that_is_none_is_refused(form: Form) -> None:
    rng = np.random.default_rng(int(form))
    for nbytes in (1, 3, 41, 71):
        refused = 0
        for _ in range(50):
            payload = rng.integers(0, 256, nbytes).astype(np.uint8)
            try:
                codec.apply(Delta(form=form, payload=payload), np.zeros(20, dtype=np.uint16))
            except DecodeError:
                refused += 1
        assert refused > 0
    with pytest.raises(DecodeError, match="form of a delta is 9"):
        codec.form_of(9)
