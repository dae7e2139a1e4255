"""Each compressor against its formula, with numbers worked by hand."""

import numpy as np
import pytest
import torch

from pscore.compressors import Compressor, draw, parse_compressor, sparse
from pscore.compressors.base import ORIGIN
from pscore.compressors.dgc import DGC
from pscore.types import FloatArray
from tests.unit.pscore.compressors.cases import Sender, decode, normal


def floats(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float32)


def send(compressor: Compressor, *values: float) -> tuple[bytes, Sender]:
    sender = Sender(compressor, len(values))
    return sender.encode(floats(*values)).tobytes(), sender


def test_two_bits_are_in_mxnets_order() -> None:
    # +t 11, -t 10, 0 00; element i of 16 in byte i / 4, the first in the highest bits.
    payload, sender = send(parse_compressor("2bit(threshold=0.5)"), 0.5, -0.5, 0.25, 1.75, -0.75)
    assert payload == bytes([0b11_10_00_11, 0b10_00_00_00, 0, 0])
    assert sender.residual.tolist() == [0.0, 0.0, 0.25, 1.25, -0.25]
    # The residual is added before the comparison: 0.25 + 0.25 reaches the threshold.
    second = sender.encode(floats(0.0, 0.0, 0.25, -1.25, -0.125))
    assert second.tobytes() == bytes([0b00_00_11_00, 0, 0, 0])
    assert sender.residual.tolist() == [0.0, 0.0, 0.0, 0.0, -0.375]


def test_two_bits_adapt_to_what_is_large() -> None:
    # The root of (64 + 36 + 28) / 32 is 2, twice that 4; two are beyond, their mean is 7.
    values = [-8.0, 6.0, *[1.0] * 28, 0.0, 0.0]
    payload, sender = send(parse_compressor("2bit"), *values)
    assert np.frombuffer(payload[:4], "<f4") == 7.0
    assert payload[4:] == bytes([0b10_11_00_00, 0, 0, 0, 0, 0, 0, 0])
    assert sender.residual.tolist() == [-1.0, -1.0, *values[2:]]


def test_the_largest_is_always_sent() -> None:
    payload, sender = send(parse_compressor("2bit"), 3.0, -3.0, 3.0)  # Twice the root is 6.
    assert np.frombuffer(payload[:4], "<f4") == 3.0
    assert not sender.residual.any()


def test_a_largest_value_outside_the_sample_is_sent() -> None:
    compressor = parse_compressor("2bit")
    grad = np.zeros(2048, np.float32)
    grad[[300, 900, 2000]] = [5.0, -4.0, -5.0]
    sender = Sender(compressor, 2048)
    payload = sender.encode(grad)
    assert payload[:4].view("<f4")[0] == 5.0
    assert sender.residual.nonzero()[0].tolist() == [900]


def test_the_sample_is_a_quarter_of_the_block() -> None:
    grad = np.full(2048, 64.0, np.float32)
    grad[:256], grad[1024:1280] = 1.0, 2.0
    grad[[7, 1030]] = 40.0, 50.0
    payload = Sender(parse_compressor("2bit"), 2048).encode(grad)
    # Mean square of the sample: (255 + 40^2 + 255 * 4 + 50^2) / 512, twice its root is below 7.
    assert payload[:4].view("<f4")[0] == 45.0


def test_each_block_has_its_own_threshold() -> None:
    compressor = parse_compressor("2bit")
    grad = np.concatenate([np.full(2048, 1.0, np.float32), np.full(3, 0.5, np.float32)])
    payload = Sender(compressor, 2051).encode(grad)
    assert payload[:8].view("<f4").tolist() == [1.0, 0.5]


def test_one_bit_sends_signs_and_the_mean_magnitude() -> None:
    payload, sender = send(parse_compressor("1bit"), 1.0, -2.0, 0.0, -5.0)  # Mean 2.
    assert np.frombuffer(payload[:4], "<f4") == 2.0
    assert payload[4:] == bytes([0b0101_0000, 0, 0, 0])
    assert sender.residual.tolist() == [-1.0, 0.0, -2.0, -3.0]


