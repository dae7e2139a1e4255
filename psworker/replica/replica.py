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
from psworker.replica.moves import not_finite, write_moves
from psworker.replica.ports import PullBuffer, PushPull
from psworker.replica.pull_buffers import PullBuffers

Waits = Generator[int, None, None]


class Replica:
    """One worker's copy of the weights, slice by slice.

    In a mode whose workers run the user's own optimizer between rounds, the replica's driver makes
    that step on the weights before it calls `finish`; the push then carries the weights' move.

    Attributes:
        parts: The slices, by index.
        step: Completed steps of training, which is the 0-based number of the step under way.
        clocks: For each slice, one more than the `step` of its last push on the wire: pushes made
            so far, or more where steps have closed without this worker.
        num_inner: Steps of the user's own optimizer since the last pull.
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
    ) -> None:
        """Starts before the first pull.

        Args:
            layout: The slices.
            rule: The mode.
            optimizer: The optimizer of the shards.
            num_groups: Number of parameter groups.
            weights: `(layout.numel,) float32` on the model's device; changed in place.
            rank: Rank of this worker.
        """
        self.rule = rule
        self.rank = rank
        self.step = 0
        self.clocks = [0] * len(layout.slices)
        self.num_inner = 0
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
        self._spans = [slice(spec.start, spec.stop) for spec in layout.slices]
        places = [itertools.count() for _ in range(layout.num_shards)]
        self._places = [next(places[spec.shard]) for spec in layout.slices]  # In its shard.
        self._num_state = len(optimizer.state_names)
        self._reference = torch.empty_like(weights) if rule.outer_optimizer else None
        self._samples = 0.0  # Sum of the round so far.
        self._buffers = PullBuffers(self.parts, self._num_state)
        # Pulls sent and not applied yet; in the order of sending, in which they will land.
        self._pending: dict[int, None] = {}
        self._asked: set[int] = set()  # Those that were sent in the step under way.
        # Caches in a mode by step, for all slices; None after a change of a slice.
        self._clock: int | None = None
        self._next: int | None = None

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
        asynchronous mode the pull waits for the end of backward: an earlier one would bring older
        weights.

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
        assert index in self._asked or self._has_landed(index)
        self._send(index, Role.GRADIENT, grad, present, samples, push_pull)
        is_time = self.rule.by_step or not in_backward
        if plan.pulls(self._places[index]) and index not in self._pending and is_time:
            with_state = self._wants_state(plan)
            if with_state and self._awaits_update(index, push_pull):
                return
            clock = self._next_push(index) + 1
            self._ask(
                index, clock, push_pull, early=True, in_use=in_backward, with_state=with_state
            )
            self._asked.add(index)

    def land(self, index: int) -> Waits:
        """Waits until an earlier step's pull of a slice has landed; does not apply it yet."""
        if index not in self._asked and not self._has_landed(index):
            yield index

    def finish(
        self, grads: Sequence[torch.Tensor], push_pull: PushPull, samples: float = 1.0
    ) -> Waits:
        """Ends the step: local update, pulls, and the waits that the plan asks for.

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
            self.num_inner += 1
            self._samples += samples
        if plan.push is Role.GRADIENT:
            self._count()
        # A pull that only a later step waits for must have landed when its slice is pushed again,
        # and backward, which decides when that is, ends with the front. Unless it was sent along
        # with the push, it is sent as soon as the previous one has been applied, so that the
        # connection from the shard is never idle.
        with_state = plan.pull and self._wants_state(plan)
        order = self.front_first() if plan.block else self._indices()
        for index in order:
            yield from self.land(index)
            self._rebase(index)
            if plan.local:
                self._update(index, grads[index])
            if plan.pulls(self._places[index]) and plan.push is not Role.DELTA:
                self._ask(index, self.clock(index), push_pull, with_state=with_state)
        if plan.push is Role.DELTA:
            self._push_moves(grads, push_pull)
            if plan.pull:
                for index in order:
                    self._ask(index, self.clock(index), push_pull, with_state=with_state)
        self._asked.clear()
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
        if self._reference is not None:
            self._reference.copy_(self.weights)

    def fetch(self, min_version: int | None, push_pull: PushPull) -> Waits:
        """Pulls the exact global weights, whatever the plan.

        Args:
            min_version: The oldest version that will do; None: one with this worker's last push.
            push_pull: Sends pulls.
        """
        self.abandon()
        yield from self.settle()
        self.num_inner, self._samples = 0, 0.0
        with_state = self._num_state > 0 and self.local is not None
        for index in self.front_first():
            self._ask(
                index, self.clock(index), push_pull, min_version, with_state=with_state, exact=True
            )
        yield from self.settle()
        self._buffers.clear()  # The next steps may not need this memory.

    def begin(self, push_pull: PushPull) -> Waits:
        """Joins a job that may have begun: pulls its weights, and the step to begin with.

        In a mode by step that is the newest of the steps that the slices expect next: each slice
        waits for this worker from its own answer on, so none can have closed that step. Slices that
        are behind are pulled again, at the version of that step, which also tells them the step.
        """
        yield from self.fetch(0, push_pull)
        if not self.rule.by_step:
            return
        versions = [part.version for part in self.parts]
        step = max(*self.clocks, *versions)
        for index in self.front_first():
            if (self.clocks[index], versions[index]) != (step, step):
                with_state = self._num_state > 0 and self.local is not None
                state = {"with_state": with_state, "exact": True}
                self._ask(index, step, push_pull, step, **state, begins=True)
        self.clocks, self._clock, self._next = [step] * len(self.parts), None, None
        yield from self.settle()
        self._buffers.clear()

    def abandon(self) -> None:
        """Gives up the pulls of an unfinished step: other workers may wait for its other pushes.

        An answer that still arrives is written to memory that nothing reads.
        """
        for index in self._asked:
            self._pending.pop(index, None)
            self._buffers.forget(index)
        self._asked.clear()

    def restart(self) -> None:
        """Starts again in the same job and step; the next pulls bring weights and clocks."""
        self.abandon()
        self._pending.clear()
        self._clock = self._next = None
        self.clocks = [0] * len(self.parts)
        self.num_inner, self._samples, self.is_ending = 0, 0.0, False
        for part in self.parts:
            part.restart()

    def change(self, rule: Rule) -> None:
        """Continues under another rule at the same step; its pulls bring weights and clocks."""
        assert (self._reference is None) == (not rule.outer_optimizer)
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
        for index in list(self._pending):
            yield from self.land(index)
            self._rebase(index)

    def peek(
        self, buffers: Sequence[PullBuffer], push_pull: PushPull, *, with_state: bool
    ) -> Waits:
        """Pulls the shards' weights, with this worker's last push in them, into `buffers`.

        Nothing else changes: a pull under way still becomes the base of the next local update. Its
        values are not used here, since they may be an estimate.

        Args:
            buffers: One for each slice, in memory that nothing else uses.
            push_pull: Sends pulls.
            with_state: Whether the optimizer's state comes along.
        """
        self.abandon()
        for index in self._indices():
            yield from self.land(index)
            clock, version = self.clock(index), self.newest(index)
            push_pull.pull(index, clock, version, buffers[index], with_state=with_state)
        yield from self._indices()

    def newest(self, index: int = 0) -> int:
        """Returns the oldest version of a slice that has this worker's last push in it."""
        return self._newest(self.clock(index))

    def clock(self, index: int) -> int:
        """Returns the number of this worker's pushes that a pull of a slice has to wait for."""
        if not self.rule.by_step:
            return self.clocks[index]
        if self._clock is None:  # Cached: there may be many slices.
            self._clock = min(self.clocks)
        return self._clock

    @property
    def next_push(self) -> int:
        """Step of the next push, in the slice that is furthest behind."""
        return min(self._next_push(index) for index in self._indices())

    @property
    def drifts(self) -> bool:
        """Whether the weights here differ from those of the shards between two pulls."""
        return self.local is not None or self._reference is not None

    def front_first(self) -> range:
        """Returns the slices in the order of the next forward pass: the flat vector is reversed."""
        return range(len(self.parts) - 1, -1, -1)

    # ----- inside

    def _indices(self) -> range:
        return range(len(self.parts))

    def _newest(self, clock: int) -> int:
        return self.rule.min_version(clock - 1) if clock else 0

    def _next_push(self, index: int) -> int:
        """Returns the step of the next push of a slice.

        In a mode by step it is one number for all slices: the oldest step that some slice still
        accepts from a late worker (backup workers). With different numbers two workers could wait
        for each other: A for B's push of one slice, B for A's push of another.
        """
        if not self.rule.by_step:
            return self.clocks[index]
        if self._next is None:
            clocks = zip(self.clocks, self.parts, strict=True)
            self._next = min(max(clock, part.version) for clock, part in clocks)
        return self._next

    def _count(self) -> None:
        """Counts one push of every slice."""
        pushed = [self._next_push(index) + 1 for index in self._indices()]
        self.clocks = [max(pair) for pair in zip(self.clocks, pushed, strict=True)]
        self._clock = self._next = None

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
            step=self._next_push(index),
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
        assert self._reference is not None
        bad = write_moves(self.parts, [self._reference[span] for span in self._spans], moves)
        if bad is not None:  # The round begins anew from the weights of the last pull.
            self.weights.copy_(self._reference)
            self.num_inner, self._samples, self.is_ending = 0, 0.0, False
            raise not_finite(bad, self.step)
        for index in self.front_first():
            samples = self._samples / self.num_inner
            self._send(index, Role.DELTA, moves[index], -1, samples, push_pull)
        self._count()
        self.num_inner, self._samples = 0, 0.0

    def _ask(
        self,
        index: int,
        clock: int,
        push_pull: PushPull,
        min_version: int | None = None,
        *,
        with_state: bool,
        exact: bool = False,
        early: bool = False,
        in_use: bool = False,
        begins: bool = False,
    ) -> None:
        """Pulls a slice; without `min_version`, a version with the first `clock` pushes in it.

        While the weights are `in_use`, or the step's local update is still to come (`early`), the
        answer must not overwrite them: it is copied when it is waited for, or lands in a buffer.
        """
        if index in self._asked:
            return
        oldest = self._newest(clock) if min_version is None else min_version
        room = self._buffers.room(index, self.local, oldest)
        state_room = [] if early else self._buffers.state_room(index, self.local)
        in_use = in_use or (early and self.local is not None)
        copy_on_wait = in_use and room is not None and push_pull.maps_weights(index)
        buffer = self._buffers.prepare(
            index,
            None if in_use and not copy_on_wait else room,
            state_room,
            with_state=with_state,
            exact=exact,
            copy_on_wait=copy_on_wait,
            begins=begins,
        )
        self._pending[index] = None
        push_pull.pull(index, clock, oldest, buffer, with_state=with_state)

    def _awaits_update(self, index: int, push_pull: PushPull) -> bool:
        """Returns whether `finish` sends a pull with state, after the step's local update.

        Then the state can land in its final place; in shared memory the later pull costs little.
        """
        has_room = self._buffers.state_room(index, self.local)
        return bool(has_room) and push_pull.maps_weights(index)

    def _update(self, index: int, grad: torch.Tensor) -> None:
        assert self.local is not None
        part = self.parts[index]
        with self.around_update(index, self.step):
            self.local.update(part, grad)
        part.past.append(part.hyper)
        part.num_made += 1

    def _has_landed(self, index: int) -> bool:
        return index not in self._pending or self._buffers[index].version >= 0

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
        if index not in self._pending or index in self._asked:
            return
        self._pending.pop(index, None)
        part, buffer = self.parts[index], self._buffers[index]
        state: list[torch.Tensor] = []
        if buffer.counts is not None:
            part.counts[:] = buffer.counts
            state = buffer.state
        if self.local is not None:
            self.local.rebase(part, buffer.weights, state, buffer.version)
        elif buffer.weights.data_ptr() != part.weights.data_ptr():
            part.weights.copy_(buffer.weights, non_blocking=True)
        if self._reference is not None:
            self._reference[self._spans[index]].copy_(part.weights)
        if part.version < 0:
            self.clocks[index], self._clock = max(self.clocks[index], buffer.clock), None
        if part.version < 0 or buffer.version > self.clocks[index]:
            self._next = None  # Else the cached value is still right.
        part.version = buffer.version
        part.past.clear()
        self._buffers.release(index)


def _unobserved(index: int, step: int) -> AbstractContextManager[None]:
    return nullcontext()
