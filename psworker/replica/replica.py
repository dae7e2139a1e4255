"""One worker's steps as a state machine: it sends pushes and pulls, and yields when it must wait.

A `Replica` holds one worker's copy of the weights and follows the rule's plan. It has no threads
and no network: it sends through a `PushPull`, and where it has to wait it yields the slice whose
pull it needs; its driver resumes it when that pull has landed. The optimizer wrapper drives it with
real shards; the simulator drives many replicas in one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from pscore.local.base import LocalSlice
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.rules.base import Plan, Rule
from pscore.types import Origin, Push, Role, SegmentTable
from psworker.replica.clocks import Clocks
from psworker.replica.ports import PullBuffer, PushPull
from psworker.replica.pulls import Pulls
from psworker.replica.rounds import Round, not_finite

Waits = Generator[int, None, None]


class Replica:
    """One worker's copy of the weights, slice by slice.

    In a mode whose workers run the user's own optimizer between rounds, the replica's driver makes
    that step on the weights before it calls `finish`; the push then carries the weights' move.

    Attributes:
        parts: The slices, by index.
        step: Completed steps of training, which is the 0-based number of the step under way.
        clocks: The pushes of each slice.
        is_ending: Whether `finish` has begun to end a step, and has not ended it.
        around_update: Returns a context manager that each local update of a slice runs in; called
            with the slice's index and the step.
    """

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        optimizer: Optimizer,
        num_groups: int,
        weights: torch.Tensor,
        rank: int,
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
            own: The slices that it pushes and pulls, in order; None: all.
        """
        self.rule = rule
        self.rank = rank
        self.own: Sequence[int] = range(len(layout.slices)) if own is None else own
        self.step = 0
        self.is_ending = False
        self.around_update: Callable[[int, int], AbstractContextManager[None]] = _unobserved
        self.local = rule.local_update()
        self.weights = weights
        self.parts = [
            LocalSlice(
                weights=weights[spec.start : spec.stop],
                segments=SegmentTable.of(spec),
                optimizer=optimizer,
                hyper=np.zeros((num_groups, len(optimizer.hyper_names))),
                active=np.ones(len(spec.segments), dtype=np.int64),
                counts=np.zeros(len(spec.segments), dtype=np.int64),
            )
            for spec in layout.slices
        ]
        self.clocks = Clocks(rule, self.parts, self.own)
        places = [itertools.count() for _ in range(layout.num_shards)]
        self._places = [next(places[spec.shard]) for spec in layout.slices]  # In its shard.
        self._num_state = len(optimizer.state_names)
        self._round = Round(layout, weights, pushes_moves=bool(rule.outer_optimizer))
        self._pulls = Pulls(self.parts, self._num_state, self.local)

    # ----- one step

    def plan(self) -> Plan:
        """Returns the plan of the step under way."""
        return self.rule.plan(self.step)

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
        leave. During backward, which reads the weights, they land in other memory. In an
        asynchronous mode the pull waits for the end of backward, for newer weights.

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
        pulls = self._pulls
        assert index in pulls.early or pulls.has_landed(index)
        self._send(index, Role.GRADIENT, grad, present, samples, push_pull)
        is_time = self.rule.by_step or not in_backward
        if plan.pulls(self._places[index]) and index not in pulls and is_time:
            with_state = self._wants_state(plan)
            # Pulled state lands in its final place after the local update, if there is room; in
            # shared memory the later pull costs little.
            if with_state and pulls.has_state_room(index, push_pull):
                return
            clock = self.clocks.next_push(index) + 1
            oldest = self.clocks.oldest_version(clock)
            pulls.send(
                *(index, clock, oldest, push_pull),
                with_state=with_state,
                early=True,
                in_use=in_backward,
            )

    def land(self, index: int) -> Waits:
        """Waits until an earlier step's pull of a slice has landed; does not apply it yet."""
        if index not in self._pulls.early and not self._pulls.has_landed(index):
            yield index

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
        plan, self.is_ending = self.plan(), True
        if plan.inner:
            self._round.add_step(samples)
        if plan.push is Role.GRADIENT:
            self.clocks.pushed()
        # A pull that only a later step waits for must have landed when its slice is pushed again,
        # and backward, which decides when that is, ends with the front. Unless it was sent along
        # with the push, it is sent as soon as the previous one has been applied, so that the
        # connection from the shard is never idle.
        with_state = plan.pull and self._wants_state(plan)
        order = self.front_first() if plan.block else self.own
        for index in order:
            yield from self.land(index)
            self._rebase(index)
            if plan.local:
                self._update(index, grads[index])
            if plan.pulls(self._places[index]) and plan.push is not Role.DELTA:
                self._pull(index, push_pull, with_state=with_state)
        if plan.push is Role.DELTA:
            self._push_moves(grads, push_pull)
            if plan.pull:
                for index in order:
                    self._pull(index, push_pull, with_state=with_state)
        self._pulls.early.clear()
        self.step += 1
        if plan.block:
            yield from self.settle()
        self.is_ending = False

    def end_round(self, grads: Sequence[torch.Tensor], push_pull: PushPull) -> None:
        """Pushes the weights' moves of a round that is still open; training ends after it.

        Args:
            grads: Memory for the moves, as for `finish`.
            push_pull: Sends them.
        """
        if self.num_inner:
            self._push_moves(grads, push_pull)

    def take_reference(self) -> None:
        """Records the current weights as those of the last pull: a model may have rounded them."""
        self._round.record()

    def fetch(self, min_version: int | None, push_pull: PushPull) -> Waits:
        """Pulls the exact global weights, regardless of the plan.

        Args:
            min_version: The oldest version that will do; None: one with this worker's last push.
            push_pull: Sends pulls.
        """
        self.abandon()
        yield from self.settle()
        self._round.begin()
        with_state = self._num_state > 0 and self.local is not None
        for index in self.front_first():
            self._pull(index, push_pull, min_version, with_state=with_state, exact=True)
        yield from self.settle()
        self._pulls.free_memory()  # The next steps may not need this memory.

    def begin(self, push_pull: PushPull) -> Waits:
        """Joins a job that may have begun: pulls its weights, and the step to begin with.

        In a mode by step that is the newest step that a slice expects next: each slice waits for
        this worker from its answer on, so none can have closed it. Slices that are behind are
        pulled again, at the version of that step, which also tells them the step.
        """
        yield from self.fetch(0, push_pull)
        yield from self.begin_at(self.clocks.first_push(), push_pull)

    def begin_at(self, step: int, push_pull: PushPull) -> Waits:
        """Begins with the push of `step`, the `first_push` of all slices, after a first `fetch`."""
        if not self.rule.by_step:
            return
        counts = self.clocks.counts
        with_state = self._num_state > 0 and self.local is not None
        for index in self.front_first():
            if (counts[index], self.parts[index].version) != (step, step):
                self._pulls.send(
                    *(index, step, step, push_pull), with_state=with_state, exact=True, begins=True
                )
        self.clocks.begin_at(step)
        yield from self.settle()
        self._pulls.free_memory()

    def abandon(self) -> None:
        """Gives up the pulls of an unfinished step: other workers may wait for its other pushes.

        An answer that still arrives is written to memory that nothing reads.
        """
        self._pulls.abandon_early()

    def restart(self) -> None:
        """Starts again in the same job and step; the next pulls bring weights and clocks."""
        self._pulls.restart(self.local)
        self.clocks.restart(self.rule)
        self._round.begin()
        self.is_ending = False
        for part in self.parts:
            part.restart()

    def change(self, rule: Rule) -> None:
        """Continues under another rule at the same step; its pulls bring weights and clocks."""
        assert self._round.pushes_moves == bool(rule.outer_optimizer)
        self.rule, self.local = rule, rule.local_update()
        self.restart()

    def locate(self, origin: Origin) -> None:
        """Sets the step from the count of pushes: others may have continued without this worker.

        Args:
            origin: The push and the step from which steps are counted.
        """
        num_pushes = max(0, self.next_push - origin.clock)
        self.step = self.rule.step_after(origin.step, num_pushes) + self.num_inner

    def settle(self) -> Waits:
        """Waits for all pulls under way and applies them.

        They are applied in the order of arrival, so that one is copied while others arrive.
        """
        for index in self._pulls.indices():
            yield from self.land(index)
            self._rebase(index)

    def peek(
        self, buffers: Sequence[PullBuffer], push_pull: PushPull, *, with_state: bool
    ) -> Waits:
        """Pulls the shards' weights, with this worker's last push in them, into `buffers`.

        Nothing else changes: a pull under way still becomes the base of the next local update.

        Args:
            buffers: One for each slice, in memory that nothing else uses.
            push_pull: Sends pulls.
            with_state: Whether the optimizer's state comes along.
        """
        self.abandon()
        for index in range(len(self.parts)):
            yield from self.land(index)
            clock = self.clocks.count(index) if index in self.own or self.rule.by_step else 0
            oldest = self.clocks.oldest_version(clock)
            push_pull.pull(index, clock, oldest, buffers[index], with_state=with_state)
        yield from range(len(self.parts))

    @property
    def num_inner(self) -> int:
        """Steps of the user's own optimizer since the last pull."""
        return self._round.num_inner

    @property
    def next_push(self) -> int:
        """Step of the next push, in the slice that is furthest behind."""
        return self.clocks.next_of_all()

    @property
    def drifts(self) -> bool:
        """Whether the weights here differ from those of the shards between two pulls."""
        return self.local is not None or self._round.pushes_moves

    def front_first(self) -> Sequence[int]:
        """Returns the slices in the order of the next forward pass: the flat vector is reversed."""
        return self.own[::-1]

    # ----- inside

    def _send(
        self,
        index: int,
        role: Role,
        values: torch.Tensor,
        present: int,
        samples: float,
        push_pull: PushPull,
    ) -> None:
        plan, part = self.plan(), self.parts[index]
        push = Push(
            worker=self.rank,
            step=self.clocks.next_push(index),
            base_version=max(0, part.version),
            role=role,
            samples=samples,
            present=present,
            hyper=part.hyper,
            may_wait=plan.block and plan.pull,
        )
        push_pull.push(index, push, values, compress=plan.compress, flush=plan.flush)

    def _push_moves(self, moves: Sequence[torch.Tensor], push_pull: PushPull) -> None:
        """Pushes the weights of the last pull minus the current ones, weighted by mean samples."""
        bad = self._round.write_moves(self.parts, moves)
        if bad is not None:
            self.is_ending = False
            raise not_finite(bad, self.step)
        samples = self._round.mean_samples
        for index in self.front_first():
            self._send(index, Role.DELTA, moves[index], -1, samples, push_pull)
        self.clocks.pushed()
        self._round.begin()

    def _pull(
        self,
        index: int,
        push_pull: PushPull,
        min_version: int | None = None,
        *,
        with_state: bool,
        exact: bool = False,
    ) -> None:
        """Pulls a slice; without `min_version`, a version with this worker's pushes in it."""
        clock = self.clocks.count(index)
        oldest = self.clocks.oldest_version(clock) if min_version is None else min_version
        self._pulls.send(index, clock, oldest, push_pull, with_state=with_state, exact=exact)

    def _update(self, index: int, grad: torch.Tensor) -> None:
        assert self.local is not None
        part = self.parts[index]
        with self.around_update(index, self.step):
            self.local.update(part, grad)
        part.past.append(part.hyper)
        part.num_made += 1

    def _wants_state(self, plan: Plan) -> bool:
        """Returns whether the pull of this step needs the shard's optimizer state."""
        if self.local is None or self._num_state == 0:
            return False
        ends_warmup = plan.block and not self.rule.plan(self.step + 1).block
        if plan.block and not ends_warmup:
            return False
        return bool(self.local.wants_state(last_of_warmup=ends_warmup))

    def _rebase(self, index: int) -> None:
        """Applies a pull that has landed, if there is one."""
        buffer = self._pulls.pop(index)
        if buffer is None:
            return
        part = self.parts[index]
        state: list[torch.Tensor] = []
        if buffer.counts is not None:
            part.counts[:] = buffer.counts
            state = buffer.state
        if self.local is not None:
            self.local.rebase(part, buffer.weights, state, buffer.version)
        elif buffer.weights.data_ptr() != part.weights.data_ptr():
            part.weights.copy_(buffer.weights, non_blocking=True)
        self._round.record_slice(index, part.weights)
        self.clocks.pulled(index, buffer.clock, buffer.version)
        part.version = buffer.version
        part.past.clear()
        self._pulls.release(index)


def _unobserved(index: int, step: int) -> AbstractContextManager[None]:
    return nullcontext()
