"""Error feedback on a device: with the CUDA kernels, run as C++ on the CPU, and with torch."""

import contextlib
import logging
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pscore.compressors import parse_compressor
from pscore.cuda import choice, runtime
from pscore.cuda.base import Encoder
from pscore.cuda.encoders import KernelEncoder, Launch
from pscore.cuda.plain import TorchEncoder
from pscore.errors import GradientError
from pscore.partition import make_layout
from pscore.types import TensorSpec, Verdict
from psworker.compression import on_gpu
from psworker.compression.error_feedback import Feedback
from psworker.compression.on_gpu import DeviceFeedback, DeviceSide
from psworker.model.copies import copies_of
from psworker.model.finite import FiniteCheck
from tests.unit.pscore.cuda.shim import build, launcher
from tests.unit.pscore.cuda.test_kernels import aligned
from tests.unit.psworker.compression.test_error_feedback import NUMEL, gradient, push

CPU = torch.device("cpu")
TENSORS = [TensorSpec(name="weight", shape=(NUMEL // 2, 2), dtype="float32", compress=True)]
LAYOUT = make_layout(TENSORS, 1)


def check() -> FiniteCheck:
    return FiniteCheck(LAYOUT, 0, CPU)


@pytest.fixture(scope="module")
def kernels() -> Launch:
    return launcher(build())


@pytest.fixture(params=["kernels", "torch"])
def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels: Launch
) -> type[Encoder]:
    """Uses the CPU as a device with kernels, or without; returns its encoder."""
    is_torch = request.param == "torch"
    monkeypatch.setattr(choice, "launcher", lambda _: None if is_torch else kernels)
    return TorchEncoder if is_torch else KernelEncoder


def feedback_of(name: str) -> DeviceFeedback:
    encoder = choice.make_encoder(parse_compressor(name), NUMEL, CPU)
    assert encoder is not None
    return DeviceFeedback(encoder, copies_of(CPU), "job/0/0/0")


@pytest.mark.parametrize("name", ["2bit", "topk(ratio=0.1)", "dgc(ratio=0.1)", "natural", "fp16"])
@pytest.mark.usefixtures("way")
def test_a_device_sends_and_keeps_the_same_as_the_host(name: str) -> None:
    host, other = Feedback(parse_compressor(name), NUMEL, "job/0/0/0"), feedback_of(name)
    for step in range(6):
        grad = gradient(step)
        if step == 4:
            ready = other.start_flush(push(step), aligned(grad), check(), torch.zeros(NUMEL))
            payloads = [bytes(host.flush(push(step), grad)), bytes(ready())]
        else:
            ready = other.start(push(step), aligned(grad), check())
            payloads = [bytes(host.encode(push(step), grad)), bytes(ready())]
            assert bytes(ready()) == payloads[1]
        assert payloads[0] == payloads[1]
        verdict = (Verdict.ACCEPTED, Verdict.TOO_LATE, Verdict.DUPLICATE)[step % 3]
        host.settle(verdict)
        other.settle(verdict)
        assert host.state.keys() == other.state.keys()
        for key, value in host.state.items():
            assert np.array_equal(other.state[key], value)


@pytest.mark.usefixtures("way")
def test_state_moves_to_a_device_and_back() -> None:
    feedback = feedback_of("dgc")
    feedback.load("momentum", gradient(1))
    feedback.load("residual", gradient(2))
    feedback.load("something", gradient(3))
    assert np.array_equal(feedback.state["momentum"], gradient(1))
    assert np.array_equal(feedback.state["residual"], gradient(2))


def test_the_way_is_chosen_by_what_there_is_and_told_once(
    way: type[Encoder], caplog: pytest.LogCaptureFixture
) -> None:
    choice._tell.cache_clear()
    with caplog.at_level(logging.INFO, "paceline"):
        for _ in range(3):
            assert type(choice.make_encoder(parse_compressor("2bit"), NUMEL, CPU)) is way
            assert choice.make_encoder(parse_compressor("dgc(clip=1.0)"), NUMEL, CPU) is None
    assert len(caplog.records) == 2
    said = "by torch" if way is TorchEncoder else "by kernels"
    assert f"of gradients on cpu is encoded {said} on the device" in caplog.messages[0]
    assert "is encoded on the host" in caplog.messages[1]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["2bit", "topk(ratio=0.1)", "dgc(ratio=0.1, clip=1.0)", "none"])
def test_a_gradient_that_is_no_number_is_neither_sent_nor_kept(name: str) -> None:
    compressor, numel = parse_compressor(name), LAYOUT.slices[0].numel
    side = DeviceSide(LAYOUT, compressor, np.zeros(numel, np.float32), CPU)
    plain = Feedback(compressor, numel, "job/0/0/0")
    kept = None if compressor.is_raw else side.place(0, Feedback(compressor, numel, plain.key))
    for step in range(6):
        grad = np.resize(gradient(step), numel)
        flush = step == 3
        if step % 2:
            broken = aligned(grad)
            broken[7] = float("nan")
            ready = side.payload(0, push(step), broken, kept, flush=flush)
            for _ in range(2):
                with pytest.raises(GradientError, match="'weight' holds 1 NaN or Inf of 2100"):
                    ready()
            continue
        ready = side.payload(0, push(step), aligned(grad), kept, flush=flush)
        if kept is None:
            assert bytes(ready()) == grad.tobytes()
            continue
        assert bytes(ready()) == bytes(plain.encode(push(step), grad))
        plain.settle(Verdict.ACCEPTED)
        kept.settle(Verdict.ACCEPTED)
        for key, value in plain.state.items():
            assert np.array_equal(kept.state[key], value)


def test_no_kernels_start_on_a_cpu() -> None:
    assert runtime.launcher(CPU) is None


@pytest.mark.parametrize(("cuda", "wheel"), [("12.8", "cupy-cuda12x"), ("13.0", "cupy-cuda13x")])
def test_the_message_names_the_wheel_for_torchs_cuda(cuda: str, wheel: str) -> None:
    said = runtime.advice(cuda)
    assert wheel in said
    assert f"paceline[cuda{cuda[:2]}]" in said


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["2bit", "none"])
def test_a_push_that_was_given_up_leaves_no_trace(name: str) -> None:
    """After a rejoin an old push may still wait for its thread: it is neither kept nor refused."""
    compressor, numel = parse_compressor(name), LAYOUT.slices[0].numel
    side = DeviceSide(LAYOUT, compressor, np.zeros(numel, np.float32), CPU)
    kept = None if compressor.is_raw else side.place(0, Feedback(compressor, numel, "job/0/0/0"))
    broken = aligned(np.resize(gradient(0), numel))
    broken[7] = float("nan")
    old = side.payload(0, push(0), broken, kept, flush=False)
    side.restart()
    if kept is not None:
        kept.settle(Verdict.DUPLICATE)
    assert bytes(old()) == b""
    grad = np.resize(gradient(1), numel)
    new = side.payload(0, push(1), aligned(grad), kept, flush=False)
    assert bytes(old()) == b""
    plain = Feedback(compressor, numel, "job/0/0/0")
    expected = grad.tobytes() if kept is None else bytes(plain.encode(push(1), grad))
    assert bytes(new()) == expected


