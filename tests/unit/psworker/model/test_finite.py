"""NaN and Inf in gradients on a device: found without waiting, reported by name."""

import math
from collections.abc import Iterator

import pytest
import torch

from pscore.errors import GradientError
from pscore.partition import make_layout
from pscore.types import TensorSpec
from psworker.model.finite import FiniteCheck, first_not_finite, is_finite
from tests.unit.pscore.cuda.shim import build, launcher
from tests.unit.pscore.cuda.test_kernels import aligned

TENSORS = [
    TensorSpec(name="weight", shape=(5000,), dtype="float32"),
    TensorSpec(name="bias", shape=(8,), dtype="float32"),
]
LAYOUT = make_layout(TENSORS, 2)  # Slice 0 has the bias and the weight's begin, slice 1 its end.


@pytest.fixture(scope="module", params=["kernels", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks by the kernel, run as C++ on the CPU, or by torch."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "kernels":
            launch = launcher(build())
            patched.setattr("psworker.model.finite.launcher", lambda _: launch)
        yield


def is_refused(check: FiniteCheck, grad: torch.Tensor) -> bool:
    """Starts a check, which is over at once on a CPU, and returns whether it refuses."""
    check.start(grad)
    try:
        check.require_finite(grad, 3)
    except GradientError:
        return True
    return False


def screen_of(index: int) -> tuple[FiniteCheck, torch.Tensor]:
    grad = torch.linspace(-1.0, 1.0, LAYOUT.slices[index].numel) * 3e38
    return FiniteCheck(LAYOUT, index, torch.device("cpu")), aligned(grad.numpy())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("index", [0, 1])
def test_numbers_pass(index: int) -> None:
    check, grad = screen_of(index)
    assert not is_refused(check, grad)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("index", "tensor"), [(0, 0), (0, 1), (1, 0)])
def test_nan_and_inf_are_named(index: int, tensor: int, value: float) -> None:
    check, grad = screen_of(index)
    (segment,) = (part for part in LAYOUT.slices[index].segments if part.tensor == tensor)
    numel = segment.stop - segment.start
    for position in (segment.start, segment.stop - 1, segment.start + numel // 2):
        broken = aligned(grad.numpy())
        broken[position] = value
        check.start(broken)
        message = f"{TENSORS[tensor].name!r} holds 1 NaN or Inf of {numel} elements at step 3; "
        with pytest.raises(GradientError, match=message):
            check.require_finite(broken, 3)
    assert not is_refused(check, grad)  # The next gradient is judged by itself.


def test_the_first_of_several_tensors_is_found() -> None:
    good, bad = torch.ones(5), torch.tensor([1.0, math.nan])
    assert first_not_finite([]) is None
    assert first_not_finite([good, good]) is None
    assert first_not_finite([good, bad, bad]) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finite_values_pass_though_their_sum_is_beyond_float32(bad: float) -> None:
    huge = torch.full((100,), 3e38)
    assert huge.sum() == math.inf
    assert is_finite(huge)
    assert first_not_finite([torch.ones(5), huge]) is None
    broken = huge.clone()
    broken[50] = bad
    assert not is_finite(broken)
    assert first_not_finite([torch.ones(5), huge, broken]) == 2


def test_infinities_do_not_cancel_out() -> None:
    assert not is_finite(torch.tensor([math.inf, -math.inf, 1.0]))
