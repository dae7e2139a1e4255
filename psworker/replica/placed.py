"""The place of a replica in its job: how it begins, comes back, and changes its mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.rules.base import Rule
from pscore.types import Origin, Role
from psworker.replica.clocks import Clocks
from psworker.replica.local_weights import LocalWeights
from psworker.replica.ports import PushPull
from psworker.replica.pulls import Pulls, Waits
from psworker.replica.pushes import Pushes
from psworker.replica.rounds import Round
from psworker.replica.slice_ends import SliceEnds

START = Origin()


class PlacedReplica:
    """One worker's copy of the weights, and its place in the job's training.

    Attributes:
        rule: The mode.
        rank: Rank of this worker.
        step: Completed steps of training, which is the 0-based number of the step under way.
        weights: `(layout.numel,) float32`, this worker's copy.
        local: The slices of these weights, and their local update.
        parts: The slices, by index.
        clocks: The pushes of each slice.
        round: The open round, in a mode that has rounds.
        speed: Returns this worker's speed over that of the fastest one, in rounds by speed.
        round_steps: Steps of the round under way in such a mode; None: as planned.
        left_out: Steps of training just before this one that it has left out, in such a round.
        is_ending: Whether `finish` or `end_slice` has begun to end a step, and it is not over.
    """

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        optimizer: Optimizer,
        num_groups: int,
        weights: torch.Tensor,
        rank: int,
        num_workers: int = 1,
        own: Sequence[int] | None = None,
    ) -> None:
        """Starts before the first pull.

        Args:
            layout: The slices.
            rule: The mode.
            optimizer: The optimizer of the shards.
            num_groups: Number of parameter groups.
            weights: `(layout.numel,) float32` on the model's device; changed in place.
            rank: Rank of this worker.
            num_workers: Workers that the job was made for.
            own: The slices that it pushes and pulls, in order; None: all.
        """
        self.rule = rule
        self.rank = rank
        self.own: Sequence[int] = range(len(layout.slices)) if own is None else own
        self.step = 0
        self._planned = rule, 0, rule.plan(0)  # A mode, a step, and its plan.
        self.is_ending = False
        self.speed: Callable[[], float] = _fastest
        self.round_steps: int | None = None
        self.left_out = 0
        self.weights = weights
        self.local = LocalWeights(layout, rule, optimizer, num_groups, weights, num_workers)
        self.parts = self.local.parts
        self.clocks = Clocks(rule, self.parts, self.own)
        self.round = Round(layout, weights, role=_role(rule))
        self.round.divide(self.clocks.num_fragments)
        for index, part in enumerate(self.parts):
            part.origin = self.round.origin(index)
        self._pushes = Pushes(rank, self.clocks, self.parts)
        self._pulls = Pulls(self.local, self.clocks, self.round)
        self._ends = SliceEnds(layout, self.local, self.clocks, self._pulls)

    def front_first(self) -> Sequence[int]:
        """Returns the slices in the order of the next forward pass: the flat vector is reversed."""
        return self.own[::-1]

    @property
    def num_inner(self) -> int:
        """Steps of the user's own optimizer since the last pull."""
        return self.round.num_inner

    @property
    def next_push(self) -> int:
        """Step of the next push, in the slice that is furthest behind."""
        return self.clocks.next_of_all()

    def fetch(self, min_version: int | None, push_pull: PushPull) -> Waits:
        """Pulls the exact global weights, regardless of the plan.

        Args:
            min_version: The oldest version that will do; None: one with this worker's last push.
            push_pull: Sends pulls.
        """
        self.abandon()
        yield from self.settle()
        self.round.begin()
        for index in self.front_first():
            self._pulls.fetch(index, push_pull, min_version)
        yield from self.settle()
        self._pulls.free_memory()  # The next steps may not need this memory.

    def begin(self, push_pull: PushPull, origin: Origin = START) -> Waits:
        """Joins a job that may have begun: pulls its weights, and the step to begin with.

        In a mode by step that is the newest step that a slice expects next: each slice waits for
        this worker from its answer on. Slices that are behind are pulled again, at that version.
        """
        yield from self.fetch(0, push_pull)
        yield from self.begin_at(self.clocks.first_push(), push_pull, origin)

    def begin_at(self, first: int, push_pull: PushPull, origin: Origin = START) -> Waits:
        """Begins with a push, after a first `fetch`.

        With fragments, each begins with the push that follows on the newest round of any.

        Args:
            first: The step of that push, the `first_push` of all slices.
            push_pull: Sends pulls.
            origin: The push and the step from which steps are counted.
        """
        if not self.rule.by_step:
            return
        counts, firsts = self.clocks.counts, [first] * len(self.parts)
        if self.clocks.num_fragments > 1:
            self.step = self.clocks.first_step(origin)
            firsts = self.clocks.pushes_at(self.step, origin)
        for index in self.front_first():
            step = firsts[index]
            if (counts[index], self.parts[index].version) != (step, step):
                self._pulls.fetch(index, push_pull, step, begins_at=step)
        self.clocks.begin_at(firsts)
        yield from self.settle()
        self._pulls.free_memory()

    def abandon(self) -> None:
        """Gives up the pulls of an unfinished step; an answer that still arrives is not read."""
        self._pulls.abandon_early()

    def restart(self) -> None:
        """Starts again in the same job and step; the next pulls bring weights and clocks."""
        self._pulls.restart()
        self._ends.clear()
        self.clocks.restart(self.rule)
        self.round.begin()
        self.is_ending = False
        self.local.restart()

    def change(self, rule: Rule) -> None:
        """Continues under another rule at the same step; its pulls bring weights and clocks."""
        assert self.round.role is _role(rule)
        self.rule = rule
        self.local.change(rule)
        self.clocks.restart(rule)
        self.round.divide(self.clocks.num_fragments)
        self.restart()

    def locate(self, origin: Origin) -> None:
        """Sets the step from the count of pushes: others may have continued without this worker.

        Args:
            origin: The push and the step from which steps are counted.
        """
        if self.clocks.num_fragments > 1:
            self.step = self.clocks.step_at(origin, self.round.num_inner_of)
            return
        num_pushes = max(0, self.next_push - origin.clock)
        self.step = self.rule.step_after(origin.step, num_pushes) + self.num_inner
        self.shorten()

    def shorten(self) -> None:
        """Leaves out steps before the last one of a round by speed; its length is chosen first.

        The step has to be the one that follows on those made in the round.
        """
        self.left_out = 0
        if not self.num_inner:
            schedule = self.rule.schedule
            self.round_steps = None if schedule is None else schedule.round_steps(self.speed())
        if self.round_steps is not None and self.num_inner + 1 >= self.round_steps:
            last = self.rule.step_after(self.step - self.num_inner, 1) - 1
            self.left_out = max(0, last - self.step)
            self.step += self.left_out

    def settle(self) -> Waits:
        """Waits for all pulls under way, and applies them in the order of arrival."""
        yield from self._pulls.settle()


def _fastest() -> float:
    return 1.0


def _role(rule: Rule) -> Role | None:
    """Returns the kind of the push that ends a round; None: the mode has no rounds."""
    return rule.round_role if rule.outer_optimizer else None
