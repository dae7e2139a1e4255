"""Properties of every compressor: nothing is lost, nothing else changes, sizes are right."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pscore.compressors import COMPRESSORS, base, make_compressor, parse_compressor
from pscore.errors import ConfigError, GradientError
from pscore.types import FloatArray
from tests.unit.pscore.compressors.cases import (
    EXTREMES,
    FORGETTING,
    NAMES,
    SIZES,
    WITH_RESIDUAL,
    Sender,
    decode,
    normal,
)

MODERATE = st.floats(-(2.0**99), 2.0**99, width=32)


@pytest.mark.parametrize("name", NAMES)
def test_a_compressor_survives_its_text(name: str) -> None:
    compressor = parse_compressor(name)
    assert parse_compressor(str(compressor)) == compressor
    assert make_compressor(compressor.name, compressor.arguments()) == compressor
    assert COMPRESSORS[compressor.name].source or compressor.name == "none"


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_sent_and_residual_add_up_to_the_input(name: str, numel: int) -> None:
    compressor = parse_compressor(name)
    sender = Sender(compressor, numel)
    for step in range(4):
        grad = normal(numel, seed=step)
        given_ = grad.astype(np.float64) + sender.residual
        payload = sender.encode(grad, seed=step << 33 | 5, step=step)
        sent = decode(compressor, payload, numel)
        # u = g + r is rounded once and r = u - D once more.
        size = np.maximum(np.abs(given_), np.maximum(np.abs(sent), np.abs(sender.residual)))
        slack = np.spacing(size.astype(np.float32)).astype(np.float64)
        assert (np.abs(sent.astype(np.float64) + sender.residual - given_) <= slack).all()


@pytest.mark.parametrize("name", NAMES)
def test_decoding_adds_what_assigning_sets(name: str) -> None:
    compressor, numel = parse_compressor(name), 3000
    payload = Sender(compressor, numel).encode(normal(numel))
    sent = decode(compressor, payload, numel)
    out = normal(numel, seed=9)
    expected = out + sent * np.float32(0.25)  # 0.25 is exact, so that the order cannot matter.
    compressor.decode_add(payload, out, 0.25, assign=False)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_unaligned_payload_decodes_alike(name: str) -> None:
    compressor, numel = parse_compressor(name), 2100
    payload = Sender(compressor, numel).encode(normal(numel))
    for shift in (1, 2, 3):
        moved = np.zeros(len(payload) + shift, dtype=np.uint8)
        moved[shift:] = payload
        moved.flags.writeable = False
        again = decode(compressor, moved[shift:], numel)
        assert np.array_equal(again, decode(compressor, payload, numel))


@pytest.mark.parametrize("name", NAMES)
def test_zeros_cost_nothing_and_say_zero(name: str) -> None:
    compressor, numel = parse_compressor(name), 2500
    sender = Sender(compressor, numel)
    assert not decode(compressor, sender.encode(np.zeros(numel, np.float32)), numel).any()
    assert not any(array.any() for array in sender.state.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_of_no_element_is_sent_as_one(name: str) -> None:
    compressor, nothing = parse_compressor(name), np.zeros(0, np.float32)
    assert decode(compressor, Sender(compressor, 0).encode(nothing), 0).shape == (0,)
    compressor.decode_add(Sender(compressor, 0).encode(nothing), nothing, 0.5, assign=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_of_one_element_is_sent_or_kept(name: str) -> None:
    compressor, grad = parse_compressor(name), np.array([0.75], np.float32)
    sender = Sender(compressor, 1)
    sent = [decode(compressor, sender.encode(grad, seed=step), 1)[0] for step in range(64)]
    if name in FORGETTING:
        assert 0 < max(sent) < 100
    elif name in WITH_RESIDUAL:
        assert sum(sent) + sender.residual[0] == pytest.approx(48.0, rel=1e-6)
    else:  # A random number of two neighbours; its mean is the gradient.
        assert abs(sum(sent) / 64 - 0.75) < 0.25


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_makes_the_same_bytes_and_another_size_fits(name: str) -> None:
    compressor = parse_compressor(name)
    for numel in SIZES:
        first, second = (Sender(compressor, numel).encode(normal(numel), seed=7) for _ in "ab")
        assert np.array_equal(first, second)
        assert decode(compressor, first, numel).shape == (numel,)


@pytest.mark.parametrize("name", NAMES)
@given(values=st.lists(MODERATE, min_size=1, max_size=70), seed=st.integers(0, 2**64 - 1))
@example(values=[1e-45, -1e-45, 1e-38, -1e-40], seed=0)
@example(values=[1e30, 1e-30, -1e30, 0.0, -0.0], seed=1)
@example(values=[65504.0, 65519.0, 65520.0, -7e4, 6.1e-5, 6e-8, 2.9e-8, 3e-8], seed=2)
@example(values=[2.0**-100, -(2.0**-101)] * 9, seed=3)
def test_any_moderate_gradient_is_sent_or_kept_as_residual(
    name: str, values: list[float], seed: int
) -> None:
    compressor, numel = parse_compressor(name), len(values)
    sender = Sender(compressor, numel)
    grad = np.array(values, dtype=np.float32)
    sent = decode(compressor, sender.encode(grad, seed=seed), numel)
    assert np.isfinite(sent).all()
    if name in WITH_RESIDUAL:
        slack = np.spacing(np.maximum(np.abs(sent), np.abs(grad))).astype(np.float64)
        assert (np.abs(sent.astype(np.float64) + sender.residual - grad) <= slack).all()


@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_values_beyond_float32_are_refused_and_change_nothing(name: str) -> None:
    """The element is in the last block of three: the ones before it must not have been encoded."""
    compressor, numel = parse_compressor(name), 5000
    sender, other = Sender(compressor, numel), Sender(compressor, numel)
    for state in (sender.state, other.state):
        for key in state:
            state[key][:] = normal(numel, 3)
        state["residual"][4999] = 3e38
    before = {key: value.copy() for key, value in sender.state.items()}
    grad = normal(numel)
    grad[4999] = 3e38
    with pytest.raises(GradientError, match="beyond float32"):
        sender.encode(grad)
    for key, value in before.items():
        assert np.array_equal(sender.state[key], value)
    good = normal(numel, 9)
    assert np.array_equal(sender.encode(good, seed=1), other.encode(good, seed=1))


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", NAMES)
def test_finite_values_stay_finite(name: str, extreme: str) -> None:
    """And sent + residual is the gradient, to one rounding of its largest number."""
    compressor, grad = parse_compressor(name), EXTREMES[extreme]
    sender = Sender(compressor, len(grad))
    sent = decode(compressor, sender.encode(grad, seed=11), len(grad)).astype(np.float64)
    assert np.isfinite(sent).all()
    assert all(np.isfinite(value).all() for value in sender.state.values())
    if base.RESIDUAL in compressor.state_names and not name.startswith("dgc"):
        error = np.abs(grad.astype(np.float64) - sent - sender.residual)
        assert error.max() <= np.abs(grad).max() * 2.0**-24


def test_room_is_looked_for_only_where_it_may_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the largest number of the residual known, and small, no pass over memory is made."""
    looked: list[int] = []

    def look(grad: FloatArray, residual: FloatArray) -> bool:
        looked.append(len(grad))
        return True

    monkeypatch.setattr(base, "sum_is_finite", look)
    sender = Sender(parse_compressor("int8"), 100)
    sender.state[base.LARGEST] = np.zeros(1, np.float32)
    sender.encode(normal(100))
    assert not looked
    assert sender.state[base.LARGEST][0] == np.abs(normal(100)).max()
    sender.encode(np.full(100, 1e35, np.float32))  # The residual has nothing large yet.
    assert not looked
    sender.encode(normal(100))
    assert looked


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"none", *WITH_RESIDUAL}])
def test_compressors_without_a_residual_keep_nothing(name: str) -> None:
    compressor = parse_compressor(name)
    assert name in FORGETTING or not compressor.state_names


