"""How often work with all parameters waits for a GPU; the CPU stands for it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pscore.errors import GradientError
from pscore.partition import make_layout
from pscore.rules import RULES
from psworker.model.copies import Copies, Done
from psworker.model.finite import first_not_finite
from psworker.model.flat import FlatModel, describe
from psworker.training import clipping

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

    def to_host(self: Copies, *pairs: tuple[torch.Tensor, torch.Tensor]) -> Done:
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
        session=SimpleNamespace(num_processes=1, group=None),
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
