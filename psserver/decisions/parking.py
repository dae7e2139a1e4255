"""Parked pushes of one slice: received, but neither counted nor acknowledged.

A push is parked for one of three reasons:

- It is too far ahead of the version. The worker gets no acknowledgement and so it waits: this is
  back-pressure, and costs the shard no memory.
- An elastic job has fewer workers than it needs. Nothing is counted meanwhile.
- It may wait (`Push.may_wait`): its gradient is in memory shared with the worker, and the worker
  needs that memory again only after it has the weights of this step. Such pushes are counted
  together, once all that the step expects have arrived. Their gradients are then added in one pass
  over memory, in place; the shard needs neither a sum nor copies of the gradients that
  arrived before a lower rank's.

The third reason bounds memory. Counting these pushes on arrival would mean to copy each one that
waits for a lower rank, and no limit counts such copies: with n workers on the shard's host they can
take n - 1 times the size of the model. Delaying the additions later, in the slice's queue, would
bound it too; but then a push would be counted and not yet in the journal, and each duplicate's
answer and each worker that returns would have to be delayed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from pscore.errors import RemoteProtocolError
from pscore.types import Push
from psserver.decisions.progress import Token

PARKED_MAX = 64  # Per worker; a worker waits for acknowledgements long before.


class Parking:
    """The parked pushes of one slice."""

    def __init__(self) -> None:
        # By (step, rank). Invariant: at most `PARKED_MAX` of each worker.
        self._pushes: dict[tuple[int, int], tuple[Push, Token]] = {}

    def __len__(self) -> int:
        return len(self._pushes)

    def __iter__(self) -> Iterator[Push]:
        return iter([push for push, _ in self._pushes.values()])

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._pushes

    def add(self, push: Push, token: Token, version: int) -> None:
        """Parks a push; a repeated one replaces the first.

        The first is not answered: its sender waits for the second, and an answer now would say
        that the push is counted.

        Raises:
            RemoteProtocolError: `PARKED_MAX` pushes of this worker are parked already.
        """
        parked = [worker for _, worker in self._pushes] if len(self) >= PARKED_MAX else []
        if parked.count(push.worker) >= PARKED_MAX:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step}, {PARKED_MAX} of its pushes already "
                f"wait for version {version}"
            )
        self._pushes[push.step, push.worker] = (push, token)

    def discard(self, push: Push) -> None:
        """Removes an earlier copy of `push`, if one is parked."""
        self._pushes.pop((push.step, push.worker), None)

    def discard_worker(self, worker: int) -> None:
        """Removes all pushes of a worker, without an answer."""
        for key in [key for key in self._pushes if key[1] == worker]:
            del self._pushes[key]

    def clear(self) -> None:
        """Removes all pushes, without an answer."""
        self._pushes.clear()

    def ranks(self, step: int) -> set[int]:
        """Returns the workers whose push of `step` is parked."""
        return {rank for parked, rank in self._pushes if parked == step}

    def admits(self, push: Push, awaited: Set[int], *, is_held: bool) -> bool:
        """Returns whether a push that may wait can be counted now.

        It can when every lower rank is in, and either all others have arrived too, so that the
        gradients are added in one pass, or a push that cannot wait is held until this one is in.

        Args:
            push: One with `may_wait`, in a mode that adds gradients in the order of the ranks.
            awaited: Workers that its step takes a push from and has none of yet.
        """
        if min(awaited, default=push.worker) < push.worker:
            return False
        return is_held or awaited <= self.ranks(push.step) | {push.worker}

    def take(self, has_room: Callable[[Push], bool]) -> Iterator[tuple[Push, Token]]:
        """Removes and returns the pushes that have room, in the order of steps and ranks.

        The caller counts each one before it asks for the next: a lower rank can make room for a
        higher one.
        """
        blocked: set[int] = set()  # Steps in which a lower rank that may wait has no room yet.
        for key in sorted(self._pushes):
            push = self._pushes[key][0]
            if push.may_wait and push.step in blocked:
                continue
            if has_room(push):
                yield self._pushes.pop(key)
            elif push.may_wait:
                blocked.add(push.step)

    def check_invariants(self) -> None:
        """Asserts what the comments at the fields say."""
        for key, (push, _) in self._pushes.items():
            assert key == (push.step, push.worker)
        ranks = [rank for _, rank in self._pushes]
        assert all(ranks.count(rank) <= PARKED_MAX for rank in set(ranks))
