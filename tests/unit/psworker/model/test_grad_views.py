"""Gradients that are parts of the flat vector: the value of `.grad`, and detected changes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pscore.partition import make_layout
from pscore.placement import WORKER
from pscore.types import TensorSpec
from psworker.model.flat import FlatModel

LARGE = (WORKER.grad_view_nbytes_min // 4 // 64, 64)


def make(
    shape: tuple[int, ...] = LARGE, *, has_views: bool = True
) -> tuple[FlatModel, torch.nn.Parameter, np.ndarray]:
    """Returns a flat model of one parameter with a gathered gradient of ones, and the vector."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    layout = make_layout([TensorSpec(name="w", shape=shape, dtype="float32")], 1)
    grads = np.zeros(layout.numel, np.float32)
    flat_model = FlatModel([parameter], layout, grads, has_views=has_views)
    parameter.grad = torch.ones(shape)
    flat_model.gather_grads([0], 0)
    return flat_model, parameter, grads


def test_a_gradient_view_is_part_of_the_vector_and_is_not_copied() -> None:
    flat_model, parameter, grads = make()
    assert flat_model.views.can_attach(0)
    flat_model.views.attach(0)
    assert parameter.grad is not None
    assert flat_model.views.end_step() == [0]
    assert not flat_model.views.can_attach(0)
    assert not parameter.grad._is_view()
    torch.autograd.backward(parameter.sum())  # Accumulates in place.
    flat_model.gather_grads([0], 1)
    assert grads[: parameter.numel()].tolist() == [2.0] * parameter.numel()
    parameter.grad = None
    assert flat_model.views.end_step() == []


def test_a_gradient_view_is_the_same_tensor_each_time() -> None:
    flat_model, parameter, _ = make()
    flat_model.views.attach(0)
    identity = id(parameter.grad)
    parameter.grad = torch.full(LARGE, 2.0)
    flat_model.gather_grads([0], 1)
    flat_model.views.attach(0)
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


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_leaves_no_trace_is_found(change: str, is_view: bool) -> None:
    flat_model, parameter, _ = make()
    if is_view:
        flat_model.views.attach(0)
        flat_model.views.stamp(0)
    assert flat_model.changed_grad([0]) is None
    assert parameter.grad is not None
    version = parameter.grad._version
    CHANGES[change](parameter.grad)
    assert parameter.grad._version == version
    assert flat_model.changed_grad([0]) == 0


def test_gradients_are_views_only_on_request() -> None:
    flat_model, _, _ = make(has_views=False)
    assert not flat_model.views.can_attach(0)


def test_a_small_gradient_stays_where_it_is() -> None:
    flat_model, _, _ = make((16, 16))
    assert not flat_model.views.can_attach(0)


@pytest.mark.parametrize("kind", ["none", "sparse", "turned", "graph", "subclass"])
def test_a_gradient_that_is_not_like_the_vector_stays_where_it_is(kind: str) -> None:
    flat_model, parameter, _ = make()
    grad = torch.ones(LARGE)
    parameter.grad = {
        "none": None,
        "sparse": grad.to_sparse(),
        "turned": torch.ones(LARGE[::-1]).t(),
        "graph": grad.requires_grad_(),
        "subclass": torch.nn.Parameter(grad, requires_grad=False),
    }[kind]
    assert not flat_model.views.can_attach(0)


def test_a_gradient_view_that_was_given_other_memory_is_gathered_from_there() -> None:
    flat_model, parameter, grads = make()
    flat_model.views.attach(0)
    assert parameter.grad is not None
    parameter.grad.data = torch.full(LARGE, 3.0)
    assert not flat_model.views.has(0)
    assert flat_model.views.can_attach(0)
    flat_model.gather_grads([0], 1)
    assert (grads[: parameter.numel()] == 3.0).all()
    flat_model.views.attach(0)
    assert flat_model.views.has(0)
    assert parameter.grad.data_ptr() == grads.ctypes.data


def test_a_gradient_that_is_parted_from_the_vector_is_as_it_was() -> None:
    flat_model, parameter, grads = make()
    flat_model.views.attach(0)
    flat_model.views.detach(0)
    assert not flat_model.views.has(0)
    grads[:] = 5.0
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(LARGE))
    flat_model.gather_grads([0], 1)
    assert (grads[: parameter.numel()] == 1.0).all()
