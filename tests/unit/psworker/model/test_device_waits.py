"""How often a GPU is waited for, how much is copied and started; the CPU stands for it."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pscore.compressors import parse_compressor
from pscore.cuda import choice
from pscore.errors import GradientError
from pscore.partition import make_layout
from pscore.rules import RULES
from pscore.types import Push, TensorSpec, Verdict
from psworker.compression.error_feedback import Feedback
from psworker.compression.on_gpu import DeviceSide
from psworker.group.worker_group import WorkerGroup
from psworker.model.copies import Copies, CopyEnd
from psworker.model.finite import first_not_finite
from psworker.model.flat import FlatModel, describe
from psworker.training.gradients import clipping
from tests.golden.compressors.vectors import gradient
from tests.unit.pscore.cuda.shim import build, launcher
from tests.unit.pscore.cuda.test_kernels import aligned

COUNT = 20


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of copies to the host, each of which is waited for."""
    found: list[int] = []
    real = Copies.to_host

    def to_host(self: Copies, *pairs: tuple[torch.Tensor, torch.Tensor]) -> CopyEnd:
        found.append(sum(there.numel() for _, there in pairs))
        return real(self, *pairs)

    monkeypatch.setattr("psworker.model.copies.is_on_device", lambda _: True)
    monkeypatch.setattr(Copies, "to_host", to_host)
    return found


def model() -> FlatModel:
    parameters = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(COUNT)]
    named = [(f"p{index}", one) for index, one in enumerate(parameters)]
    flat = FlatModel(parameters, make_layout(describe(named, [0] * COUNT), 1))
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full((3, 4), float(index))
    parameters[3].grad = None
    return flat


def test_gradients_are_gathered_by_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of torch lets another thread take the interpreter's lock."""
    monkeypatch.setattr("psworker.model.flat.is_on_device", lambda _: True)
    flat = model()
    with Operations() as operations:
        flat.gather_grads([0, 1, 2], 0)
    assert operations.names == ["_foreach_copy_"]
    assert bool((flat.state_view(flat.grads, 2) == 2.0).all())


def test_a_step_among_peers_is_checked_by_one_wait(waits: list[int]) -> None:
    flat = model()
    with Operations() as operations:
        flat.require_finite(7)
    assert waits == [COUNT - 1]
    assert "_local_scalar_dense" not in operations.names[:COUNT]
    grad = flat.parameters[9].grad
    assert grad is not None
    grad[0, 0] = float("inf")
    with pytest.raises(GradientError, match="'p9' holds 1 NaN or Inf of 12 elements at step 7"):
        flat.require_finite(7)


def test_gradients_of_several_types_are_checked_together() -> None:
    parts = [torch.ones(3).bfloat16(), torch.full((2,), 1e300, dtype=torch.float64), torch.ones(2)]
    assert first_not_finite(parts) is None
    parts[2][1] = float("nan")
    assert first_not_finite(parts) == 2


def test_clipping_copies_all_gradients_at_once_and_the_factor_once(waits: list[int]) -> None:
    flat = model()
    before = [None if one.grad is None else one.grad.clone() for one in flat.parameters]
    table: Any = SimpleNamespace(
        rule=RULES["ssgd"](),
        flat=flat,
        session=SimpleNamespace(num_processes=1, group=WorkerGroup()),
        exchange=SimpleNamespace(table=0),
    )
    gradients: Any = SimpleNamespace(
        overlap=SimpleNamespace(changed=lambda _: None),
        attempts=SimpleNamespace(number=1, clipped=0),
    )
    recovery: Any = SimpleNamespace(failure=None)
    with Operations() as operations:
        norm = clipping.clip(table, gradients, recovery, 0.5)
    assert waits == [flat.layout.tensors[0].numel * COUNT]
    assert operations.names.count("_foreach_mul_") == 1
    assert "mul_" not in operations.names
    kept = [one for one in before if one is not None]
    plain = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in kept]
    for one, grad in zip(plain, kept, strict=True):
        one.grad = grad
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(plain, 0.5).item())
    found = [one.grad for one in flat.parameters if one.grad is not None]
    for one, grad in zip(plain, found, strict=True):
        torch.testing.assert_close(grad, cast(torch.Tensor, one.grad))


# Kernels of a push, and torch's operations: an encoder's flags are cleared, the payload is copied.
KERNELS = {
    "none": ["room"],
    "2bit": ["room", "two_bit_adapted"],
    "qsgd": ["room", "qsgd"],
    "fp16": ["room", "fp16"],
    "randomk": ["room", "take", "randomk"],
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_push_starts_two_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, started = launcher(build()), list[str]()

    def launch(kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        started.append(kernel)
        run(kernel, num_blocks, arguments)

    monkeypatch.setattr(choice, "launcher", lambda _: launch)
    monkeypatch.setattr("psworker.model.finite.launcher", lambda _: launch)
    compressor, device = parse_compressor(name), torch.device("cpu")
    spec = TensorSpec(name="weight", shape=(2048,), dtype="float32", compress=True)
    layout = make_layout([spec], 1)
    side = DeviceSide(layout, compressor, np.zeros(layout.numel, np.float32), device)
    kept = None if compressor.is_raw else side.place(0, Feedback(compressor, 2048, "job/0/0/0"))
    push, grad = Push(worker=0, step=0, base_version=0), aligned(gradient(2048, 0))
    with Operations() as operations:
        side.payload(0, push, grad, kept, flush=False)
    assert started == KERNELS[name]
    seen = {
        "slice",
        "alias",
        "view",
        "zeros",
        "lift_fresh",
        "detach",
        "unbind",
    }  # Views and new memory.
    found = [one for one in operations.names if one not in seen]
    assert found.count("zero_") == (not compressor.is_raw)
    assert found.count("copy_") == 1
    assert len(found) <= 3 - compressor.is_raw, found


def test_only_bytes_that_can_be_sent_are_copied(waits: list[int]) -> None:
    """In its warm-up dgc sends up to a quarter of the elements; later a thousandth."""
    compressor, device = parse_compressor("dgc(ratio=0.001, warmup=4)"), torch.device("cpu")
    spec = TensorSpec(name="weight", shape=(20_000,), dtype="float32", compress=True)
    layout = make_layout([spec], 1)
    side = DeviceSide(layout, compressor, np.zeros(layout.numel, np.float32), device)
    kept = side.place(0, Feedback(compressor, 20_000, "job/0/0/0"))
    plain = Feedback(compressor, 20_000, "job/0/0/0")
    for step in range(6):
        push, grad = Push(worker=0, step=step, base_version=0), gradient(20_000, step)
        ready = side.payload(0, push, aligned(grad), kept, flush=False)
        payload = bytes(ready())
        assert payload == bytes(plain.encode(push, grad))
        assert waits[step] >= len(payload) + 16
        for feedback in (kept, plain):
            feedback.settle(Verdict.ACCEPTED)
    assert waits[0] > 20_000
    assert waits[4] == waits[5] == 16 + 4 + 8 * 2 * 20
