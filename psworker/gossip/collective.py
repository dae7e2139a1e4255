"""The sum of all workers' gradients by torch.distributed: the worker of `allreduce(backend=)`.

A meeting makes the members known; then the first of them opens a store, and torch.distributed
makes a process group of exactly these members and adds in it. A sum that fails, as when a member
dies in it, makes all meet again: the group is made anew among those who live. All that holds of a
round that is made again, or that somebody has ended already, holds as around the ring (ring.py).
"""

from __future__ import annotations

import numpy as np

from pscore.errors import ConfigError
from pscore.rules.decentralised import Decentralised
from pscore.types import FloatArray
from psworker.gossip.base import Steps, Tag, TorchSum, Waits, Want, require_numel
from psworker.gossip.ring import Ring

READY, STORE = 6, 7  # Kinds of messages, beside those of the ring.
FAILURES_MAX = 3  # One after the other, among the same members; then they cannot reach each other.


class Collective(Ring):
    """The worker of all-reduce by torch.distributed."""

    name = "collective"

    @classmethod
    def require_fit(cls, rule: Decentralised, device: str, *, has_tls: bool) -> None:
        """Refuses a backend that does not fit the model, or the job's connections.

        Raises:
            ConfigError: It adds on GPUs and the model is not there, or the job uses TLS.
        """
        backend = rule.arguments()["backend"]
        mode = f"allreduce(backend={backend!r})"
        if backend == "nccl" and device != "cuda":
            raise ConfigError(
                f"{mode} adds on GPUs, and this worker's model is on {device}: move it to a GPU, "
                "or use backend='frames'"
            )
        if has_tls:
            raise ConfigError(
                f"{mode} would send gradients without encryption, and this job uses TLS: use "
                "backend='frames'"
            )

    def start(self) -> Waits:
        """Meets the others."""
        self._backend = str(self.rule.arguments()["backend"])
        self._port = self._opened = 0  # Port of the store, and the epoch that it is of.
        self._failed: list[list[int]] = []  # Members of the sums that failed since the last one.
        yield from super().start()

    def _sum(self, own: FloatArray) -> Steps[FloatArray | None]:
        """Returns the sum over the members; None if the round has to be made again."""
        if not (yield from self._open()):
            return None
        add = TorchSum(
            self._backend, self._epoch, tuple(self._members), self._port, self.number, own
        )
        total: FloatArray | str | None = yield add
        if total is None:
            return None
        if isinstance(total, str):
            self._note_failure(total)
            return (yield from self._meet(self.number, again=True))
        self._failed.clear()
        self.stats.partner = self._members[self._members.index(self.rank) - 1]
        return total

    def _note_failure(self, problem: str) -> None:
        """Counts a failure; raises a ConfigError after too many among the same members."""
        self._failed.append(self._members)
        if self._failed[-FAILURES_MAX:] == FAILURES_MAX * [self._members]:
            raise ConfigError(
                f"torch.distributed ({self._backend}) cannot add among workers "
                f"{', '.join(map(str, self._members))} ({problem}): use backend='frames', or see "
                "to their network"
            )

    def _open(self) -> Steps[bool]:
        """Waits until every member has come to its first sum in this epoch, and for the store.

        Making a group has a limit of time, which nobody should spend on waiting for computation.
        """
        if self._opened == self._epoch:
            return True
        first, *others = self._members
        ready, store = (Tag(kind, self.number, 0, self._epoch) for kind in (READY, STORE))
        if self.rank != first:
            self.post.give(first, ready, np.empty(0, np.float32))
            answer = yield Want(first, store)
            if answer is None:
                return False
            require_numel(first, answer, 1, 1)
            self._port = int(answer[0])
        else:
            for other in others:
                if (yield Want(other, ready)) is None:
                    return False
            self._port = self.post.open_store()
            for other in others:
                self.post.give(other, store, np.array([self._port], np.float32))
        self._opened = self._epoch
        return True
