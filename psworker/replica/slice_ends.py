"""The end of a step, slice by slice: apply the earlier pull, move the weights, pull again."""

from __future__ import annotations

import itertools

import torch

from pscore.partition import Layout
from pscore.rules.base import Plan
from pscore.types import Role
from psworker.replica.clocks import Clocks
from psworker.replica.local_weights import LocalWeights
from psworker.replica.ports import PushPull
from psworker.replica.pulls import Pulls

OF_ROUNDS = (Role.DELTA, Role.MODEL)  # Pushes that end a round.


class SliceEnds:
    """Ends the step of each slice once, early or with all others."""

    def __init__(self, layout: Layout, local: LocalWeights, clocks: Clocks, pulls: Pulls) -> None:
        """Starts before the first step.

        Args:
            local: Their weights, and the local update of the mode.
        """
        places = [itertools.count() for _ in range(layout.num_shards)]
        self._places = [next(places[spec.shard]) for spec in layout.slices]  # In its shard.
        self._local = local
        self._clocks = clocks
        self._pulls = pulls
        self._ended: set[int] = set()

    def __contains__(self, index: int) -> bool:
        """Returns whether the step of a slice has ended early."""
        return index in self._ended

    def is_pulled(self, index: int, plan: Plan) -> bool:
        """Returns whether a slice is pulled in a step with this plan."""
        return plan.pulls(self._places[index])

    def end(
        self,
        index: int,
        step: int,
        plan: Plan,
        grad: torch.Tensor,
        push_pull: PushPull,
        *,
        clock: int | None = None,
    ) -> None:
        """Ends the step of a slice whose earlier pull has landed.

        Args:
            grad: This worker's gradient, `(numel,) float32`.
            clock: Number of this worker's pushes that the pull waits for; None: all so far.
        """
        if plan.lands or plan.push in OF_ROUNDS:
            self._pulls.apply(index)
        if plan.local and not plan.inner:
            self._local.update(index, step, grad)
        if self.is_pulled(index, plan) and plan.push not in OF_ROUNDS:
            with_state = self._local.wants_state(self._clocks.rule, step)
            self._pulls.send(index, push_pull, clock=clock, with_state=with_state)

    def end_early(
        self, index: int, step: int, plan: Plan, grad: torch.Tensor, push_pull: PushPull
    ) -> None:
        """Ends the step of a slice that has been pushed before other slices are; see `end`."""
        self._clocks.fix()  # A pull that is applied must not change the number of other pushes.
        clock = self._clocks.next_push(index) + 1
        self.end(index, step, plan, grad, push_pull, clock=clock)
        self._ended.add(index)

    def clear(self) -> None:
        """Begins the next step, or the same one again."""
        self._ended.clear()
