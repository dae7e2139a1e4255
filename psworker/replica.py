"""What a worker does at each step: a state machine that sends, and says what it waits for.

A `Replica` holds one worker's copy of the weights and follows the rule's plan. It knows no threads
and no network: it sends through an `Outbox`, and where it has to wait it yields the slice whose
pull it needs, to be resumed when that pull has landed. The optimizer wrapper drives it with real
shards; the simulator drives many of them in one thread.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pscore.local.base import LocalSlice
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.rules.base import Plan, Rule
from pscore.types import IntArray, Push, SegmentTable


@dataclass(slots=True, kw_only=True)
class Landing:
    """Where a pull lands; on the host, written by whoever receives it."""

    weights: torch.Tensor  # (numel,) float32
    state: list[torch.Tensor]  # One (numel,) float32 for each state array, if asked for.
    version: int = -1
    counts: IntArray | None = None  # With state: optimizer steps of each segment.


class Outbox(Protocol):
    """How a replica sends. Neither call waits."""

    def push(self, index: int, push: Push, grad: torch.Tensor, *, compress: bool) -> None:
        """Sends `(numel,) float32`, which stays unchanged until it has left."""

    def pull(
        self, index: int, clock: int, min_version: int, landing: Landing, *, with_state: bool
    ) -> None:
        """Asks for the weights of a slice."""


Waits = Generator[int, None, None]


class Replica:
    """One worker's copy of the weights, slice by slice.

    Attributes:
        parts: The slices, by index.
        step: Steps finished; 0-based number of the step under way.
        clock: Pushes made per slice: the `step` of the next one on the wire.
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
        self.clock = 0
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
        self._num_state = len(optimizer.state_names)
        self._landings: dict[int, Landing] = {}
        self._pending: set[int] = set()

    # ----- one step

    def plan(self) -> Plan:
        """Returns the plan of the step under way."""
        return self.rule.plan(self.step)

    def push(
        self, index: int, grad: torch.Tensor, present: int, samples: float, outbox: Outbox
    ) -> None:
        """Sends this step's gradient of one slice; may be called before `finish`.

        Args:
            index: The slice; its `hyper` is this step's.
            grad: `(numel,) float32` on the model's device.
            present: Bit i: segment i has a gradient; -1 for all.
            samples: Weight in the mean of the step.
            outbox: Where it is sent.
        """
        plan = self.plan()
        if plan.push is None:
            return
        part = self.parts[index]
        push = Push(
            worker=self.rank,
            step=self.clock,
            base_version=max(0, part.version),
            role=plan.push,
            samples=samples,
            present=present,
            hyper=part.hyper,
        )
        outbox.push(index, push, grad, compress=plan.compress)

    def finish(self, grads: Sequence[torch.Tensor], outbox: Outbox) -> Waits:
        """Ends the step: local update, pulls, and the waits that the plan asks for.

        Args:
            grads: This step's gradient of each slice, `(numel,) float32`.
            outbox: Where pulls are sent.

        Yields:
            The slice whose pull has to land before the generator is resumed.
        """
        plan = self.plan()
        if plan.push is not None:
            self.clock += 1
        for index in self.front_first():
            if index in self._pending:
                yield index
                self._rebase(index)
            if plan.local:
                self.local.update(self.parts[index], grads[index])
        if plan.pull:
            min_version = self.rule.min_version(self.clock - 1)
            with_state = self._wants_state(plan)
            for index in self.front_first():
                self._ask(index, min_version, outbox, with_state=with_state)
        self.step += 1
        if plan.block:
            yield from self.settle()

    def fetch(self, min_version: int, outbox: Outbox) -> Waits:
        """Takes the global weights as they are on the shards, whatever the plan."""
        yield from self.settle()
        with_state = self._num_state > 0 and self.local is not None
        for index in self.front_first():
            self._ask(index, min_version, outbox, with_state=with_state)
        yield from self.settle()

    def settle(self) -> Waits:
        """Lets pulls that are still on their way land and takes them as the base."""
        for index in [index for index in self.front_first() if index in self._pending]:
            yield index
            self._rebase(index)

    def peek(self, target: torch.Tensor, outbox: Outbox) -> Waits:
        """Copies the global weights, with this worker's last push in them, into `target`.

        Nothing else changes: what is on its way still becomes the base of the next local update.

        Args:
            target: `(layout.numel,) float32`.
            outbox: Where pulls are sent.
        """
        version = self.newest()
        landings = {}
        for index in self.front_first():
            if index in self._pending:
                landings[index] = self._landings[index]
            else:
                weights = self._landing(index, with_state=False).weights
                landings[index] = Landing(weights=weights, state=[])
                outbox.pull(index, self.clock, version, landings[index], with_state=False)
        start = 0
        for index, part in enumerate(self.parts):
            yield index
            stop = start + len(part.weights)
            target[start:stop].copy_(landings[index].weights)
            start = stop

    def newest(self) -> int:
        """Returns the oldest version that has this worker's last push in it; 0 is any."""
        return self.rule.min_version(self.clock - 1) if self.clock else 0

    def front_first(self) -> range:
        """Returns the slices in the order of the next forward pass: the flat vector is reversed."""
        return range(len(self.parts) - 1, -1, -1)

    # ----- inside

    def _ask(self, index: int, min_version: int, outbox: Outbox, *, with_state: bool) -> None:
        landing = self._landing(index, with_state=with_state)
        self._pending.add(index)
        outbox.pull(index, self.clock, min_version, landing, with_state=with_state)

    def _wants_state(self, plan: Plan) -> bool:
        """Whether the shard's optimizer state is needed with the pull of this step."""
        if self.local is None or self._num_state == 0:
            return False
        ends_warmup = plan.block and not self.rule.plan(self.step + 1).block
        if plan.block and not ends_warmup:
            return False
        return bool(self.local.wants_state(last_of_warmup=ends_warmup))

    def _landing(self, index: int, *, with_state: bool) -> Landing:
        """Returns where the next pull of a slice lands; allocated once.

        Without a local update nothing reads the weights while a pull is on its way, so it lands
        right in them.
        """
        part = self.parts[index]
        on_host = part.weights.device.type == "cpu"
        if index not in self._landings:
            direct = self.local is None and on_host
            weights = part.weights if direct else _host_buffer(part.weights)
            self._landings[index] = Landing(weights=weights, state=[])
        landing = self._landings[index]
        if with_state and not landing.state:
            landing.state = [_host_buffer(part.weights) for _ in range(self._num_state)]
        return landing

    def _rebase(self, index: int) -> None:
        """Takes a pull that has landed."""
        self._pending.discard(index)
        part, landing = self.parts[index], self._landings[index]
        state: list[torch.Tensor] = []
        if landing.counts is not None:
            part.counts[:] = landing.counts
            state = landing.state
        if self.local is not None:
            self.local.rebase(part, landing.weights, state, landing.version)
        elif landing.weights.data_ptr() != part.weights.data_ptr():
            part.weights.copy_(landing.weights, non_blocking=True)
        part.version = landing.version


def _host_buffer(like: torch.Tensor) -> torch.Tensor:
    """Returns a zeroed float32 tensor on the host; pinned if `like` is on a GPU."""
    return torch.zeros(like.shape, dtype=torch.float32, pin_memory=like.device.type == "cuda")
