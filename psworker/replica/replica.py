"""What a worker does at each step: a state machine that sends, and says what it waits for.

A `Replica` holds one worker's copy of the weights and follows the rule's plan. It knows no threads
and no network: it sends through an `Outbox`, and where it has to wait it yields the slice whose
pull it needs, to be resumed when that pull has landed. The optimizer wrapper drives it with real
shards; the simulator drives many of them in one thread.
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
from psworker.replica.moves import spoilt, write_moves
from psworker.replica.ports import Landing, Outbox
from psworker.replica.pull_buffers import Landings

Waits = Generator[int, None, None]


class Replica:
    """One worker's copy of the weights, slice by slice.

    In a mode whose workers run the user's own optimizer between rounds, whoever drives the replica
    makes that step, on the weights, before `finish`; what is pushed is how far they have moved.

    Attributes:
        parts: The slices, by index.
        step: Steps of training that are behind; 0-based number of the step under way.
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
            optimizer: The server's.
            num_groups: Parameter groups.
            weights: `(layout.numel,) float32` on the model's device; changed in place.
            rank: Of this worker.
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
        self._samples = 0.0  # Of the round so far.
        self._landings = Landings(self.parts, self._num_state)
        # Asked for, and not yet the base; in the order of asking, in which they will come.
        self._pending: dict[int, None] = {}
        self._asked: set[int] = set()  # Those of them that were asked for in the step under way.
        # In a mode by step, for all slices; None once a slice has moved on.
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
        outbox: Outbox,
        *,
        in_backward: bool = False,
    ) -> None:
        """Sends this step's gradient of one slice, if the plan says so; may precede `finish`.

        A pull of the slice that is under way has to land first (`land`): with this gradient the
        shard can make a newer version than the one that the pull is for, and then what it brings
        would depend on who was faster.

        The step's own pull is asked for right behind, so that weights come back while later slices
        still leave. While backward goes on they land beside the weights, which it reads. In an
        asynchronous mode the pull waits for the end of backward: asked for earlier, the weights
        would be older.

        Args:
            index: The slice; its `hyper` is this step's.
            grad: `(numel,) float32` on the model's device.
            present: Bit i: segment i has a gradient; -1 for all.
            samples: Weight in the mean of the step.
            outbox: Where it is sent.
            in_backward: The weights are still being read.
        """
        plan = self.plan()
        if plan.push is not Role.GRADIENT:
            return
        assert index in self._asked or self._has_landed(index)
        self._send(index, Role.GRADIENT, grad, present, samples, outbox)
        is_time = self.rule.by_step or not in_backward
        if plan.pulls(self._places[index]) and index not in self._pending and is_time:
            with_state = self._wants_state(plan)
            if with_state and self._awaits_update(index, outbox):
                return
            clock = self._next_push(index) + 1
            self._ask(index, clock, outbox, early=True, in_use=in_backward, with_state=with_state)
            self._asked.add(index)

    def land(self, index: int) -> Waits:
        """Lets a former step's pull of one slice land; it is not the base yet."""
        if index not in self._asked and not self._has_landed(index):
            yield index

    def finish(self, grads: Sequence[torch.Tensor], outbox: Outbox, samples: float = 1.0) -> Waits:
        """Ends the step: local update, pulls, and the waits that the plan asks for.

        Args:
            grads: This step's gradient of each slice, `(numel,) float32`. Where weights' moves are
                pushed, they are written into it.
            outbox: Where pulls are sent.
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
        # and backward, which decides when that is, ends with the front. Unless it was asked for
        # along with the push, it is asked for as soon as the one before it has been used, so that
        # the way from the shard never lies idle.
        with_state = plan.pull and self._wants_state(plan)
        order = self.front_first() if plan.block else self._indices()
        for index in order:
            yield from self.land(index)
            self._rebase(index)
            if plan.local:
                self._update(index, grads[index])
            if plan.pulls(self._places[index]) and plan.push is not Role.DELTA:
                self._ask(index, self.clock(index), outbox, with_state=with_state)
        if plan.push is Role.DELTA:
            self._push_moves(grads, outbox)
            if plan.pull:
                for index in order:
                    self._ask(index, self.clock(index), outbox, with_state=with_state)
        self._asked.clear()
        self.step += 1
        if plan.block:
            yield from self.settle()
        self.is_ending = False

    def end_round(self, grads: Sequence[torch.Tensor], outbox: Outbox) -> None:
        """Pushes what the weights have moved by in a round that is not over; for the last of all.

        Args:
            grads: As for `finish`: where the moves are written.
            outbox: Where they are sent.
        """
        if self.num_inner:
            self._push_moves(grads, outbox)

    def take_reference(self) -> None:
        """Takes the weights as they are for those of the last pull: a model may round them."""
        if self._reference is not None:
            self._reference.copy_(self.weights)

    def fetch(self, min_version: int | None, outbox: Outbox) -> Waits:
        """Takes the global weights as they are on the shards, whatever the plan.

        Args:
            min_version: The oldest that will do; None: this worker's last push is in it.
            outbox: Where pulls are sent.
        """
        self.abandon()
        yield from self.settle()
        self.num_inner, self._samples = 0, 0.0
        with_state = self._num_state > 0 and self.local is not None
        for index in self.front_first():
            self._ask(
                index, self.clock(index), outbox, min_version, with_state=with_state, exact=True
            )
        yield from self.settle()
        self._landings.clear()  # The next step may do without the memory that this took.

    def begin(self, outbox: Outbox) -> Waits:
        """Takes part in a job that may have begun: takes its weights, and the step to begin with.

        In a mode by step that is the newest of those that the slices would take next: each slice
        waits for this worker from its own answer on, so none can have closed that step. Slices that
        are not there yet are asked again, for the weights of that step, and told.
        """
        yield from self.fetch(0, outbox)
        if not self.rule.by_step:
            return
        versions = [part.version for part in self.parts]
        step = max(*self.clocks, *versions)
        for index in self.front_first():
            if (self.clocks[index], versions[index]) != (step, step):
                with_state = self._num_state > 0 and self.local is not None
                state = {"with_state": with_state, "exact": True}
                self._ask(index, step, outbox, step, **state, begins=True)
        self.clocks, self._clock, self._next = [step] * len(self.parts), None, None
        yield from self.settle()
        self._landings.clear()

    def abandon(self) -> None:
        """Gives up the pulls of a step that is not finished: others may wait for its other pushes.

        An answer that comes all the same finds memory that nobody reads.
        """
        for index in self._asked:
            self._pending.pop(index, None)
            self._landings.forget(index)
        self._asked.clear()

    def restart(self) -> None:
        """Begins anew in the same job, at the same step: pulls bring weights and clocks."""
        self.abandon()
        self._pending.clear()
        self._clock = self._next = None
        self.clocks = [0] * len(self.parts)
        self.num_inner, self._samples, self.is_ending = 0, 0.0, False
        for part in self.parts:
            part.restart()

    def change(self, rule: Rule) -> None:
        """Goes on under another rule at the same step: the next pulls bring weights and clocks."""
        assert (self._reference is None) == (not rule.outer_optimizer)
        self.rule, self.local = rule, rule.local_update()
        self.restart()

    def locate(self, origin: Origin) -> None:
        """Takes the step that its pushes stand for: others may have gone on without this worker.

        Args:
            origin: Where steps are counted from.
        """
        num_pushes = max(0, self.next_push - origin.clock)
        self.step = self.rule.step_after(origin.step, num_pushes) + self.num_inner

    def settle(self) -> Waits:
        """Lets pulls that are still on their way land and takes them as the base.

        What comes first is taken first, so that it is copied while the rest is under way.
        """
        for index in list(self._pending):
            yield from self.land(index)
            self._rebase(index)

    def peek(self, landings: Sequence[Landing], outbox: Outbox, *, with_state: bool) -> Waits:
        """Brings the shards' weights, with this worker's last push in them, into `landings`.

        Nothing else changes: a pull on its way still becomes the base of the next local update,
        as it would have, and it is not what is shown: it may be an estimate.

        Args:
            landings: One for each slice, in memory that nothing else uses.
            outbox: Where pulls are sent.
            with_state: Whether the optimizer's state comes along.
        """
        self.abandon()
        for index in self._indices():
            yield from self.land(index)
            clock, version = self.clock(index), self.newest(index)
            outbox.pull(index, clock, version, landings[index], with_state=with_state)
        yield from self._indices()

    def newest(self, index: int = 0) -> int:
        """Returns the oldest version of a slice that has this worker's last push in it."""
        return self._newest(self.clock(index))

    def clock(self, index: int) -> int:
        """Returns how many pushes of this worker a pull of a slice has to wait for."""
        if not self.rule.by_step:
            return self.clocks[index]
        if self._clock is None:  # Once a step, and not once for each slice: there may be many.
            self._clock = min(self.clocks)
        return self._clock

    @property
    def next_push(self) -> int:
        """The step of the next push: of the slice that is furthest behind."""
        return min(self._next_push(index) for index in self._indices())

    @property
    def drifts(self) -> bool:
        """Whether the weights here are not those of the shards between two pulls."""
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

        In a mode by step it is one number for all slices, the oldest that some slice still takes of
        a worker that was late (backup workers). Were it another number in each slice, two workers
        could wait for each other: A for B's push of one slice, B for A's push of another.
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
        outbox: Outbox,
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
        outbox.push(index, push, values, compress=plan.compress, flush=plan.flush)

    def _push_moves(self, moves: Sequence[torch.Tensor], outbox: Outbox) -> None:
        """Pushes the weights of the last pull minus the weights now, weighed by mean samples."""
        assert self._reference is not None
        bad = write_moves(self.parts, [self._reference[span] for span in self._spans], moves)
        if bad is not None:  # The round begins anew from the weights of the last pull.
            self.weights.copy_(self._reference)
            self.num_inner, self._samples, self.is_ending = 0, 0.0, False
            raise spoilt(bad, self.step)
        for index in self.front_first():
            samples = self._samples / self.num_inner
            self._send(index, Role.DELTA, moves[index], -1, samples, outbox)
        self._count()
        self.num_inner, self._samples = 0, 0.0

    def _ask(
        self,
        index: int,
        clock: int,
        outbox: Outbox,
        min_version: int | None = None,
        *,
        with_state: bool,
        exact: bool = False,
        early: bool = False,
        in_use: bool = False,
        begins: bool = False,
    ) -> None:
        """Asks for a slice; without `min_version`, for one with the first `clock` pushes in it.

        What an answer that needs no memory of its own would overwrite is left alone while weights
        are `in_use`, or the step's local update is still to come (`early`): weights land there when
        they are waited for, or beside it.
        """
        if index in self._asked:
            return
        oldest = self._newest(clock) if min_version is None else min_version
        room = self._landings.room(index, self.local, oldest)
        state_room = [] if early else self._landings.state_room(index, self.local)
        in_use = in_use or (early and self.local is not None)
        is_late = in_use and room is not None and outbox.maps_weights(index)
        landing = self._landings.prepare(
            index,
            None if in_use and not is_late else room,
            state_room,
            with_state=with_state,
            exact=exact,
            is_late=is_late,
            begins=begins,
        )
        self._pending[index] = None
        outbox.pull(index, clock, oldest, landing, with_state=with_state)

    def _awaits_update(self, index: int, outbox: Outbox) -> bool:
        """Whether a pull with state is for `finish` to ask for, behind the step's local update.

        State can land in the place of what it replaces then, and in shared memory the way is short.
        """
        has_room = self._landings.state_room(index, self.local)
        return bool(has_room) and outbox.maps_weights(index)

    def _update(self, index: int, grad: torch.Tensor) -> None:
        assert self.local is not None
        part = self.parts[index]
        with self.around_update(index, self.step):
            self.local.update(part, grad)
        part.past.append(part.hyper)
        part.num_made += 1

    def _has_landed(self, index: int) -> bool:
        return index not in self._pending or self._landings[index].version >= 0

    def _wants_state(self, plan: Plan) -> bool:
        """Whether the shard's optimizer state is needed with the pull of this step."""
        if self.local is None or self._num_state == 0:
            return False
        ends_warmup = plan.block and not self.rule.plan(self.step + 1).block
        if plan.block and not ends_warmup:
            return False
        return bool(self.local.wants_state(last_of_warmup=ends_warmup))

    def _rebase(self, index: int) -> None:
        """Takes a pull that has landed, if there is one."""
        if index not in self._pending or index in self._asked:
            return
        self._pending.pop(index, None)
        part, landing = self.parts[index], self._landings[index]
        state: list[torch.Tensor] = []
        if landing.counts is not None:
            part.counts[:] = landing.counts
            state = landing.state
        if self.local is not None:
            self.local.rebase(part, landing.weights, state, landing.version)
        elif landing.weights.data_ptr() != part.weights.data_ptr():
            part.weights.copy_(landing.weights, non_blocking=True)
        if self._reference is not None:
            self._reference[self._spans[index]].copy_(part.weights)
        if part.version < 0:
            self.clocks[index], self._clock = max(self.clocks[index], landing.clock), None
        if part.version < 0 or landing.version > self.clocks[index]:
            self._next = None  # Else the clock, which is what counts, is as it was.
        part.version = landing.version
        part.past.clear()
        self._landings.release(index)


def _unobserved(index: int, step: int) -> AbstractContextManager[None]:
    return nullcontext()
