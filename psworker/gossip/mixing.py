"""Mixing with the neighbours of a graph at every step: the worker of `dpsgd`.

Each worker gives its model to those who take it in the graph of the step, and takes theirs. Members
change between two steps: when an epoch begins, all meet, and the graph is rebuilt behind the last
step that any of them had begun. In the steps up to that one the weight of a neighbour that is gone
falls to the worker itself. In the warm-up the graph is complete, and models are mixed behind the
optimizers' steps: all are equal then.
"""

from __future__ import annotations

import torch

from pscore.graphs import GRAPHS, Edge, Graph, graph_of
from pscore.types import FloatArray
from psworker.gossip.base import (
    Gathering,
    Gossip,
    Meet,
    Steps,
    Tag,
    Waits,
    Want,
    is_finite,
    on_device_of,
    parts_of,
    require_numel,
    to_host,
)

MODEL = 1  # The kind of a message.


class Mixing(Gossip):
    """D-PSGD's worker."""

    name = "mixing"

    def start(self) -> Waits:
        """Meets the others."""
        self._graph = self._read_graph()
        self._combines = self.rule.arguments().get("order") == "atc"
        self._warmup = int(self.rule.arguments()["warmup"])
        self._graphs: list[tuple[int, list[int]]] = []  # First step and members, oldest first.
        self._live: set[int] = set()
        self._joined: dict[int, int] = {}  # First step of each worker that came later.
        self._before = self.model.weights.clone()
        yield from self._meet(-1)

    def begin(self) -> None:
        """Gives the model with which the step begins, so that it travels during backward."""
        if not self._combining:
            self._give()

    def step(self) -> Waits:
        """Makes a step of the optimizer and one of the graph, in the order of the mode."""
        yield from self.meet()
        self.model.update()
        if self._combining:
            self._give()
        taken = yield from self._take()
        if self._combining:
            self._combine(taken)
        else:  # The row sums to 1, so this is the mix of the models before the optimizer's step.
            for _, weight, values in taken:
                self.model.weights.add_(values - self._before, alpha=weight)
        self.number += 1

    def part(self) -> Waits:
        """Meets the others once more, so that the graph is rebuilt without this worker."""
        yield from self._meet(self.number, parts=True)

    def meet(self) -> Waits:
        """Meets the others between two steps."""
        if self.post.has_moved:
            yield from self._meet(self.number)

    def _read_graph(self) -> Graph:
        """Returns the mode's graph."""
        return graph_of(str(self.rule.arguments()["graph"]))

    @property
    def _combining(self) -> bool:
        """Whether this step mixes the models behind the optimizers' steps."""
        return self._combines or self.number < self._warmup

    def _edges(self, step: int) -> list[Edge]:
        """Returns the edges of a step, under the members that it belongs to."""
        graphs = reversed(self._graphs)
        members = next(found for first, found in graphs if first <= step)
        graph = GRAPHS["complete"] if step < self._warmup else self._graph
        return graph(members, step)

    def _is_gone(self, rank: int, step: int) -> bool:
        """Returns whether a worker does not make a step."""
        return rank not in self._live or step < self._joined.get(rank, 0)

    def _combine(self, taken: list[tuple[int, float, torch.Tensor]]) -> None:
        """Replaces the model by the mix: that of the lowest rank plus weighted differences to it.

        Workers that take the same models get the same bits; differences are small, so that little
        is lost in rounding.
        """
        weights = self.model.weights
        if not taken:
            return
        own = 1.0 - sum(weight for _, weight, _ in taken)
        terms = sorted([*taken, (self.rank, own, weights.clone())], key=lambda term: term[0])
        first = terms[0][2]
        weights.copy_(first)
        for _, weight, values in terms[1:]:
            weights.add_(values - first, alpha=weight)

    def _give(self) -> None:
        """Sends the present model to those who take it at the present step."""
        weights = self.model.weights
        self._before = weights.clone()
        edges = self._edges(self.number)
        takers = [edge.taker for edge in edges if edge.giver == self.rank]
        takers = [taker for taker in takers if not self._is_gone(taker, self.number)]
        values = to_host(weights) if takers else None
        for taker in takers:
            assert values is not None
            self._send(taker, values)

    def _send(self, taker: int, values: FloatArray) -> None:
        """Sends an array for the present step, which must not change any more."""
        for index, part in enumerate(parts_of(len(values))):
            self.post.give(taker, Tag(MODEL, self.number, index), values[part])

    def _take(self) -> Steps[list[tuple[int, float, torch.Tensor]]]:
        """Waits for the neighbours' models; returns rank, weight and model of each that came."""
        taken = []
        for edge in [edge for edge in self._edges(self.number) if edge.taker == self.rank]:
            values = yield from self._model_of(edge.giver, self.number, len(self.model.weights))
            if values is not None:
                taken.append((edge.giver, edge.weight, on_device_of(self.model.weights, values)))
                self.stats.partner = edge.giver
                self.stats.num_exchanges += 1
        return taken

    def _model_of(self, giver: int, step: int, numel: int) -> Steps[FloatArray | None]:
        """Waits for one neighbour's array of a step, `(numel,)`.

        Returns None if it is gone, and for an array with NaN or Inf, which would spread: its
        worker makes no step at such weights.

        Raises:
            RemoteProtocolError: The array has another length.
        """
        values: FloatArray = torch.empty(numel, dtype=torch.float32, device="cpu").numpy()
        for index, part in enumerate(parts_of(len(values))):
            while True:
                is_gone = self._is_gone(giver, step)  # It may have given its model before.
                model = yield Want(giver, Tag(MODEL, step, index), waits=not is_gone)
                if model is not None:
                    require_numel(giver, model, part.stop - part.start, part.stop - part.start)
                    values[part] = model
                    break
                if is_gone:
                    return None
                yield from self._meet(self.number)
        if is_finite(values):
            return values
        self.stats.refused.add(giver)
        return None

    def _meet(self, position: int, *, parts: bool = False) -> Waits:
        """Meets the others; behind the last step that anyone has begun the graph is a new one."""
        gatherings: list[Gathering] = yield Meet(position, parts=parts)
        for gathering in gatherings:
            first = 1 + max(gathering.positions.values())
            self._graphs = [item for item in self._graphs if item[0] < first]
            there = [rank for rank in gathering.positions if rank not in gathering.leaving]
            self._graphs.append((first, there))
            new = [rank for rank, other in gathering.positions.items() if other < 0]
            self._joined |= dict.fromkeys(new, first)
        self._live = set(gatherings[-1].positions) - gatherings[-1].leaving
        if position < 0:
            self.number = max(self._graphs[-1][0], self.model.first_step)
