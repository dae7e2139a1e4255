"""Push-sum over a graph whose edges may go one way: the worker of `sgp`.

A worker sends a share of its model and of its weight to each taker, and keeps the rest of both; it
trains on their quotient. Shares add up to 1 whoever is there, so nothing is lost but the mass of
workers that are: a quotient stays a mean of models. Members change as in `dpsgd` (mixing.py).

With `late=1` a share that is sent in one step is added in the next one, so that it travels while a
gradient is computed. Shares under way belong to the sums of masses and weights too.
"""

from __future__ import annotations

import numpy as np
import torch

from pscore.graphs import Graph, directed_graph_of
from psworker.gossip.base import Waits, on_device_of, to_host
from psworker.gossip.mixing import Mixing


class PushSum(Mixing):
    """SGP's worker.

    Attributes:
        weight: The weight w, by which the mass x is divided.
        mass: `(numel,) float32`, the mass x; the model is x / w.
    """

    name = "push_sum"
    weight = 1.0

    def start(self) -> Waits:
        """Meets the others, with a weight of 1."""
        self.weight, self.mass = 1.0, self.model.weights.clone()
        self._late = int(self.rule.arguments()["late"])
        yield from super().start()
        self._added = self._whole = self.number

    def begin(self) -> None:
        """Starts with a weight of 1 from weights that were replaced, by the average of all."""
        if not torch.equal(self.model.weights, self._before):
            self._reset()

    def step(self) -> Waits:
        """Adds the optimizer's step to the mass, and sends shares of it."""
        yield from self.meet()
        self.model.update()
        self._move()
        kept = self._share()
        late = self._late if self.number >= self._warmup else 0
        yield from self._take_until(self.number + 1 - late, kept)
        self._before = self.model.weights.clone()
        self.number += 1

    def part(self) -> Waits:
        """Adds the shares under way to this worker, then meets the others once more."""
        yield from self._take_until(self.number, 1.0)
        yield from super().part()

    def _read_graph(self) -> Graph:
        return directed_graph_of(str(self.rule.arguments()["graph"]))

    def _share(self) -> float:
        """Sends shares of the mass and the weight; returns the share that stays."""
        edges = [edge for edge in self._edges(self.number) if edge.giver == self.rank]
        edges = [edge for edge in edges if not self._is_gone(edge.taker, self.number)]
        for edge in sorted(edges):
            values = to_host(self.mass * edge.weight)
            self._send(edge.taker, np.append(values, np.float32(self.weight * edge.weight)))
        return 1.0 - sum(edge.weight for edge in edges)

    def _take_until(self, end: int, kept: float) -> Waits:
        """Adds the shares that were sent to this worker in the steps before `end`.

        Args:
            end: A step; those before it that have been added are not added again.
            kept: The share of this worker's mass that is still its own.
        """
        terms = [(self.rank, self.mass * kept, self.weight * kept)]
        while self._added < end:
            step, self._added = self._added, self._added + 1
            takes = [edge for edge in self._edges(step) if edge.taker == self.rank]
            for giver in sorted(edge.giver for edge in takes):
                came = yield from self._model_of(giver, step, len(self.mass) + 1)
                if came is None or step < self._whole:
                    continue
                terms.append((giver, on_device_of(self.mass, came[:-1]), float(came[-1])))
                self.stats.partner = giver
                self.stats.num_exchanges += 1
        if len(terms) > 1 or kept != 1.0:
            self._add_up(terms)

    def _reset(self) -> None:
        self._whole = self.number  # Shares of before are of the weights that were replaced.
        self.weight, self.mass = 1.0, self.model.weights.clone()
        self._before = self.model.weights.clone()

    def _move(self) -> None:
        """Adds the optimizer's move to the mass; with a weight of 1 that is the model itself."""
        if self.weight == 1.0:
            self.mass.copy_(self.model.weights)
        else:
            self.mass.add_(self.model.weights - self._before)

    def _add_up(self, terms: list[tuple[int, torch.Tensor, float]]) -> None:
        """Adds shares in the order of the ranks, and makes their quotient the model."""
        terms.sort(key=lambda term: term[0])
        self.mass = terms[0][1].clone()
        for _, share, _ in terms[1:]:
            self.mass.add_(share)
        self.weight = sum(weight for _, _, weight in terms)
        self.model.weights.copy_(self.mass / self.weight)
