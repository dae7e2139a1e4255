"""The pushes of a replica: each one's description, for the shard's decision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pscore.local.base import LocalSlice
from pscore.rules.base import Plan
from pscore.types import Push, Role
from psworker.replica.clocks import Clocks
from psworker.replica.ports import PushPull


class Pushes:
    """Describes and sends the pushes of one worker; counts nothing (`Clocks`)."""

    def __init__(self, rank: int, clocks: Clocks, parts: Sequence[LocalSlice]) -> None:
        """Begins with no push sent.

        Args:
            clocks: Its push counts: the step of each slice's next push.
            parts: Its slices: the version and hyper-parameters of each.
        """
        self._rank = rank
        self._clocks = clocks
        self._parts = parts

    def send(
        self,
        index: int,
        plan: Plan,
        role: Role,
        values: torch.Tensor,
        present: int,
        samples: float,
        push_pull: PushPull,
    ) -> None:
        """Sends the next push of a slice.

        Args:
            values: `(numel,) float32` on the model's device.
            present: Bit i: segment i has a value; -1 for all.
        """
        part = self._parts[index]
        push = Push(
            worker=self._rank,
            step=self._clocks.next_push(index),
            base_version=max(0, part.version),
            role=role,
            samples=samples,
            present=present,
            hyper=part.hyper,
            may_wait=plan.block and plan.pull,
        )
        push_pull.push(index, push, values, compress=plan.compress, flush=plan.flush)
