"""Atomic averages of pairs: the worker of `adpsgd(exchange="atomic")`.

Xiangru Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
arXiv:1710.06952, algorithm 1 and section 4. The graph has two sides. An active worker begins an
exchange behind its gradient and before its optimizer's step, and waits for the answer; a passive
one only answers, at once, also while it computes. An active worker that waits changes nothing of
its model and answers others that it is busy. So both ends of an exchange write the same bits, the
average of the two models at that moment; and as no worker that waits holds up another one, none can
deadlock, not even while workers know different members and take different sides.

Parts of a large model are averaged one by one, each atomically.
"""

from __future__ import annotations

from pscore.graphs.sides import sides_of
from psworker.gossip.base import Waits
from psworker.gossip.pairs import Pairs


class Atomic(Pairs):
    """AD-PSGD's worker, as published."""

    name = "atomic"

    def start(self) -> Waits:
        """Meets the others, once."""
        self._sided: list[int] = []  # The members that `_active` is of.
        self._active: frozenset[int] = frozenset()
        yield from super().start()

    def step(self) -> Waits:
        """Averages with a passive neighbour, and then adds the optimizer's step."""
        if self._early is not None:
            yield from super().step()
            return
        yield from self._keep_up()
        if (self.number + 1) % self._every == 0:
            self._offer()
            yield from self._settle(lambda: not self._open)
        self._write()

    def _neighbours(self) -> list[int]:
        """Returns the passive workers with which this one, if it is active, may exchange."""
        members = self.post.members()
        if members != self._sided:
            self._sided, self._active = members, sides_of(self._graph, members).active
        if self.rank not in self._active:
            return []
        return [rank for rank in super()._neighbours() if rank not in self._active]

    def _is_busy(self) -> bool:
        """Returns whether an exchange of this worker is open, in which its model must not move."""
        return bool(self._open)