@pytest.mark.usefixtures("way")
def test_a_late_payload_is_added_on_the_stream_of_the_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The heartbeats settle too. The CPU has no streams: a text stands for one."""
    used: list[str] = []

    @contextlib.contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(on_gpu, "current_stream", lambda _: "of training")
    monkeypatch.setattr(on_gpu, "on_stream", on_stream)
    feedback = feedback_of("2bit")
    feedback.start(push(0), aligned(gradient(0)), check())()
    monkeypatch.setattr(on_gpu, "current_stream", lambda _: "of the heartbeats")
    feedback.settle(Verdict.TOO_LATE)
    assert used == ["of training"]


def test_memory_that_cannot_be_pinned_leaves_no_error_for_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stand-in for CUDA's runtime, which keeps the error of a failed call until a kernel asks."""
    left: list[int] = []

    def register(*_: int) -> int:
        left.append(2)
        return 2

    def kernel(*_: object, **__: object) -> None:
        if left:
            raise RuntimeError(f"CUDA error {left.pop()}")

    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: types.SimpleNamespace(cudaHostRegister=register)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    monkeypatch.setattr(torch, "ones", kernel)
    monkeypatch.setattr(on_gpu, "copies_of", lambda _: None)
    host = np.zeros(LAYOUT.numel, np.float32)
    with caplog.at_level(logging.WARNING, "paceline"):
        DeviceSide(LAYOUT, parse_compressor("none"), host, torch.device("cuda", 0))
    assert not left
    assert "cannot be pinned (CUDA error 2): copies will wait" in caplog.text
