"""The protocol of a server optimizer: one file each, on flat slices, the same for shard and worker.

A shard runs it on the mean gradient of a step; a worker in `mirror` runs it on its own gradient.
An optimizer is stateless: its arrays are arguments, so that checkpoints, restarts and workers need
not know it. Segments map parts of a slice to parameters: parameters have groups with
hyper-parameters of their own, and as in torch a parameter without a gradient is not changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from pscore.errors import ConfigError, UnsupportedOptimizerError
from pscore.memory.kernels import addresses, read_only
from pscore.optimizers.driver import KernelStep
from pscore.types import FloatArray, HyperArray, IntArray, SegmentTable

NO_OTHERS: IntArray = np.empty(0, np.int64)
WHOLE: FloatArray = np.ones(1, np.float32)


class SliceStep(NamedTuple):
    """One step of an optimizer on one slice, on the CPU.

    Attributes:
        weights: `(numel,) float32`, the weights before the step; kept unless it is `out`.
        out: `(numel,) float32`, receives the weights after the step, all elements of it: inactive
            segments and padding are copied.
        grad: `(numel,) float32`, the sum of the gradients, or the first of them; not changed.
        scale: Factor on `grad`: one over the sum of the gradients' weights.
        state: One `(numel,) float32` for each of `Optimizer.state_names`.
        segments: The parameters in this slice.
        counts: `(num_segments,) int64`, steps made so far per segment; active ones count up.
        active: `(num_segments,) int64`, not 0 where the segment has a gradient in this step.
        hyper: `(num_groups, len(hyper_names)) float64`.
        state_out: Receives the state after the step, all elements of it, and `state` is kept. None:
            `state` is changed in place.
        others: Further gradients, each `(numel,) float32`, contiguous, to be added to `grad`.
        shares: The factor of each gradient in that sum: of `grad`, then of `others`.
    """

    weights: FloatArray
    out: FloatArray
    grad: FloatArray
    scale: float
    state: Sequence[FloatArray]
    segments: SegmentTable
    counts: IntArray
    active: IntArray
    hyper: HyperArray
    state_out: Sequence[FloatArray] | None = None
    others: Sequence[FloatArray] = ()
    shares: Sequence[float] = (1.0,)

    def for_kernel(self, decoupled: bool = False) -> KernelStep:
        """Returns the step as kernels take it; `weights`, `grad`, `state` as read-only views."""
        return KernelStep(
            read_only(self.weights),
            self.out,
            read_only(self.grad),
            float(self.scale),
            tuple(map(read_only, self.state)),
            tuple(self.state if self.state_out is None else self.state_out),
            self.segments.bounds,
            self.segments.groups,
            self.counts,
            self.active,
            self.hyper,
            *self.sum_for_kernel(),
            decoupled,
        )

    def sum_for_kernel(self) -> tuple[IntArray, FloatArray]:
        """Returns the addresses of the other gradients, and the factors of all, for kernels."""
        if not self.others and self.shares[0] == 1.0:
            return NO_OTHERS, WHOLE
        return addresses(self.others), np.array(self.shares, np.float32)


class DeviceStep(NamedTuple):
    """One step of an optimizer on one slice, in place, on torch tensors of any device; scale 1."""

    weights: Any  # `(numel,) float32`, the weights.
    grad: Any  # `(numel,) float32`; not changed.
    state: Sequence[Any]  # One `(numel,) float32` for each of `Optimizer.state_names`.
    segments: SegmentTable  # As in `SliceStep`, like the next three fields.
    counts: IntArray
    active: IntArray
    hyper: HyperArray
    # Kernels of the device; None: torch's operations make the step.
    kernels: StepKernels | None = None

    def parts(self) -> Iterator[tuple[int, list[float], Any, Any, list[Any]]]:
        """Yields each active segment.

        Yields:
            Its index; its group's row of `hyper`; its elements of weights, gradient and state, as
            views.
        """
        for index in np.flatnonzero(self.active).tolist():
            start, stop = self.segments.bounds[index].tolist()
            yield (
                index,
                self.hyper[self.segments.groups[index]].tolist(),
                self.weights[start:stop],
                self.grad[start:stop],
                [array[start:stop] for array in self.state],
            )


class StepKernels(Protocol):
    """The step of an optimizer as kernels of one device, which starts them without waiting."""

    def sgd_step(self, step: DeviceStep) -> None:
        """Makes the step of `sgd.py` in place, on tensors of the device."""

    def adam_step(self, step: DeviceStep, *, decoupled: bool) -> None:
        """Makes the step of `adam.py` or, with a third state array, of `amsgrad.py`."""


class Optimizer(ABC):
    """One kind of step from a gradient to new weights.

    Attributes:
        name: Its name in `OPTIMIZERS` and on the wire.
        torch_classes: Names of the `torch.optim` classes that it implements, of other classes with
            their module (`lion_pytorch.lion_pytorch.Lion`), each with the flags that are then set
            in every group, of those by which optimizers of the class differ.
        hyper_names: Columns of the hyper-parameters. The first is always `lr`.
        state_names: Its state arrays, each `(numel,) float32`, under torch's own names.
        scalar_names: Those of them that torch keeps as one number for each parameter.
        holds_weights: Whether the value of its table is the model's weights.
        assigns: Whether pushes are values that replace the weights, not gradients.
        adds: Whether `step` takes several gradients (`SliceStep.others`); a class with a `step` of
            its own that does not sets it to False.
        torch_has_step: Whether torch's state holds the number of steps as `step`.
    """

    name: ClassVar[str]
    torch_classes: ClassVar[Mapping[str, frozenset[str]]] = {}
    hyper_names: ClassVar[tuple[str, ...]]
    state_names: ClassVar[tuple[str, ...]] = ()
    scalar_names: ClassVar[tuple[str, ...]] = ()
    holds_weights: ClassVar[bool] = True
    assigns: ClassVar[bool] = False
    adds: ClassVar[bool] = False
    torch_has_step: ClassVar[bool] = False

    @classmethod
    def fixed_flags(cls) -> Mapping[str, bool]:
        """Returns the flags of a torch parameter group that must have these values."""
        return {}

    @classmethod
    def hyper_from_torch(cls, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Returns one row of hyper-parameters from a torch parameter group; flags are 0 or 1.

        Raises:
            UnsupportedOptimizerError: An argument is set that the shards do not implement, or a
                flag of `fixed_flags` has another value; one that is not there has it.
            ConfigError: A hyper-parameter is missing, or no number.
        """
        names = " or ".join(cls.torch_classes)
        if group.get("differentiable"):
            raise UnsupportedOptimizerError(
                f"{names} has differentiable={group['differentiable']!r}, which the shards do not "
                "implement"
            )
        for flag, value in cls.fixed_flags().items():
            if bool(group.get(flag, value)) != value:
                raise UnsupportedOptimizerError(
                    f"{names} has {flag}={group[flag]!r} in one group, or since it was made; the "
                    "shards need one value for all groups and steps"
                )
        betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
        values = {**group, **betas}
        return tuple(_number_of(values, name) for name in cls.hyper_names)

    def keeps_state(self, hyper: HyperArray) -> bool:
        """Returns whether a step with these hyper-parameters leaves the state as it is."""
        return not self.state_names

    @abstractmethod
    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU without holding the GIL."""

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device, scale 1: the worker's `mirror`.

        With `step.kernels` those may make the step; else torch's operations make it.
        """
        raise NotImplementedError(f"{self.name} has no step for device tensors")

    def infer(
        self,
        before: Any,
        after: Any,
        state: Sequence[Any],
        segments: SegmentTable,
        hyper: HyperArray,
    ) -> Any:
        """Solves a step for its gradient: an overlap follows the shards with it.

        Args:
            before: `(numel,) float32` tensor, the weights before one step of the shards.
            after: Likewise, those after it; every segment was active.
            state: The state arrays before it, likewise; changed to those after it.
            hyper: `(num_groups, len(hyper_names)) float64`, of the step.

        Returns:
            The mean gradient of the step, `(numel,) float32`; zero between the segments.
        """
        raise NotImplementedError(f"{self.name} cannot be solved for its gradient")


def _number_of(values: Mapping[str, Any], name: str) -> float:
    """Returns a hyper-parameter of a parameter group as a number."""
    try:
        return float(values[name])
    except (KeyError, TypeError, ValueError):
        found = repr(values[name]) if name in values else "missing"
        raise ConfigError(f"{name} of a parameter group is {found}, must be a number") from None
