"""All replicas of all stages of a pipeline in one thread, one action at a time.

The replicas are those of `psworker.Pipeline` (psworker/pipeline/run/stage.py). A message stays in a
queue of this world until its receiver is drawn; the replicas of a stage take the mean of their
gradients for an update, as shards in mode `ssgd` give it to them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from psworker.pipeline.run.schedule import Place, Stash
from psworker.pipeline.run.stage import Loss, OptimizerWait, Receive, StageReplica, StageWaits

MakeOptimizer = Callable[[Place, list[nn.Parameter]], torch.optim.Optimizer]


class PipelineWorld:
    """A pipeline and its minibatches.

    Attributes:
        places: Place of each replica, by rank.
        modules: Layers of each replica's stage, with the newest weights.
        optimizers: Optimizer of each replica.
        replicas: The replicas themselves.
        messages: Values under way, by receiver, sender, kind and minibatch.
        most_flying: Most minibatches that each replica has had in flight.
        before_update: Called with a stage and the number of its update, before the update.
        after_update: Called likewise behind it.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        versions: Callable[[Place], Stash],
        replicas: tuple[int, ...],
        make_optimizer: MakeOptimizer,
        loss: Loss,
    ) -> None:
        """Begins at minibatch 0.

        Args:
            versions: Versions of the weights for a place.
            loss: Loss of the last stage's output and the targets.
        """
        self.places = [Place.of_rank(rank, replicas) for rank in range(sum(replicas))]
        self.messages: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self.modules = [copy.deepcopy(stages[place.stage]) for place in self.places]
        self.optimizers = [
            make_optimizer(place, list(module.parameters()))
            for place, module in zip(self.places, self.modules, strict=True)
        ]
        self.replicas = [
            StageReplica(module, versions(place), loss, self._send_from(place.rank))
            for place, module in zip(self.places, self.modules, strict=True)
        ]
        self.most_flying = [0] * len(self.places)
        self.before_update: Callable[[int, int], None] = lambda stage, number: None
        self.after_update: Callable[[int, int], None] = lambda stage, number: None
        self._waits: dict[int, Receive | OptimizerWait | None] = {}  # None: the replica has ended.
        self._scripts: dict[int, StageWaits] = {}

    def run(self, minibatches: Iterable[tuple[Any, Any]], seed: int = 0) -> None:
        """Trains on minibatches to the end, and ends those in flight.

        Args:
            minibatches: Inputs and targets; the replicas read them together.

        Raises:
            AssertionError: All replicas wait, and no message is under way for one.
        """
        draw = random.Random(seed)
        shared = _Shared(minibatches, len(self.places))
        self._scripts = {rank: self._script(rank, shared) for rank in range(len(self.places))}
        for rank in self._scripts:
            self._resume(rank, None)
        while any(wait is not None for wait in self._waits.values()):
            ready = [rank for rank in self._waits if self._is_ready(rank)]
            assert ready, f"deadlock: {self._waits}"
            rank = draw.choice(ready)
            wait = self._waits[rank]
            if isinstance(wait, Receive):
                key = rank, wait.source, wait.kind, wait.minibatch
                self._resume(rank, self.messages.pop(key))
            elif wait is not None:
                self._update(rank, wait.number)

    def group(self, stage: int) -> list[int]:
        """Returns the ranks of a stage."""
        return [place.rank for place in self.places if place.stage == stage]

    def _send_from(self, rank: int) -> Callable[[int, int, int, torch.Tensor], None]:
        def send(to: int, kind: int, minibatch: int, values: torch.Tensor) -> None:
            self.messages[to, rank, kind, minibatch] = values.clone()

        return send

    def _script(self, rank: int, shared: _Shared) -> StageWaits:
        replica, number = self.replicas[rank], 0
        while (minibatch := shared.take(rank)) is not None:
            yield from replica.step(number, *minibatch)
            self.most_flying[rank] = max(self.most_flying[rank], replica.num_flying)
            number += 1
        yield from replica.finish()

    def _resume(self, rank: int, value: Any) -> None:
        """Runs a replica until it waits again, or has ended."""
        script = self._scripts[rank]
        try:
            self._waits[rank] = script.send(value)
        except StopIteration:
            self._waits[rank] = None

    def _is_ready(self, rank: int) -> bool:
        wait = self._waits[rank]
        if isinstance(wait, Receive):
            return (rank, wait.source, wait.kind, wait.minibatch) in self.messages
        return wait is not None and all(
            self._is_at(other, wait) for other in self.group(self.places[rank].stage)
        )

    def _is_at(self, rank: int, update: OptimizerWait) -> bool:
        """Returns whether a replica waits for an update too; one that has ended does not count."""
        wait = self._waits[rank]
        return wait is None or (isinstance(wait, OptimizerWait) and wait.number == update.number)

    def _update(self, rank: int, number: int) -> None:
        stage = self.places[rank].stage
        updates = {other: self._waits[other] for other in self.group(stage)}
        weights = {
            other: it.weight for other, it in updates.items() if isinstance(it, OptimizerWait)
        }
        there = [*weights]
        for together in zip(*(self.modules[other].parameters() for other in there), strict=True):
            pairs = zip(together, weights.values(), strict=True)
            total = torch.stack([p.grad * weight for p, weight in pairs if p.grad is not None])
            mean = total.sum(0) / sum(weights.values())
            for parameter in together:
                parameter.grad = mean.clone()
        self.before_update(stage, number)
        for other in there:
            self.optimizers[other].step()
        self.after_update(stage, number)
        for other in there:
            self._resume(other, None)


class _Shared:
    """Minibatches that several readers take in order, each drawn once."""

    def __init__(self, minibatches: Iterable[tuple[Any, Any]], num_readers: int) -> None:
        self._source = iter(minibatches)
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._drawn = 0
        self._taken = [0] * num_readers

    def take(self, reader: int) -> tuple[Any, Any] | None:
        """Returns the reader's next minibatch; None behind the last one."""
        number = self._taken[reader]
        if number == self._drawn:
            drawn = next(self._source, None)
            if drawn is None:
                return None
            self._kept[number] = drawn
            self._drawn += 1
        found = self._kept[number]
        self._taken[reader] += 1
        if min(self._taken) > number:
            del self._kept[number]
        return found
