"""On a real device: payloads, residuals and weights are the CPU's, and nobody waits for them."""

import numpy as np
import pytest
import torch

from pscore.compressors import Compressor, parse_compressor
from pscore.cuda import choice
from pscore.cuda import local as device_local
from pscore.cuda.base import Encoder
from pscore.cuda.encoders import KernelEncoder, Launch, can_encode
from pscore.cuda.plain import TorchEncoder
from pscore.cuda.runtime import advice, launcher
from pscore.errors import GradientError
from pscore.local import LocalSlice, LocalUpdate
from pscore.local.dc import DC, AdaptiveDC
from pscore.local.glu import GLU
from pscore.local.mirror import Mirror
from pscore.local.secant import Secant
from pscore.local.sgd import PlainSGD
from pscore.partition import make_layout
from pscore.types import ByteArray, FloatArray, Push, TensorSpec, Verdict
from psworker.compression.error_feedback import Feedback
from psworker.compression.on_gpu import DeviceFeedback, DeviceSide
from psworker.model.copies import copies_of
from psworker.model.finite import FiniteCheck
from tests.golden.compressors.vectors import gradient
from tests.unit.pscore.compressors.cases import EXTREMES, NAMES, Sender
from tests.unit.pscore.cuda import shim
from tests.unit.pscore.cuda.test_kernels import SIZES, aligned
from tests.unit.pscore.cuda.test_local import NUMEL, normal, parts

ENCODED = [name for name in NAMES if can_encode(parse_compressor(name))]
LARGE = 1 << 20
TENSORS = [TensorSpec(name="weight", shape=(50_000, 2), dtype="float32", compress=True)]
LAYOUT = make_layout(TENSORS, 1)
SLICE = LAYOUT.slices[0].numel
SLEEP_CYCLES = 1_000_000_000  # Half a second or so.


@pytest.fixture(scope="module")
def launch(device: torch.device) -> Launch:
    if device.type == "cpu":
        return shim.launcher(shim.build())
    found = launcher(device)
    if found is None:
        pytest.fail(advice(torch.version.cuda))
    return found


@pytest.fixture(params=["kernels", "torch"])
def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> type[Encoder]:
    """The encoder: kernels, or the forms in torch where CuPy is missing."""
    found = launch if request.param == "kernels" else None
    monkeypatch.setattr(choice, "launcher", lambda _: found)
    monkeypatch.setattr(device_local, "launcher", lambda _: found)
    return TorchEncoder if found is None else KernelEncoder


def encoder_of(compressor: Compressor, numel: int, device: torch.device) -> Encoder:
    encoder = choice.make_encoder(compressor, numel, device)
    assert encoder is not None
    return encoder


@pytest.mark.parametrize("numel", [*SIZES, LARGE, LARGE + 77])
@pytest.mark.parametrize("name", ENCODED)
def test_payload_and_state_are_the_cpus(
    device: torch.device, way: type[Encoder], name: str, numel: int
) -> None:
    if device.type == "cpu" and numel >= LARGE:
        pytest.skip("takes minutes on the CPU")
    compressor = parse_compressor(name)
    sender, encoder = Sender(compressor, numel), encoder_of(compressor, numel, device)
    assert type(encoder) is way
    for step in range(3):
        grad = gradient(numel, step)
        expected = sender.encode(grad, seed=1 << 63 | step, step=step)
        encoder.encode(aligned(grad).to(device), seed=1 << 63 | step, step=step)
        assert_same(encoder, expected, sender)


def assert_same(encoder: Encoder, expected: ByteArray, sender: Sender) -> None:
    """Compares the payload that was made last, and the state, bit for bit."""
    payload = encoder.finish(encoder.sent.cpu().numpy())
    assert payload.tobytes() == expected.tobytes()
    for key, value in sender.state.items():
        found: FloatArray = encoder.state[key].cpu().numpy()
        assert np.array_equal(found.view(np.uint32), value.view(np.uint32))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("extreme", EXTREMES)  # Denormals among them, which -ftz=true flushes.
