"""Encoders of a device make the CPU's payloads and residuals, bit for bit.

The CUDA kernels are run as C++; torch's own operations, which do without kernels, on the CPU.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pscore.compressors import Compressor, parse_compressor
from pscore.compressors.base import RESIDUAL
from pscore.cuda.base import Encoder
from pscore.cuda.encoders import ENCODERS, KernelEncoder, can_encode
from pscore.cuda.plain import FORMS, TorchEncoder
from pscore.errors import GradientError
from pscore.types import FloatArray
from tests.golden.compressors.vectors import gradient
from tests.unit.pscore.compressors.cases import EXTREMES, NAMES, Sender
from tests.unit.pscore.cuda.shim import build, launcher

ENCODED = [
    *(name for name in NAMES if type(parse_compressor(name)) in FORMS),
    "topk(ratio=0.5, select=sampled)",
    "dgc(ratio=0.01, warmup=4, nesterov=True)",
]
SIZES = (1, 5, 16, 33, 1000, 1023, 2047, 2048, 2049, 5003, 9000)


CPU = torch.device("cpu")
Make = Callable[[Compressor, int], Encoder]


@pytest.fixture(scope="module", params=["kernels", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """Returns what makes an encoder on the CPU; torch makes those that have no kernels."""
    if request.param == "torch":
        return lambda compressor, numel: TorchEncoder(compressor, numel, CPU)
    launch = launcher(build())

    def with_kernels(compressor: Compressor, numel: int) -> Encoder:
        if not can_encode(compressor):
            return TorchEncoder(compressor, numel, CPU)
        return KernelEncoder(compressor, numel, CPU, launch)

    return with_kernels


def aligned(values: FloatArray) -> torch.Tensor:
    """Returns a copy that starts at a multiple of 64 bytes, as a slice of the flat vector does."""
    room = torch.zeros(len(values) + 16)
    start = -room.data_ptr() // 4 % 16
    room[start : start + len(values)] = torch.from_numpy(values)
    return room[start : start + len(values)]


def assert_same(make: Make, name: str, grads: list[FloatArray], seed: int = 1 << 63 | 5) -> None:
    """Encodes on both, step by step, and compares payload and state."""
    compressor, numel = parse_compressor(name), len(grads[0])
    sender = Sender(compressor, numel)
    encoder = make(compressor, numel)
    encoder.state = {key: aligned(value) for key, value in sender.state.items()}
    for step, grad in enumerate(grads):
        expected = sender.encode(grad, seed=seed + step, step=step)
        encoder.encode(aligned(grad), seed=seed + step, step=step)
        assert encoder.finish(encoder.sent.numpy()).tobytes() == expected.tobytes()
        for key, value in sender.state.items():
            assert np.array_equal(encoder.state[key].numpy().view(np.uint32), value.view(np.uint32))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", ENCODED)
def test_payload_and_state_are_the_cpus(make: Make, name: str, numel: int) -> None:
    assert_same(make, name, [gradient(numel, step) for step in range(3)])


@pytest.mark.parametrize("name", ENCODED)
def test_numbers_at_the_edges_are_the_cpus(make: Make, name: str) -> None:
    edges = [0.0, -0.0, 1e-45, -1e-42, 1.2e-38, 2.0**-100, 2.0**-101, 6e-8, 2.9e-8, 6.1e-5, 1.0]
    edges += [65504.0, 65519.9, 65520.0, -7e4, 2.0**17, 2.0**18, 1e30, -3e37, 127.5, 0.5, 1.5, 2.5]
    values = np.array(edges, dtype=np.float32)
    tiny = np.array(edges[:8] * 9, dtype=np.float32)
    equal = np.tile(np.array([0.25, -0.25], dtype=np.float32), 2000)
    for grad in (values, tiny, equal, np.zeros(2100, np.float32)):
        assert_same(make, name, [grad, -grad, grad])


def test_a_sample_that_misleads_is_made_up_for(make: Make) -> None:
    numel = 50_000
    grad = np.ones(numel, np.float32)
    grad[:: numel // 4096] = 0.25
    assert_same(make, "topk(ratio=0.01, select=sampled)", [grad, gradient(numel, 1)])
    assert_same(make, "dgc(ratio=0.01)", [grad, gradient(numel, 1)])


@pytest.mark.parametrize("name", ENCODED)
def test_a_refused_gradient_leaves_no_trace(make: Make, name: str) -> None:
    compressor, numel = parse_compressor(name), 3000
    sender = Sender(compressor, numel)
    encoder = make(compressor, numel)
    encoder.state = {key: aligned(value) for key, value in sender.state.items()}
    broken = gradient(numel, 9)
    broken[[0, 1500, 2999]] = np.nan, np.inf, -np.inf
    for step in range(3):
        sender.encode(gradient(numel, step), seed=step, step=step)
        encoder.encode(aligned(gradient(numel, step)), seed=step, step=step)
        encoder.encode(aligned(broken), seed=9, step=step)
        assert encoder.is_refused(encoder.sent.numpy())
        for key, value in sender.state.items():
            assert np.array_equal(encoder.state[key].numpy().view(np.uint32), value.view(np.uint32))
        with pytest.raises(AssertionError, match="reported before"):
            encoder.finish(encoder.sent.numpy())


@pytest.mark.parametrize(
    "name", [name for name in ENCODED if RESIDUAL in parse_compressor(name).state_names]
)
def test_values_beyond_float32_are_reported_and_change_nothing(make: Make, name: str) -> None:
    """One element in the last block of several is too large: all the others stay as they were."""
    compressor, numel = parse_compressor(name), 5000
    encoder, sender = make(compressor, numel), Sender(compressor, numel)
    residual = {key: gradient(numel, 7) for key in sender.state}
    residual["residual"][-3] = 3e38
    encoder.state = {key: aligned(value) for key, value in residual.items()}
    grad = gradient(numel, 1)
    grad[-3] = 3e38
    encoder.encode(aligned(grad), seed=0, step=0)
    with pytest.raises(GradientError, match="beyond float32"):
        encoder.finish(encoder.sent.numpy())
    for key, value in residual.items():
        assert np.array_equal(encoder.state[key].numpy(), value)
        sender.state[key][:] = value
    encoder.encode(aligned(gradient(numel, 2)), seed=3, step=1)  # A good one continues from there.
    expected = sender.encode(gradient(numel, 2), seed=3, step=1)
    assert encoder.finish(encoder.sent.numpy()).tobytes() == expected.tobytes()


# Nesterov's momentum adds a gradient nearly twice: float32 does not hold that of extremes.
@pytest.mark.parametrize("name", [name for name in ENCODED if "nesterov" not in name])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_are_the_cpus(make: Make, name: str, extreme: str) -> None:
    grad = EXTREMES[extreme]
    assert_same(make, name, [grad, -grad])


def test_torch_has_a_form_of_what_has_kernels() -> None:
    assert FORMS.keys() >= ENCODERS.keys()