def test_int8_rounds_to_multiples_of_the_largest_over_127() -> None:
    compressor = parse_compressor("int8")
    payload, sender = send(compressor, 127.0, -64.4, 0.5, 1.5, -0.25)  # Scale 1, ties to even.
    assert np.frombuffer(payload[:4], "<f4") == 1.0
    assert np.frombuffer(payload[4:], np.int8).tolist() == [127, -64, 0, 2, 0]
    assert sender.residual[:4] == pytest.approx([0.0, -0.4, 0.5, -0.5], abs=1e-5)


def test_values_too_small_for_a_scale_stay_in_the_residual() -> None:
    for name in ("int8", "2bit", "1bit", "qsgd(feedback=True)", "terngrad(feedback=True)"):
        compressor = parse_compressor(name)
        _, sender = send(compressor, 1e-38, -1e-40, 2e-45)
        assert sender.residual.tolist() == floats(1e-38, -1e-40, 2e-45).tolist()


def test_fp16_is_numpys() -> None:
    exponents = np.ldexp(1.0, np.arange(-27, 17))
    grad = np.outer(exponents, [1.0, -1.0, 1.0004885, 1.00048828125, 1.5, 1.99999]).astype("f4")
    values = grad.ravel()[np.abs(grad.ravel()) < 65520]
    payload = Sender(parse_compressor("fp16"), len(values)).encode(values)
    expected = np.clip(values, -65504, 65504).astype("<f2")
    assert np.array_equal(payload.view("<u2"), expected.view("<u2"))


def test_fp16_keeps_what_is_beyond_its_range() -> None:
    payload, sender = send(parse_compressor("fp16"), 70000.0, -1e6)
    assert np.frombuffer(payload, "<f2").tolist() == [65504.0, -65504.0]
    assert sender.residual.tolist() == [4496.0, -1e6 + 65504]


def test_bf16_rounds_to_nearest_even() -> None:
    compressor = parse_compressor("bf16")
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000], np.uint32)
    payload = Sender(compressor, 5).encode(bits.view(np.float32))
    assert payload.view("<u2").tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82]
    largest, sender = send(compressor, 3.4e38)
    assert np.frombuffer(largest, "<u2")[0] == 0x7F7F
    assert sender.residual[0] > 0


def test_qsgd_draws_between_the_two_nearest_levels() -> None:
    compressor = parse_compressor("qsgd(levels=4)")
    payload, _ = send(compressor, 8.0, -8.0, 4.0, 0.0, 3.0)  # Scale 2: levels 4, -4, 2, 0, 1.5.
    assert np.frombuffer(payload[:4], "<f4") == 2.0
    goes_up = noise(5)[4] >= 1 << 15
    assert np.frombuffer(payload[4:], np.int8).tolist() == [4, -4, 2, 0, 1 + goes_up]


def test_terngrad_clips_at_two_and_a_half_sigma() -> None:
    grad = np.full(64, 1.0, np.float32)
    grad[0] = 100.0
    payload = Sender(parse_compressor("terngrad"), 64).encode(grad)
    sigma = np.sqrt((63 + 100.0**2) / 64)
    assert payload[:4].view("<f4")[0] == np.float32(2.5 * sigma)
    assert payload[4] >> 6 == 0b11  # A clipped value is always sent.
    # Of 1 one in so many is sent: where the noise is below 1 / s.
    is_sent = noise(64)[1:] < np.int32(np.float32(65536.0) / payload[:4].view("<f4")[0])
    sent = decode(parse_compressor("terngrad"), payload, 64)
    assert np.array_equal(sent[1:] != 0, is_sent)


