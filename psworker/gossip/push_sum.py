"""Push-sum over a graph whose edges may go one way: the worker of `sgp`.

A worker sends a share of its model and of its weight to each taker, and keeps the rest of both; it
trains on their quotient. Shares add up to 1 whoever is there, so nothing is lost but the mass of
workers that are: a quotient stays a mean of models. Members change as in `dpsgd` (mixing.py).
"""

from __future__ import annotations

from typing import ClassVar

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

    name: ClassVar[str] = "push_sum"
    weight = 1.0

    def start(self) -> Waits:
        """Meets the others, with a weight of 1."""
        self.weight, self.mass = 1.0, self.model.weights.clone()
        yield from super().start()

    def begin(self) -> None:
        """Starts with a weight of 1 from weights that were replaced, by the average of all."""
        if not torch.equal(self.model.weights, self._before):
            self._reset()

    def step(self) -> Waits:
        """Adds the optimizer's step to the mass, and sends shares of it."""
        if self.post.has_moved:
            yield from self._meet(self.number)
        self.model.update()
        self._move()
        edges = self._edges()
        shares = {edge.taker: edge.weight for edge in edges if edge.giver == self.rank}
        shares = {taker: share for taker, share in shares.items() if not self._is_gone(taker)}
        for taker, share in sorted(shares.items()):
            values = to_host(self.mass * share)
            self._send(taker, np.append(values, np.float32(self.weight * share)))
        own = 1.0 - sum(shares.values())
        terms = [(self.rank, self.mass * own, self.weight * own)]
        for giver in sorted(edge.giver for edge in edges if edge.taker == self.rank):
            came = yield from self._model_of(giver, len(self.mass) + 1)
            if came is not None:
                terms.append((giver, on_device_of(self.mass, came[:-1]), float(came[-1])))
                self.sight.partner = giver
                self.sight.num_exchanges += 1
        if len(terms) > 1 or shares:
            self._add_up(terms)
        self._before = self.model.weights.clone()
        self.number += 1

    # ----- inside

    def _read_graph(self) -> Graph:
        return directed_graph_of(str(self.rule.arguments()["graph"]))

    def _reset(self) -> None:
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
