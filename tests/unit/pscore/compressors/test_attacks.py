"""Payloads of broken or hostile workers: each is refused with its reason."""

import numpy as np
import pytest

from pscore.compressors import blocks, parse_compressor
from pscore.errors import DecodeError
from pscore.types import ByteArray
from tests.unit.pscore.compressors.cases import NAMES, Sender, decode, normal

NUMEL = 2070  # Two blocks; the last byte and word of packed codes are not full.
SCALED = ["int8", "2bit", "1bit", "qsgd", "terngrad"]
SPARSE = ["topk(ratio=0.03)", "topk(ratio=0.03, select=sampled)", "dgc(ratio=0.03)"]


def payload_of(name: str, numel: int = NUMEL) -> ByteArray:
    return Sender(parse_compressor(name), numel).encode(normal(numel), seed=3)


def refusal(name: str, payload: ByteArray, numel: int = NUMEL) -> str:
    with pytest.raises(DecodeError) as caught:
        parse_compressor(name).check(payload, numel)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_and_every_longer_payload_is_refused(name: str) -> None:
    payload = payload_of(name, 75)
    for nbytes in range(len(payload)):
        refusal(name, payload[:nbytes].copy(), 75)
    for extra in (1, 2, 4, 8):
        refusal(name, np.append(payload, np.zeros(extra, np.uint8)), 75)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_number_of_elements_is_refused_or_in_range(name: str) -> None:
    payload = payload_of(name, 2000)
    for numel in (1, 17, 1000, 2064, 4000):
        try:
            out = decode(parse_compressor(name), payload, numel)
        except DecodeError:
            continue
        assert name.split("(")[0] in {"topk", "dgc", "sparseloco"}
        assert numel > 2000  # The indices fit: only the slice's own size can tell.
        assert np.isfinite(out).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_every_single_bit_is_refused_or_decodes_to_numbers(name: str) -> None:
    """Frames have a checksum; this is about a sender that means it."""
    compressor, numel = parse_compressor(name), 75
    payload = payload_of(name, numel)
    for bit in range(8 * len(payload)):
        broken = payload.copy()
        broken[bit // 8] ^= 1 << bit % 8
        try:
            compressor.check(broken, numel)
        except DecodeError:
            continue
        guarded = np.zeros(numel + 64, dtype=np.float32)
        compressor.decode_add(broken, guarded[32 : 32 + numel], 1.0, assign=False)
        assert np.isfinite(guarded).all()
        assert not guarded[:32].any()
        assert not guarded[32 + numel :].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e-3])
@pytest.mark.parametrize("name", SCALED)
def test_scales_that_are_no_sizes_are_refused(name: str, value: float) -> None:
    payload = payload_of(name)
    payload[4:8].view("<f4")[0] = value
    assert "scale of block 1" in refusal(name, payload)


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("qsgd", 127), ("qsgd(levels=5)", 5)])
def test_a_scale_of_which_float32_does_not_hold_the_levels_is_refused(
    name: str, levels: int
) -> None:
    payload = payload_of(name)
    payload[8:] = levels
    largest = blocks.largest_scale(levels)
    payload[:8].view("<f4")[:] = largest
    assert np.isfinite(decode(parse_compressor(name), payload, NUMEL)).all()
    payload[4:8].view("<f4")[0] = np.nextafter(largest, np.float32(np.inf))
    assert "scale of block 1" in refusal(name, payload)
    payload[4:8].view("<f4")[0] = 3e38
    assert "scale of block 1 is 3" in refusal(name, payload)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", [*SPARSE, "randomk(ratio=0.03)"])
def test_values_that_are_no_numbers_are_refused(name: str, value: float) -> None:
    payload = payload_of(name)
    payload[-4:].view("<f4")[0] = value
    assert "NaN or Inf" in refusal(name, payload)


@pytest.mark.parametrize(("name", "code"), [("fp16", 0x7C00), ("fp16", 0xFE01), ("bf16", 0x7F80)])
def test_halves_that_are_no_numbers_are_refused(name: str, code: int) -> None:
    payload = payload_of(name)
    payload[100:102].view("<u2")[0] = code
    assert "NaN or Inf" in refusal(name, payload)


@pytest.mark.parametrize("name", SPARSE)
def test_counts_and_indices_are_checked(name: str) -> None:
    payload = payload_of(name)
    count = int(payload[:4].view("<u4")[0])
    indices = payload[4 : 4 + 4 * count].view("<u4")
    for declared in (count - 1, count + 1, 0xFFFFFFFF, 1 << 29):
        broken = payload.copy()
        broken[:4].view("<u4")[0] = declared
        assert "bytes" in (said := refusal(name, broken)) or "at most" in said
    for position, index in ((count - 1, NUMEL), (count - 1, 0xFFFFFFFF), (1, int(indices[0]))):
        broken = payload.copy()
        broken[4 : 4 + 4 * count].view("<u4")[position] = index
        assert "ind" in refusal(name, broken)
    swapped = payload.copy()
    both = swapped[4:12].view("<u4")
    both[:] = both[::-1].copy()
    assert "strictly increasing" in refusal(name, swapped)


def test_more_elements_than_the_ratio_allows_are_refused() -> None:
    payload = payload_of("topk(ratio=0.5)")
    assert "at most 63" in refusal("topk(ratio=0.03)", payload)


def test_codes_that_are_none_are_refused() -> None:
    for name in ("2bit", "2bit(threshold=0.02)", "terngrad"):
        payload = payload_of(name)
        broken = payload.copy()
        broken[-9] = 0b01000000
        assert "unused code 01" in refusal(name, broken)
        broken = payload.copy()
        broken[-1] = 0b11
        assert "behind" in refusal(name, broken)
    payload = payload_of("1bit")
    payload[-1] |= 1
    assert "behind" in refusal("1bit", payload)
    payload = payload_of("int8")
    payload[-1] = 0x80
    assert "-128" in refusal("int8", payload)
    payload = payload_of("qsgd(levels=7)")
    payload[-1] = 8
    assert "level 8, at most 7" in refusal("qsgd(levels=7)", payload)
    payload = payload_of("natural")
    payload[-1] = 0x80
    assert "minus zero" in refusal("natural", payload)


def test_parts_of_a_chunk_are_checked() -> None:
    name, numel = "sparseloco(k=5)", 4096 + 7  # Levels 16 bytes, codes 3, indices 15.
    payload = payload_of(name, numel)
    for at, value, said in (
        (slice(0, 8), np.array([2.0, 1.0], "<f4").view(np.uint8), "not in order"),
        (slice(19, 22), np.array([0x00, 0x10, 0x01], np.uint8), "not strictly increasing"),
        (slice(31, 34), np.array([0x00, 0x50, 0x07], np.uint8), "beyond its chunk"),
        (slice(18, 19), payload[18:19] | 1, "behind its last element"),
    ):
        broken = payload.copy()
        broken[at] = value
        assert said in refusal(name, broken, numel)
    odd = payload_of(name, 4096)
    odd[-1] |= 1
    assert "behind its last element" in refusal(name, odd, 4096)
