"""Gradients that lie in the flat vector: what `.grad` is then, and how a change is found."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pscore.partition import make_layout
from pscore.types import TensorSpec
from psworker.model.flat import Bucket
from psworker.model.grad_views import NBYTES_MIN

LARGE = (NBYTES_MIN // 4 // 64, 64)


def make(
    shape: tuple[int, ...] = LARGE, *, lends: bool = True
) -> tuple[Bucket, torch.nn.Parameter, np.ndarray]:
    """Returns a bucket of one parameter with a gathered gradient of ones, and the flat vector."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    layout = make_layout([TensorSpec(name="w", shape=shape, dtype="float32")], 1)
    grads = np.zeros(layout.numel, np.float32)
    bucket = Bucket([parameter], layout, grads, lends=lends)
    parameter.grad = torch.ones(shape)
    bucket.gather_grads([0], 0)
    return bucket, parameter, grads


def test_a_lent_gradient_is_the_vector_and_is_not_copied_again() -> None:
    bucket, parameter, grads = make()
    assert bucket.lent.takes(0)
    bucket.lent.lend(0)
    assert parameter.grad is not None
    assert bucket.lent.end_step() == [0]
    assert not bucket.lent.takes(0)
    assert not parameter.grad._is_view()
    torch.autograd.backward(parameter.sum())  # Accumulates in place.
    bucket.gather_grads([0], 1)
    assert grads[: parameter.numel()].tolist() == [2.0] * parameter.numel()
    parameter.grad = None
    assert bucket.lent.end_step() == []


def test_a_gradient_is_lent_as_the_same_tensor_again() -> None:
    bucket, parameter, _ = make()
    bucket.lent.lend(0)
    identity = id(parameter.grad)
    parameter.grad = torch.full(LARGE, 2.0)
    bucket.gather_grads([0], 1)
    bucket.lent.lend(0)
    assert id(parameter.grad) == identity
    assert torch.equal(parameter.grad, torch.full(LARGE, 2.0))


def amp(grad: torch.Tensor) -> None:
    """Unscales as `torch.amp.GradScaler` does, which leaves the version as it was."""
    torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(1), torch.full((1,), 0.5))


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "amp": amp,
    "data": lambda grad: grad.data[-1].zero_(),
    "numpy": lambda grad: grad.numpy().__setitem__((0, 0), 7.0),
    "view": lambda grad: grad.data.view(-1)[5:6].add_(1e-3),
}


@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_leaves_no_trace_is_found(change: str, is_lent: bool) -> None:
    bucket, parameter, _ = make()
    if is_lent:
        bucket.lent.lend(0)
        bucket.lent.stamp(0)
    assert bucket.changed_grad([0]) is None
    assert parameter.grad is not None
    version = parameter.grad._version
    CHANGES[change](parameter.grad)
    assert parameter.grad._version == version
    assert bucket.changed_grad([0]) == 0


def test_nothing_is_lent_that_was_not_asked_for() -> None:
    bucket, _, _ = make(lends=False)
    assert not bucket.lent.takes(0)


def test_a_small_gradient_stays_where_it_is() -> None:
    bucket, _, _ = make((16, 16))
    assert not bucket.lent.takes(0)


@pytest.mark.parametrize("kind", ["none", "sparse", "turned", "graph", "subclass"])
def test_a_gradient_that_is_not_like_the_vector_stays_where_it_is(kind: str) -> None:
    bucket, parameter, _ = make()
    grad = torch.ones(LARGE)
    parameter.grad = {
        "none": None,
        "sparse": grad.to_sparse(),
        "turned": torch.ones(LARGE[::-1]).t(),
        "graph": grad.requires_grad_(),
        "subclass": torch.nn.Parameter(grad, requires_grad=False),
    }[kind]
    assert not bucket.lent.takes(0)


def test_a_lent_gradient_that_was_given_other_memory_is_gathered_from_there() -> None:
    bucket, parameter, grads = make()
    bucket.lent.lend(0)
    assert parameter.grad is not None
    parameter.grad.data = torch.full(LARGE, 3.0)
    assert not bucket.lent.has(0)
    assert bucket.lent.takes(0)
    bucket.gather_grads([0], 1)
    assert (grads[: parameter.numel()] == 3.0).all()
    bucket.lent.lend(0)
    assert bucket.lent.has(0)
    assert parameter.grad.data_ptr() == grads.ctypes.data


def test_a_gradient_that_is_parted_from_the_vector_is_as_it_was() -> None:
    bucket, parameter, grads = make()
    bucket.lent.lend(0)
    bucket.lent.part(0)
    assert not bucket.lent.has(0)
    grads[:] = 5.0
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(LARGE))
    bucket.gather_grads([0], 1)
    assert (grads[: parameter.numel()] == 1.0).all()
