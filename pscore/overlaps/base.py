"""The protocol of an overlap: the start of a worker's next round, and the landing of the answer.

In a mode with rounds a worker pushes its move, D_i = s_i - x_i (s_i: the weights at the start of
the round, its `origin`; x_i: those at its end), and the shards step with the mean D of the moves:
(W', V') = outer(W, V; D). With an overlap it does not wait for W'. `update`, at the end of a round,
sets the weights and the origin from which the next one starts. The answer W' lands `delay` steps
into that round; `land` then decides what it changes. One file each.

A worker may follow the shards' momentum: V' is computed from two landed weights, because a step of
the outer optimizer can be solved for its gradient (`Optimizer.infer`). An error of V in it shrinks
by m / (1 + m) a round. Where an update was missed (backup workers), V comes with the next pull.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pscore.local.base import LocalSlice, LocalUpdate, optimizer_state
from pscore.optimizers.base import DeviceStep, SliceStep

LANDED = "landed"  # In `LocalSlice.state`: the newest global weights, (numel,) float32.


class Overlap(LocalUpdate):
    """One kind of start of a round, without the answer to the round before.

    Attributes:
        name: Its name in `OVERLAPS`.
        follows: Whether it needs the shards' momentum.
        takes_all: Whether it needs the move of every worker in every update.
        mixes: Whether a move holds a part of the move before it.
    """

    follows: ClassVar[bool] = False
    takes_all: ClassVar[bool] = False
    mixes: ClassVar[bool] = False

    @abstractmethod
    def update(self, part: LocalSlice, grad: Any) -> None:
        """Ends a round: writes the start of the next one into the weights and the origin.

        Args:
            part: The slice; `weights` are those at the end of the round.
            grad: `(numel,) float32` tensor, the worker's move D_i; it is kept.
        """

    @abstractmethod
    def land(self, part: LocalSlice, pulled: Any, mean: Any) -> None:
        """Applies the global weights that hold the last round, in the middle of the next one.

        Args:
            part: The slice; `state["landed"]` still holds the weights before that update.
            pulled: `(numel,) float32` tensor on the slice's device, the new global weights.
            mean: Likewise, the mean D of the workers' moves in that round; None if this overlap
                does not follow the shards, or an update was missed.
        """

    def needs_state(self, part: LocalSlice) -> bool:
        """Returns whether the next pull has to bring the optimizer's state: it is not known."""
        return self.follows and LANDED not in part.state

    def rebase(self, part: LocalSlice, weights: Any, state: Sequence[Any], version: int) -> None:
        """Lands an answer, or starts from it if no round has ended without one."""
        pulled = weights.to(part.weights.device)
        if not part.num_local:
            part.weights.copy_(pulled)
            part.origin.copy_(pulled)
            self._take(part, state)
        else:
            self.land(part, pulled, self._follow(part, pulled, state, version))
        if self.follows and (state or not part.num_local or version == part.version + 1):
            self._keep(part, LANDED, pulled)

    def _take(self, part: LocalSlice, state: Sequence[Any]) -> None:
        """Stores the shards' optimizer state, if it has come."""
        if self.follows and state:
            for kept, pulled in zip(optimizer_state(part), state, strict=True):
                kept.copy_(pulled)

    def _follow(
        self, part: LocalSlice, pulled: Any, state: Sequence[Any], version: int
    ) -> Any | None:
        """Makes the shards' last change of the momentum; returns the mean move, or None."""
        if not self.follows:
            return None
        before = part.state.get(LANDED)
        mean = None
        if before is not None and version == part.version + 1:
            hyper = part.past[0]  # The push's own.
            mean = part.optimizer.infer(before, pulled, optimizer_state(part), part.segments, hyper)
        elif before is not None:
            del part.state[LANDED]  # An update was missed: the state comes with the next pull.
        self._take(part, state)
        return mean

    @staticmethod
    def _keep(part: LocalSlice, name: str, values: Any) -> None:
        """Copies values into the array `name` of the slice's state."""
        if name not in part.state:
            part.state[name] = values.clone()
        else:
            part.state[name].copy_(values)


def step_outer(part: LocalSlice, weights: Any, grad: Any, state: Sequence[Any], out: Any) -> None:
    """Makes one step of the shards' optimizer from `weights` into `out`; `state` is changed.

    On the CPU it has the bits of the shards' own step of one worker with weight 1.

    Args:
        part: The slice, with the hyper-parameters of the round's push.
        weights: `(numel,) float32` tensor; kept unless it is `out`.
        grad: Likewise, the worker's estimate of the mean move.
        state: Arrays of the optimizer's state, likewise.
    """
    counts = part.counts.copy()
    counts[:] = 1  # The state is the shards': it is never one of before the first step.
    active = part.active.copy()
    active[:] = 1
    if out.device.type != "cpu":
        out.copy_(weights)
        part.optimizer.step_device(
            DeviceStep(
                weights=out,
                grad=grad,
                state=state,
                segments=part.segments,
                counts=counts,
                active=active,
                hyper=part.hyper,
                kernels=part.kernels,
            )
        )
        return
    part.optimizer.step(
        SliceStep(
            weights=weights.numpy(),
            out=out.numpy(),
            grad=grad.numpy(),
            scale=1.0,
            state=[array.numpy() for array in state],
            segments=part.segments,
            counts=counts,
            active=active,
            hyper=part.hyper,
        )
    )
