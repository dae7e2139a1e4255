"""Exchanges of pairs while training continues: the worker of `adpsgd`.

A worker offers a snapshot s of its model to one neighbour and continues. The neighbour takes a
snapshot p of its own, moves half of the way, and answers with p; the first one moves by half of the
difference too when the answer comes, though it may have added something meanwhile. So the sum of
both models stays, no lock is held while anybody waits, and no cycle of waits can form. Where
nothing was added since the snapshot both write (s + p) / 2, the same bits.

Parts of the model are exchanged by themselves. A worker has one exchange open at a time; it answers
those of others at any time, on another thread, under the model's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from pscore.errors import RemoteProtocolError
from pscore.graphs import graph_of
from pscore.types import FloatArray
from psworker.gossip.base import (
    Gossip,
    LateExchange,
    Meet,
    Waits,
    is_finite,
    on_device_of,
    parts_of,
    require_numel,
    to_host,
)
from psworker.gossip.mixing import Mixing


class Pairs(Gossip):
    """AD-PSGD's worker."""

    name = "pairs"

    def start(self) -> Waits:
        """Meets the others, once; after the warm-up changes of the members need no agreement."""
        arguments = self.rule.arguments()
        self._early: Mixing | None = None
        if arguments["warmup"]:
            self._early = Mixing(self.rule, self.rank, self.model, self.post)
        self._graph = graph_of(str(arguments["graph"]))
        self._every, self._behind_max = int(arguments["every"]), int(arguments["max_behind"])
        self._parts = parts_of(len(self.model.weights))
        self.shared = to_host(self.model.weights)  # The model that pairs mix.
        self._read = self.shared.copy()  # The weights with which the step began.
        self.versions = [0] * len(self._parts)  # Changes of each part of `shared`.
        self._number = 0  # Number of the last exchange begun.
        self._partner = -1
        self._begun = 0  # Step of the open exchange.
        self._open: dict[int, tuple[FloatArray, int]] = {}  # Snapshot and version, by part.
        # The last answer to each incarnation, which is given again to an offer that comes twice.
        self._answers: dict[tuple[int, int], tuple[int, FloatArray | None]] = {}
        self._mixed = 0  # Since the read.
        self._is_over = False
        self.counts: Counter[str] = Counter()
        self.number = self.model.first_step
        if self._early is None:
            yield Meet(-1)
        else:
            yield from self._early.start()
            self._follow(self._early)

    def begin(self) -> None:
        """Reads the model; weights that were replaced, by the average of all, take its place."""
        if self._early is not None:
            return
        with self.model.lock:
            weights = to_host(self.model.weights)
            if not np.array_equal(weights, self._read):
                self._take(weights)
            self._load()

    def step(self) -> Waits:
        """Adds the optimizer's step to the model as it is now, and maybe begins an exchange."""
        if self._early is not None:
            yield from self._early.step()
            self._follow(self._early)
            return
        yield from self._keep_up()
        yield from self._settle(lambda: not self._is_late())
        self._write()
        if self.number % self._every == 0 and not self._open:
            self._offer()

    def _write(self) -> None:
        """Adds the optimizer's step to the model as it is now; the step is over."""
        self.model.update()
        moved = to_host(self.model.weights)
        with self.model.lock:
            for index, part in enumerate(self._parts):
                if np.array_equal(self.shared[part], self._read[part]):
                    self.shared[part] = moved[part]
                else:
                    self.shared[part] += moved[part] - self._read[part]
                self.versions[index] += 1
            self.stats.staleness = self._mixed
            self._load()
        self.number += 1

    def part(self) -> Waits:
        """Waits for the answer to the open exchange, so that nothing of it is lost."""
        if self._early is not None:
            yield from self._early.part()
            return
        yield from self._settle(lambda: not self._open)
        yield from super().part()

    def meet(self) -> Waits:
        """Meets the others between two steps; in the warm-up they wait for each other."""
        yield from super().meet() if self._early is None else self._early.meet()

    def end(self) -> None:
        """Brings the mixed model into the weights."""
        with self.model.lock:
            if self._early is not None:
                self._take(to_host(self.model.weights))
            self._is_over = True
            self._load()

    # ----- exchanges

    def on_offer(
        self, source: int, incarnation: int, number: int, part: int, values: FloatArray
    ) -> FloatArray | None:
        """Moves half of the way to another worker's snapshot; returns this one's before."""
        self._require_fit(source, part, values)
        with self.model.lock:
            if self._is_over:
                return None
            known = self._answers.get((incarnation, part))
            if known is not None and known[0] == number:
                return known[1]
            if known is not None and number < known[0]:
                return None  # It came so late that its worker has begun another.
            if self._early is not None or self._is_busy():
                self._answers[incarnation, part] = (number, None)  # Also if it comes again.
                return None
            place = self._parts[part]
            own = self.shared[place].copy()
            self.shared[place] = (values + own) * np.float32(0.5)
            self._note(part)
            self._answers[incarnation, part] = (number, own)
            self.stats.partner = source
            self.stats.num_exchanges += part == 0
            return own

    def on_answer(self, number: int, part: int, values: FloatArray | None) -> None:
        """Moves half of the way to the other's snapshot; None: it has applied nothing."""
        if values is not None:
            self._require_fit(self._partner, part, values)
        with self.model.lock:
            if number != self._number or part not in self._open:
                return
            snapshot, version = self._open.pop(part)
            if values is None:
                self.counts["refused"] += 1
                return
            place = self._parts[part]
            if self.versions[part] == version:
                self.shared[place] = (snapshot + values) * np.float32(0.5)
            else:
                self.shared[place] += (values - snapshot) * np.float32(0.5)
            self._note(part)
            if not self._open:
                self.stats.num_exchanges += 1

    def _require_fit(self, source: int, part: int, values: FloatArray) -> None:
        """Refuses a snapshot that cannot be mixed.

        Raises:
            RemoteProtocolError: There is no such part, or it has another length, NaN or Inf.
        """
        num_parts = len(self._parts)
        if not 0 <= part < num_parts:
            raise RemoteProtocolError(
                f"worker {source} offers part {part} of a model of {num_parts} parts"
            )
        numel = self._parts[part].stop - self._parts[part].start
        require_numel(source, values, numel, numel)
        if not is_finite(values):
            raise RemoteProtocolError(f"worker {source} offers a model with NaN or Inf")

    def _keep_up(self) -> Waits:
        """Learns the members; waits while the job has fewer workers than its least."""
        if self.post.has_moved or self.post.is_short:
            yield Meet(self.number, waits=False, needs_least=True)

    def _settle(self, is_over: Callable[[], bool]) -> Waits:
        """Waits for the answer to the open exchange, which a partner that is gone ends too."""
        while not is_over():
            if self.post.has_moved:
                yield Meet(self.number, waits=False)
            else:
                yield LateExchange(self._partner, is_over)

    def _offer(self) -> None:
        """Begins an exchange with the neighbour of this step, if there is one."""
        neighbours = self._neighbours()
        if not neighbours:
            return
        # Several neighbours take turns.
        partner = neighbours[self.number // self._every % len(neighbours)]
        with self.model.lock:
            self._number += 1
            self._begun, self._partner, self.stats.partner = self.number, partner, partner
            snapshots = [self.shared[part].copy() for part in self._parts]
            self._open = {
                index: (values, self.versions[index]) for index, values in enumerate(snapshots)
            }
            number = self._number
        for index, values in enumerate(snapshots):
            self.post.offer(partner, number, index, values)

    def _neighbours(self) -> list[int]:
        """Returns the workers with which this one may begin its next exchange."""
        edges = self._graph(self.post.members(), self.number // self._every)
        return [edge.giver for edge in edges if edge.taker == self.rank]

    def _is_busy(self) -> bool:
        """Returns whether this worker takes no part in exchanges of others now."""
        return False

    def _is_late(self) -> bool:
        """Returns whether an answer is older than the mode allows."""
        with self.model.lock:
            age = self.number - self._begun
            return bool(self._behind_max and self._open and age >= self._behind_max)

    def _follow(self, early: Mixing) -> None:
        """Counts a step of the warm-up, and begins exchanges at its end."""
        self.number, self.stats = early.number, early.stats
        if self.number >= int(self.rule.arguments()["warmup"]):
            with self.model.lock:
                self._early = None
                self._take(to_host(self.model.weights))
                self._load()

    def _take(self, weights: FloatArray) -> None:
        """Replaces the model that pairs mix."""
        self.shared[:] = weights
        self.versions = [version + 1 for version in self.versions]

    def _note(self, part: int) -> None:
        self.versions[part] += 1
        self._mixed += 1

    def _load(self) -> None:
        """Brings the mixed model into the weights that the next step reads."""
        self._read[:] = self.shared
        self.model.weights.copy_(on_device_of(self.model.weights, self._read))
        self._mixed = 0