@pytest.mark.parametrize("name", [name for name in ENCODED if "nesterov" not in name])
def test_extremes_are_the_cpus(device: torch.device, name: str, extreme: str) -> None:
    compressor, grad = parse_compressor(name), EXTREMES[extreme]
    sender, encoder = Sender(compressor, len(grad)), encoder_of(compressor, len(grad), device)
    for step, sent in enumerate((grad, -grad)):
        expected = sender.encode(sent, seed=1 << 63 | step, step=step)
        encoder.encode(aligned(sent).to(device), seed=1 << 63 | step, step=step)
        assert_same(encoder, expected, sender)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["2bit", "topk(ratio=0.01, select=sampled)", "dgc"])
def test_error_feedback_on_a_stream_of_its_own(device: torch.device, name: str) -> None:
    compressor = parse_compressor(name)
    host = Feedback(compressor, SLICE, "job/0/0/0")
    other = DeviceFeedback(encoder_of(compressor, SLICE, device), copies_of(device), host.key)
    check = FiniteCheck(LAYOUT, 0, device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The encoder's memory was cleared on the current stream.
    stream.wait_stream(torch.cuda.current_stream(device))
    for step in range(6):
        push, grad = Push(worker=0, step=step, base_version=0), gradient(SLICE, step)
        with torch.cuda.stream(stream):
            ready = other.start(push, aligned(grad).to(device), check)
        assert bytes(ready()) == bytes(host.encode(push, grad))
        verdict = Verdict.TOO_LATE if step % 3 == 1 else Verdict.ACCEPTED
        host.settle(verdict)
        with torch.cuda.stream(stream):
            other.settle(verdict)
            stream.synchronize()
        for key, value in host.state.items():
            assert np.array_equal(other.state[key], value)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["none", *ENCODED, "dgc(clip=1.0)"])
def test_nobody_waits_for_the_device_and_a_nan_is_neither_sent_nor_kept(
    device: torch.device, name: str
) -> None:
    compressor, host = parse_compressor(name), np.zeros(LAYOUT.numel, np.float32)
    side = DeviceSide(LAYOUT, compressor, host, device)
    assert torch.from_numpy(host).is_pinned() == (device.type == "cuda")
    plain = Feedback(compressor, SLICE, "job/0/0/0")
    kept = None if compressor.is_raw else side.place(0, Feedback(compressor, SLICE, plain.key))
    for step in range(6):
        push, grad = Push(worker=0, step=step, base_version=0), gradient(SLICE, step)
        there = aligned(grad).to(device)
        if step % 2:
            there[SLICE // 2] = float("nan")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            if step > 1:  # Before, memory is allocated and kernels are compiled.
                torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            ready = side.payload(0, push, there, kept, flush=False)
            if step > 1:
                assert not torch.cuda.current_stream(device).query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step % 2:
            with pytest.raises(GradientError, match="'weight' holds 1 NaN or Inf"):
                ready()
            continue
        payload = bytes(ready())
        if kept is None:
            assert payload == grad.tobytes()
            continue
        assert payload == bytes(plain.encode(push, grad))
        kept.settle(Verdict.ACCEPTED)
        plain.settle(Verdict.ACCEPTED)
        for key, value in plain.state.items():
            assert np.array_equal(kept.state[key], value)


def on(device: torch.device, part: LocalSlice) -> LocalSlice:
    part.weights = part.weights.to(device)
    part.kernels = device_local.kernels_for(part.weights)
    return part


@pytest.mark.parametrize(
    "update",
    [PlainSGD(0.7), GLU(), Secant(), DC(), AdaptiveDC(decay=0.5), Mirror("kept")],
    ids=lambda update: update.name,
)
def test_local_updates_are_the_cpus(
    device: torch.device, way: type[Encoder], update: LocalUpdate
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
        if way is KernelEncoder:
            assert np.array_equal(found.view(np.uint32), host.weights.numpy().view(np.uint32))
        else:  # On a GPU torch multiplies and adds in one rounding.
            np.testing.assert_allclose(found, host.weights.numpy(), rtol=1e-5, atol=1e-6)
