"""On a real device: the kernels make the CPU's payloads, residuals and weights, bit for bit."""

import numpy as np
import pytest
import torch

from pscore.compressors import parse_compressor
from pscore.cuda.encoders import Encoder, Launch, can_encode
from pscore.cuda.runtime import advice, launcher
from pscore.local import LocalSlice, LocalUpdate
from pscore.local.dc import DC, AdaptiveDC
from pscore.local.glu import GLU
from pscore.local.mirror import Mirror
from pscore.local.sgd import PlainSGD
from pscore.types import FloatArray, Push, Verdict
from psworker.device import DeviceFeedback
from psworker.feedback import Feedback
from tests.golden.compressors.vectors import gradient
from tests.unit.pscore.compressors.cases import NAMES, Sender
from tests.unit.pscore.cuda.test_kernels import SIZES
from tests.unit.pscore.cuda.test_local import NUMEL, normal, parts

pytestmark = pytest.mark.gpu

ENCODED = [name for name in NAMES if can_encode(parse_compressor(name))]
LARGE = 1 << 20


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def launch(device: torch.device) -> Launch:
    found = launcher(device)
    if found is None:
        pytest.fail(advice(torch.version.cuda))
    return found


@pytest.mark.parametrize("numel", [*SIZES, LARGE, LARGE + 77])
@pytest.mark.parametrize("name", ENCODED)
def test_payload_and_state_are_the_cpus(
    device: torch.device, launch: Launch, name: str, numel: int
) -> None:
    compressor = parse_compressor(name)
    sender, encoder = Sender(compressor, numel), Encoder(compressor, numel, device, launch)
    for step in range(3):
        grad = gradient(numel, step)
        expected = sender.encode(grad, seed=1 << 63 | step, step=step)
        encoder.encode(torch.from_numpy(grad).to(device), seed=1 << 63 | step, step=step)
        payload = encoder.finish(encoder.payload.cpu().numpy())
        assert payload.tobytes() == expected.tobytes()
        for key, value in sender.state.items():
            found: FloatArray = encoder.state[key].cpu().numpy()
            assert np.array_equal(found.view(np.uint32), value.view(np.uint32))


@pytest.mark.parametrize("name", ["2bit", "topk(ratio=0.01, select=sampled)", "dgc"])
def test_error_feedback_on_a_stream_of_its_own(
    device: torch.device, launch: Launch, name: str
) -> None:
    compressor = parse_compressor(name)
    host = Feedback(compressor, LARGE, "job/0/0/0")
    other = DeviceFeedback(compressor, LARGE, "job/0/0/0", device, launch)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for step in range(6):
        push, grad = Push(worker=0, step=step, base_version=0), gradient(LARGE, step)
        with torch.cuda.stream(stream):
            ready = other.start(push, torch.from_numpy(grad).to(device))
        assert bytes(ready()) == bytes(host.encode(push, grad))
        verdict = Verdict.TOO_LATE if step % 3 == 1 else Verdict.ACCEPTED
        host.settle(verdict)
        with torch.cuda.stream(stream):
            other.settle(verdict)
            stream.synchronize()
        for key, value in host.state.items():
            assert np.array_equal(other.state[key], value)


def on(device: torch.device, part: LocalSlice) -> LocalSlice:
    part.weights = part.weights.to(device)
    return part


@pytest.mark.parametrize(
    "update",
    [PlainSGD(0.7), GLU(), DC(), AdaptiveDC(decay=0.5), Mirror("kept")],
    ids=lambda update: update.name,
)
def test_local_updates_are_the_cpus(
    device: torch.device, launch: Launch, update: LocalUpdate
) -> None:
    host, other = parts()
    on(device, other)
    for step in range(4):
        pulled, grad = normal(10 + step), normal(step)
        for part, where in ((host, torch.device("cpu")), (other, device)):
            if step % 2 == 0:
                update.rebase(part, pulled, [], 3 * step)
                part.version = 3 * step
            update.update(part, grad.to(where))
        found: FloatArray = other.weights.cpu().numpy()
        assert found.shape == (NUMEL,)
        assert np.array_equal(found.view(np.uint32), host.weights.numpy().view(np.uint32))
