"""One worker's steps as a state machine: it sends pushes and pulls, and yields when it must wait.

A `Replica` holds one worker's copy of the weights and follows the rule's plan. It has no threads
and no network: it sends through a `PushPull`, and where it has to wait it yields the slice whose
pull it needs; its driver resumes it when that pull has landed. The optimizer wrapper drives it with
real shards; the simulator drives many replicas in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.rules.base import Plan, Rule
from pscore.types import Origin, Role
from psworker.replica.clocks import Clocks
from psworker.replica.local_weights import LocalWeights
from psworker.replica.ports import PullBuffer, PushPull
from psworker.replica.pulls import Pulls, Waits
from psworker.replica.pushes import Pushes
from psworker.replica.rounds import Round, not_finite
from psworker.replica.slice_ends import OF_ROUNDS, SliceEnds

START = Origin()


class Replica:
    """One worker's copy of the weights, its steps, and its place in the job's training.

    In a mode whose workers run the user's own optimizer between rounds, the replica's driver makes
    that step on the weights before it calls `finish`; the push then carries the weights' move.

    Attributes:
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
            weights: `(layout.numel,) float32` on the model's device; changed in place.
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

    # ----- its place in the job

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

        That is the newest step that a slice expects next. In a mode by step each slice waits for
        this worker from its answer on. Slices that are behind are pulled again: in a mode by step
        at that version.
        """
        yield from self.fetch(0, push_pull)
        yield from self.begin_at(self.clocks.first_push(), push_pull, origin)

    def begin_at(self, first: int, push_pull: PushPull, origin: Origin = START) -> Waits:
        """Begins with a push, after a first `fetch`.

        With fragments, each begins with the push that follows on the newest round of any.

        Args:
            first: The step of that push, the `first_push` of all slices.
            origin: The push and the step from which steps are counted.
        """
        counts, firsts = self.clocks.counts, [first] * len(self.parts)
        if self.clocks.num_fragments > 1:
            self.step = self.clocks.first_step(origin)
            firsts = self.clocks.pushes_at(self.step, origin)
        for index in self.front_first():
            step, version = firsts[index], self.parts[index].version
            if counts[index] != step or (self.rule.by_step and version != step):
                oldest = self.rule.min_version(step - 1)
                self._pulls.fetch(index, push_pull, oldest, begins_at=step)
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

    # ----- one step

    def plan(self) -> Plan:
        """Returns the plan of the step under way."""
        rule, step, plan = self._planned
        if rule is not self.rule or step != self.step:
            plan = self.rule.plan(self.step)
            self._planned = self.rule, self.step, plan
        return plan

    def push(
        self,
        index: int,
        grad: torch.Tensor,
        present: int,
        samples: float,
        push_pull: PushPull,
        *,
        in_backward: bool = False,
    ) -> None:
        """Sends this step's gradient of one slice, if the plan says so; may precede `finish`.

        A pull of the slice that is under way has to land first (`land`): with this gradient the
        shard can make a newer version than the one requested, and then the answer would depend on
        timing.

        The step's own pull follows at once, so that weights come back while later slices still
        leave. During backward, which reads the weights, they land in other memory; in an
        asynchronous mode the pull waits for its end, for newer weights.

        Args:
            index: The slice; its `hyper` is this step's.
            grad: `(numel,) float32` on the model's device.
            present: Bit i: segment i has a gradient; -1 for all.
            in_backward: Whether backward still reads the weights.
        """
        plan = self.plan()
        if plan.push is not Role.GRADIENT:
            return
        assert self._pulls.has_landed(index)
        self._pushes.send(index, plan, Role.GRADIENT, grad, present, samples, push_pull)
        is_time = self.rule.by_step or not in_backward
        if self._ends.is_pulled(index, plan) and index not in self._pulls and is_time:
            with_state = self.local.wants_state(self.rule, self.step)
            self._pulls.send_early(index, push_pull, with_state=with_state, in_use=in_backward)

    def land(self, index: int) -> Waits:
        """Waits until an earlier step's pull of a slice has landed; does not apply it yet.

        Its copy to a GPU begins, beside the kernels of backward.
        """
        if not self._pulls.has_landed(index):
            yield index
        self._pulls.bring(index)

    def end_slice(self, index: int, grad: torch.Tensor, push_pull: PushPull) -> None:
        """Ends the step of a slice that has been pushed, if the mode waits for no pull of the step.

        It is the slice's part of `finish`, as soon as backward is over: its next weights come while
        this worker waits for earlier pulls of other slices, so that links stay busy.
        """
        plan = self.plan()
        if plan.push is Role.GRADIENT and not plan.block:
            self.is_ending = True
            self._ends.end_early(index, self.step, plan, grad, push_pull)

    def finish(
        self, grads: Sequence[torch.Tensor], push_pull: PushPull, samples: float = 1.0
    ) -> Waits:
        """Ends the step: local update, pulls, and the waits of the plan.

        Args:
            grads: This step's gradient of each slice, `(numel,) float32`. In a mode that pushes the
                weights' moves, they are written into it.
            samples: Weight of this step in the mean of a round.

        Yields:
            The slice whose pull has to land before the generator is resumed.

        Raises:
            GradientError: The weights hold NaN or Inf at the end of a round.
        """
        self.is_ending = True
        plans = self.clocks.plans(self.step)
        ending = [q for q, plan in enumerate(plans) if plan.push in OF_ROUNDS]
        blocks = any(plan.block for plan in plans)
        if plans[0].inner:
            self.round.add_step(samples)
        if plans[0].push is Role.GRADIENT:
            self.clocks.pushed()
        # A pull that only a later step waits for must have landed when its slice is pushed again,
        # and backward, which decides when that is, ends with the front.
        order = self.front_first() if blocks else self.own
        for index in [index for index in order if index not in self._ends]:
            plan = plans[self.clocks.fragments[index]]
            if plan.lands or plan.push in OF_ROUNDS:
                yield from self.land(index)
            self._ends.end(index, self.step, plan, grads[index], push_pull)
        if ending:
            self._push_round(ending, grads, push_pull)
            order = [index for index in order if self.clocks.fragments[index] in ending]
            self._pull_round(plans[ending[0]], order, grads, push_pull)
        self._pulls.early.clear()
        self._ends.clear()
        self.step += 1
        if blocks:
            yield from self.settle()
        self.step = self.clocks.catch_up(self.step)
        self.shorten()
        self.is_ending = False

    def end_round(self, grads: Sequence[torch.Tensor], push_pull: PushPull) -> None:
        """Pushes the moves of rounds that are still open, or the model; training ends after it.

        Args:
            grads: Memory for the moves, as for `finish`.
        """
        is_model = self.round.role is Role.MODEL
        ending = [q for q, num in enumerate(self.round.num_inner_of) if num or is_model]
        if ending:
            self.round.is_last = True
            self._push_round(self.clocks.up_to(ending, self.step), grads, push_pull)

    def peek(
        self, buffers: Mapping[int, PullBuffer], push_pull: PushPull, *, with_state: bool
    ) -> Waits:
        """Pulls the shards' weights, with this worker's last push in them, into `buffers`.

        Nothing else changes: a pull under way, maybe an estimate, still becomes the next base.

        Args:
            buffers: By slice, in memory that nothing else uses.
        """
        self.abandon()
        for index, buffer in buffers.items():
            yield from self.land(index)
            self._pulls.look(index, buffer, push_pull, with_state=with_state)
        yield from buffers

    @property
    def drifts(self) -> bool:
        """Whether the weights here differ from those of the shards between two pulls."""
        return self.local.local_update is not None or self.round.role is not None

    def _pull_round(
        self, plan: Plan, order: Iterable[int], moves: Sequence[torch.Tensor], push_pull: PushPull
    ) -> None:
        """Pulls the answer to a round; with an overlap the next one starts without it."""
        if not plan.pull:
            return
        with_state = self.local.wants_state(self.rule, self.step)
        for index in order:
            self._pulls.send(index, push_pull, with_state=with_state)
            if plan.local:
                self.local.update(index, self.step, moves[index])

    def _weights(self) -> list[float]:
        """Returns the weight of each fragment's move in the mean."""
        schedule = self.rule.schedule
        pairs = [(self.round.mean_samples(q), n) for q, n in enumerate(self.round.num_inner_of)]
        return [mean if schedule is None else schedule.weight(mean, num) for mean, num in pairs]

    def _push_round(
        self, ending: Sequence[int], values: Sequence[torch.Tensor], push_pull: PushPull
    ) -> None:
        """Pushes the moves of some fragments, or the weights, with their weight in the mean."""
        fragments = self.clocks.fragments
        bad = self.round.write(
            self.parts, values, [i for i in range(len(fragments)) if fragments[i] in ending]
        )
        if bad is not None:
            self.is_ending = False
            raise not_finite(bad, self.step)
        plan, role = self.plan(), self.round.pushed_role
        weights = self._weights()
        for index in self.front_first():
            if fragments[index] in ending:
                samples = weights[fragments[index]]
                self._pushes.send(index, plan, role, values[index], -1, samples, push_pull)
        self.clocks.pushed(ending)
        self.round.begin(ending)


def _fastest() -> float:
    return 1.0


def _role(rule: Rule) -> Role | None:
    """Returns the kind of the push that ends a round; None: the mode has no rounds."""
    return rule.round_role if rule.outer_optimizer else None