@pytest.mark.parametrize("name", ["qsgd", "qsgd(levels=3)", "terngrad", "natural"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    compressor, numel, num_draws = parse_compressor(name), 64, 4000
    grad: FloatArray = np.linspace(-1.0, 1.0, numel).astype(np.float32)
    sender, total = Sender(compressor, numel), np.zeros(numel)
    squares = np.zeros(numel)
    for draw in range(num_draws):
        sent = decode(compressor, sender.encode(grad, seed=draw * 0x9E3779B97F4A7C15 % 2**64), 64)
        total += sent
        squares += sent.astype(np.float64) ** 2
    mean = total / num_draws
    deviation = np.sqrt(np.maximum(squares / num_draws - mean**2, 1e-12) / num_draws)
    assert (np.abs(mean - grad) < 5 * deviation + 1e-6).all()


@pytest.mark.parametrize(
    "text",
    [
        "2bit(threshold=-1)",
        "qsgd(levels=0)",
        "qsgd(levels=128)",
        "topk(ratio=0)",
        "topk(ratio=1.5)",
        "topk(select=some)",
        "randomk(ratio=2)",
        "dgc(momentum=1.5)",
        "dgc(clip=-1)",
        "dgc(warmup=-1)",
        "dgc(select=all)",
        "sparseloco(k=0)",
        "sparseloco(k=4097)",
        "sparseloco(decay=1.5)",
        "3bit",
    ],
)
def test_arguments_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_compressor(text)
