"""One worker's copy of the weights, slice by slice: its local updates, and the pulls applied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from pscore.local.base import LocalSlice, optimizer_state
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.rules.base import Rule
from pscore.types import SegmentTable
from psworker.model.copies import CopyEnd, IncomingTensors, copies_of
from psworker.model.device import is_on_device
from psworker.replica.ports import PullBuffer


class LocalWeights:
    """The slices of one worker's weights, and the local update of its mode.

    Attributes:
        local_update: The local update of the mode; None: it has none.
        keeps_state: Whether this worker keeps the state of the shards' optimizer beside the weights
            of each pull, for a shard that loses it.
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
        num_workers: int = 1,
    ) -> None:
        """Starts before the first pull.

        Args:
            weights: `(layout.numel,) float32` on the model's device; changed in place.
        """
        self.local_update = rule.local_update()
        self.num_state = len(optimizer.state_names)
        self.keeps_state = False
        self.around_update: Callable[[int, int], AbstractContextManager[None]]
        self.around_update = lambda index, step: nullcontext()
        self._copies = copies_of(weights.device) if is_on_device(weights) else None
        self._coming: dict[int, IncomingTensors] = {}  # Pulls on their way to the device, by slice.
        self.parts = [
            LocalSlice(
                weights=weights[spec.start : spec.stop],
                segments=SegmentTable.of(spec),
                optimizer=optimizer,
                hyper=np.zeros((num_groups, len(optimizer.hyper_names))),
                active=np.ones(len(spec.segments), dtype=np.int64),
                counts=np.zeros(len(spec.segments), dtype=np.int64),
                num_workers=num_workers,
            )
            for spec in layout.slices
        ]

    @property
    def pulls_state(self) -> bool:
        """Whether the state of the shards' optimizer is kept, or the local update may need it."""
        return (self.keeps_state or self.local_update is not None) and self.num_state > 0

    def update(self, index: int, step: int, grad: torch.Tensor) -> None:
        """Moves the weights of a slice by the worker's own gradient; the mode has a local update.

        Args:
            index: Index of the slice; its `hyper` and `active` are this step's.
            grad: `(numel,) float32` on the model's device.
        """
        assert self.local_update is not None
        part = self.parts[index]
        with self.around_update(index, step):
            self.local_update.update(part, grad)
        part.past.append(part.hyper)
        part.num_made += 1

    def wants_state(self, rule: Rule, step: int) -> bool:
        """Returns whether the pull of a step of the mode needs the shard's optimizer state."""
        if self.keeps_state:
            return self.pulls_state
        if self.local_update is None or not self.pulls_state:
            return False
        blocks = rule.plan(step).block
        ends_warmup = blocks and not rule.plan(step + 1).block
        if blocks and not ends_warmup:
            return False
        return bool(self.local_update.wants_state(last_of_warmup=ends_warmup))

    def needs_state(self, index: int) -> bool:
        """Returns whether the next pull of a slice needs that state whatever the step is."""
        update = self.local_update
        return update is not None and self.pulls_state and update.needs_state(self.parts[index])

    def bring(self, index: int, buffer: PullBuffer) -> None:
        """Starts the copy of a pull that has landed to the model's device, unless it has begun.

        The copy is made beside the kernels that are queued there, which still use the weights.
        """
        if self._copies is not None and index not in self._coming:
            state = [] if buffer.counts is None else buffer.state
            self._coming[index] = self._copies.to_device([buffer.weights, *state])

    def rebase(self, index: int, buffer: PullBuffer) -> CopyEnd:
        """Replaces the weights of a slice by a pull that has landed, with its version.

        Returns:
            The end of the copies that read the buffer.
        """
        part, done = self.parts[index], CopyEnd()
        weights, state = buffer.weights, [] if buffer.counts is None else buffer.state
        self.bring(index, buffer)
        if index in self._coming:
            coming = self._coming.pop(index)
            (weights, *state), done = coming.arrived(), coming.done
        if buffer.counts is not None:
            part.counts[:] = buffer.counts
        if self.local_update is not None:
            self.local_update.rebase(part, weights, state, buffer.version)
        elif weights.data_ptr() != part.weights.data_ptr():
            part.weights.copy_(weights)
        if self.keeps_state:
            for kept, pulled in zip(optimizer_state(part), state, strict=False):
                kept.copy_(pulled)
        part.version = buffer.version
        part.past.clear()
        return done

    def restart(self) -> None:
        """Starts again: the next pull counts as the first one."""
        self._coming.clear()
        for part in self.parts:
            part.restart()

    def change(self, rule: Rule) -> None:
        """Starts again under another rule."""
        self.local_update = rule.local_update()
        self.restart()