def test_natural_sends_exponents_and_powers_of_two_as_they_are() -> None:
    compressor = parse_compressor("natural")
    payload, _ = send(compressor, 1.0, -2.0, 0.0, 2.0**-109, 2.0**17, 2.0**30, -(2.0**-111))
    assert list(payload) == [110, 0x80 | 111, 0, 1, 127, 127, 0]
    sent = decode(compressor, np.frombuffer(payload, np.uint8), 7)
    assert sent.tolist() == [1.0, -2.0, 0.0, 2.0**-109, 2.0**17, 2.0**17, 0.0]


def test_topk_sends_the_largest_and_of_equals_the_first() -> None:
    payload, sender = send(parse_compressor("topk(ratio=0.5)"), 1.0, -3.0, 2.0, -2.0, 0.5, 2.0)
    assert np.frombuffer(payload[:16], "<u4").tolist() == [3, 1, 2, 3]
    assert np.frombuffer(payload[16:], "<f4").tolist() == [-3.0, 2.0, -2.0]
    assert sender.residual.tolist() == [1.0, 0.0, 0.0, 0.0, 0.5, 2.0]


@pytest.mark.parametrize("numel", [1, 70, 5000])
def test_the_kth_largest_is_that_of_a_sort(numel: int) -> None:
    values = normal(numel)
    values[::3] = values[0]
    ordered = np.sort(np.abs(values))[::-1]
    for k in {1, 2, numel // 3, numel - 1, numel} - {0}:
        if k > numel:
            continue
        bits, ties = sparse.select_kth(values.view(np.int32), k)
        assert np.array(bits, np.int32).view(np.float32) == ordered[k - 1]
        assert ties == k - (ordered > ordered[k - 1]).sum()


@pytest.mark.parametrize("kind", ["normal", "equal", "sample is large", "sample is small"])
def test_exact_sends_what_a_sort_says(kind: str) -> None:
    numel, k = 50_000, 6000
    values = normal(numel)
    if kind == "equal":
        values = np.sign(values) * np.float32(0.25)
    elif kind != "normal":
        values[:: sparse.stride(numel)] *= 100.0 if kind == "sample is large" else 0.01
    order = np.lexsort((np.arange(numel), -np.abs(values)))
    payload = Sender(parse_compressor(f"topk(ratio={k / numel})"), numel).encode(values)
    indices, sent = sparse.parts(payload)
    assert np.array_equal(indices, np.sort(order[:k]))
    assert np.array_equal(sent, values[indices])


def test_a_sampled_threshold_sends_about_k_and_never_more_than_twice() -> None:
    compressor = parse_compressor("topk(ratio=0.01, select=sampled)")
    numel = 300_000
    payload = Sender(compressor, numel).encode(normal(numel))
    assert 2000 < int(payload[:4].view("<u4")[0]) < 4500
    # Where every sampled element is small and the others are large, the exact k are sent.
    grad = np.ones(numel, np.float32)
    grad[:: min(100, numel // 4096)] = 0.25
    payload = Sender(compressor, numel).encode(grad)
    assert payload[:4].view("<u4")[0] == 3000


def test_randomk_draws_one_of_each_part_and_all_in_time() -> None:
    compressor = parse_compressor("randomk(ratio=0.1)")
    sender, sent = Sender(compressor, 100), np.zeros(100)
    for step in range(120):
        payload = sender.encode(np.ones(100, np.float32) * (step == 0), seed=step)
        assert len(payload) == 8 + 4 * 10
        out = decode(compressor, payload, 100)
        assert (np.add.reduceat(out != 0, np.arange(0, 100, 10)) <= 1).all()
        sent += out
    assert (sent == 1.0).all()
    assert not sender.residual.any()


def test_dgc_corrects_momentum_and_masks_what_it_sent() -> None:
    compressor = DGC(ratio=0.5, momentum=0.5, select="exact")
    sender = Sender(compressor, 2)
    # m = g, v = g: the first is sent; v and m are zeroed there.
    assert decode(compressor, sender.encode(floats(4.0, 1.0)), 2).tolist() == [4.0, 0.0]
    assert sender.residual.tolist() == [0.0, 1.0]
    assert sender.state["momentum"].tolist() == [0.0, 1.0]
    # m = 0.5 m + g = (1, 1.5), v = v + m = (1, 2.5).
    assert decode(compressor, sender.encode(floats(1.0, 1.0)), 2).tolist() == [0.0, 2.5]
    assert sender.residual.tolist() == [1.0, 0.0]
    assert sender.state["momentum"].tolist() == [1.0, 0.0]


def test_dgc_nesterov_and_clipping() -> None:
    sender = Sender(DGC(ratio=0.5, momentum=0.5, nesterov=True, select="exact", clip=5.0), 2)
    # The norm of (6, 8) is 10: g = (3, 4); m = 0.5 (0 + g) = (1.5, 2); v = m + g = (4.5, 6).
    payload = sender.encode(floats(6.0, 8.0))
    assert decode(sender.compressor, payload, 2).tolist() == [0.0, 6.0]
    assert sender.residual.tolist() == [4.5, 0.0]
    assert sender.state["momentum"].tolist() == [1.5, 0.0]


def test_dgc_warms_its_ratio_up_as_in_the_paper() -> None:
    compressor = DGC(ratio=0.001, warmup=8)
    ratios = [compressor.ratio_at(step) for step in (0, 1, 2, 3, 4, 5, 6, 7, 8, 1000)]
    quarter = 0.25
    expected = [quarter] * 2 + [quarter**2] * 2 + [quarter**3] * 2 + [quarter**4] * 2
    assert ratios == [*expected, 0.001, 0.001]
    assert DGC(ratio=0.1, warmup=4).ratio_at(3) == 0.1


def test_sparseloco_sends_four_values_and_forgets_a_part_of_the_rest() -> None:
    compressor = parse_compressor("sparseloco(k=4, decay=0.5)")
    # The mean of 8, 6, 2 and 4 is 5: low is the mean of 2 and 4, high that of 8 and 6.
    payload, sender = send(compressor, -8.0, 1.0, 2.0, 6.0, -4.0)
    assert np.frombuffer(payload[:8], "<f4").tolist() == [3.0, 7.0]
    assert payload[8] == 0b11_00_01_10
    assert payload[9:] == bytes([0x00, 0x00, 0x02, 0x00, 0x30, 0x04])  # Indices 0, 2, 3, 4.
    assert sender.residual.tolist() == [-1.0, 1.0, -1.0, -1.0, -1.0]
    # Half of the residual is left: (-0.5, 0.5, -0.5, -0.5, 3.5), of equals the first are sent.
    again = sender.encode(floats(0.0, 0.0, 0.0, 0.0, 4.0))
    assert again[:8].view("<f4").tolist() == [0.5, 3.5]
    assert decode(compressor, again, 5).tolist() == [-0.5, 0.5, -0.5, 0.0, 3.5]
    assert sender.residual.tolist() == [0.0, 0.0, 0.0, -0.5, 0.0]


@pytest.mark.parametrize(("k", "decay"), [(64, 0.95), (7, 0.5), (4096, 1.0)])
def test_sparseloco_is_its_formula_in_float64(k: int, decay: float) -> None:
    """Sent values and the new residual sum to the gradient and the rest of the old residual."""
    numel = 2 * 4096 + 50
    compressor = parse_compressor(f"sparseloco(k={k}, decay={decay})")
    sender, waits = Sender(compressor, numel), np.zeros(numel)
    for step in range(4):
        grad = normal(numel, seed=step) ** 3
        u = grad.astype(np.float64) + decay * waits
        sent = decode(compressor, sender.encode(grad), numel)
        assert np.abs(sent + sender.residual.astype(np.float64) - u).max() <= 1e-9
        for start in range(0, numel, 4096):
            part, of_part = u[start : start + 4096], sent[start : start + 4096]
            count = min(k, len(part))
            chosen = np.argsort(-np.abs(part), kind="stable")[:count]
            sizes, is_high = (
                np.abs(part[chosen]),
                np.abs(part[chosen]) >= np.abs(part[chosen]).mean(),
            )
            low = sizes[~is_high].mean() if not is_high.all() else 0.0
            expected = np.zeros(len(part))
            expected[chosen] = np.sign(part[chosen]) * np.where(is_high, sizes[is_high].mean(), low)
            assert np.allclose(of_part, expected, rtol=1e-5, atol=1e-12)
        waits = sender.residual.astype(np.float64)


def test_sparseloco_sends_under_a_hundredth() -> None:
    nbytes = parse_compressor("sparseloco").payload_nbytes_max(1 << 20)
    assert nbytes == 256 * (8 + 64 * 14 // 8)  # Of 4 MiB: 0.73 %.


def test_pulseloco_sends_what_bfloat16_weights_show() -> None:
    compressor = parse_compressor("pulseloco")
    sender = Sender(compressor, 5)
    # Around 1 bfloat16 has steps of 2^-7 above and 2^-8 below, and half of one is a tie.
    sender.state[ORIGIN] = floats(1.0, 1.0, 1.0, 0.0, -1.0)
    move = floats(2.0**-9, 2.0**-9 + 2.0**-20, -(2.0**-8), 2.0**-40, -(2.0**-9))
    payload = sender.encode(move)
    assert payload[:4].tolist() == [0b01010, 0, 0, 0]
    assert payload[4:].view("<f4").tolist() == [2.0**-9 + 2.0**-20, 2.0**-40]
    assert sender.residual.tolist() == [2.0**-9, 0.0, -(2.0**-8), 0.0, -(2.0**-9)]
    again = sender.encode(move)  # Twice the move: all of them show.
    assert decode(compressor, again, 5).tolist() == [
        2.0**-8, 2.0**-9 + 2.0**-20, -(2.0**-7), 2.0**-40, -(2.0**-8)
    ]  # fmt: skip
    assert not sender.residual.any()


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2])
def test_pulseloco_is_its_formula_in_float64(scale: float) -> None:
    """And loses nothing; torch rounds to bfloat16."""
    numel, compressor = 5003, parse_compressor("pulseloco")
    sender, waits = Sender(compressor, numel), np.zeros(numel)
    for step in range(5):
        origin, grad = normal(numel, seed=10 + step, scale=1.0), normal(numel, step, scale)
        sender.state[ORIGIN] = origin
        u = (waits + grad).astype(np.float32)
        after = torch.from_numpy(origin - u).bfloat16()
        shown = (after != torch.from_numpy(origin).bfloat16()).numpy()
        payload = sender.encode(grad)
        assert payload.nbytes == 4 * -(-numel // 32) + 4 * shown.sum()
        assert np.array_equal(decode(compressor, payload, numel), np.where(shown, u, 0.0))
        waits = np.where(shown, 0.0, u)
        assert np.array_equal(sender.residual, waits)


def noise(numel: int, seed: int = 0, start: int = 0) -> np.ndarray:
    """Returns what is drawn for elements, `(numel,) uint16`."""
    words = np.empty((numel + 1) // 2, np.uint32)
    draw.fill(start, *draw.halves(seed), words)
    return words.view(np.uint16)[:numel]


def test_draws_are_uniform_and_differ_between_seeds() -> None:
    first, second = (noise(20_000, seed) / 65536.0 for seed in (1, 1 << 32))
    assert np.array_equal(noise(100, 7, start=2048), noise(2148, 7)[2048:])
    for values in (first, second):
        assert abs(values.mean() - 0.5) < 0.01
        assert abs(values.var() - 1 / 12) < 0.003
        for lag in (1, 2, 256, 2048):
            assert abs(np.corrcoef(values[lag:], values[:-lag])[0, 1]) < 0.03
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert counts.min() > 850
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    # lowbias32's steps by hand for index 1 of seed 0.
    x = 0x9E3779B1
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    assert int(draw.bits_32(np.uint32(1), np.uint32(0), np.uint32(0))) == x ^ x >> 16
