"""One worker's steps as a state machine: it sends pushes and pulls, and yields when it must wait.

A `Replica` holds one worker's copy of the weights and follows the rule's plan. It has no threads
and no network: it sends through a `PushPull`, and where it has to wait it yields the slice whose
pull it needs; its driver resumes it when that pull has landed. The optimizer wrapper drives it with
real shards; the simulator drives many replicas in one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pscore.rules.base import Plan
from pscore.types import Role
from psworker.replica.placed import PlacedReplica
from psworker.replica.ports import PullBuffer, PushPull
from psworker.replica.pulls import Waits
from psworker.replica.rounds import not_finite
from psworker.replica.slice_ends import OF_ROUNDS


class Replica(PlacedReplica):
    """The steps of one worker.

    In a mode whose workers run the user's own optimizer between rounds, the replica's driver makes
    that step on the weights before it calls `finish`; the push then carries the weights' move.
    """

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
            samples: Weight in the mean of the step.
            push_pull: Sends it.
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
            push_pull: Sends pulls.
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
            push_pull: Sends them.
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
            push_pull: Sends pulls.
            with_state: Whether the optimizer's state comes along.
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

    # ----- inside

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
