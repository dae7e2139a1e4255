"""Follows shards to their standbys, so that one which has taken over is not taken for lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from pscore.pb.ps.v1 import control_pb2 as pb

log = structlog.get_logger()
Answer = pb.StatusReply | None


class Successors:
    """The processes that may have each shard next, as its process last named them.

    A process that serves in the place of another has its number (`instance`).
    """

    def __init__(self, ask: Callable[[str], Answer]) -> None:
        """Asks nobody yet.

        Args:
            ask: Returns the status of the process at an address; None: it does not answer.
        """
        self._ask = ask
        self._next: dict[int, tuple[str, int]] = {}  # By shard: that address, and the number.
        self._said: dict[int, str] = {}

    def look(self, addresses: list[str], answers: Sequence[Answer]) -> list[Answer]:
        """Returns the answers, with those of standbys that have taken over in their places.

        A shard that came back without what it had counts as silent while its standby may have that.

        Args:
            addresses: Addresses of all shards, in order; those that have changed are replaced.
            answers: The status of each shard; None: it does not answer.
        """
        return [self._answer(index, addresses, answer) for index, answer in enumerate(answers)]

    def _answer(self, index: int, addresses: list[str], answer: Answer) -> Answer:
        address, instance = self._next.get(index, ("", 0))
        if address and (answer is None or answer.shard.instance != instance):
            there = self._ask(address)
            if there is not None and there.shard.instance == instance:
                log.warning("a standby has taken over", shard=index, address=address)
                addresses[index], answer = address, there
            elif answer is not None and (there is None or there.shard.stands_by):
                self._say(index, address, is_there=there is not None)
                return None
        if answer is not None:
            self._next[index] = (answer.next_address, answer.shard.instance)
        return answer

    def _say(self, index: int, standby: str, *, is_there: bool) -> None:
        """Logs once that a person has to decide."""
        do = f"`psserver promote {standby}`" if is_there else "start that again, or restore the job"
        if self._said.get(index) != do:
            self._said[index] = do
            text = "a shard came back empty, and is not restored: its standby may have everything"
            log.error(text, shard=index, standby=standby, do=do)
