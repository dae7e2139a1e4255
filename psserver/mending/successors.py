"""Follows shards to their standbys, so that one which has taken over is not taken for lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.durability.sealed import read_json, write_json
from psserver.mending.losses import jobs_with_weights

log = structlog.get_logger()
Answer = pb.StatusReply | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """A shard as its process last described it, and the process that may have it next.

    A process that serves in the place of another has its number (`instance`).
    """

    address: str
    next_address: str  # Empty: there is none.
    instance: int
    jobs: list[str]  # Those of which it has weights.
    is_recalled: bool = False  # Whether this is from the file.


class Successors:
    """The process that may have each shard next; a file tells the next process of them.

    Attributes:
        next: The next address of each shard, in order, as was last noted; empty: none.
    """

    def __init__(self, ask: Callable[[str], Answer], addresses: list[str], path: Path) -> None:
        """Asks nobody yet.

        Args:
            ask: Returns the status of the process at an address; None: it does not answer.
            addresses: Addresses of all shards, in order; those that change are replaced.
        """
        self._ask, self._addresses, self._path = ask, addresses, path
        self._shards: dict[int, Successor] = {}
        self._said: dict[int, str] = {}
        self._written: dict[str, dict[str, object]] = {}
        self.next = [""] * len(addresses)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            self._recall()

    def look(self, answers: Sequence[Answer]) -> list[Answer]:
        """Returns the answers, with those of standbys that have taken over in their places.

        A shard that came back without what it had counts as silent while its standby may have that.

        Args:
            answers: The status of each shard; None: it does not answer.
        """
        found = [self._answer(index, answer) for index, answer in enumerate(answers)]
        self._keep()
        return found

    def _keep(self) -> None:
        """Writes the file, if something has changed; without room, only this process knows."""
        shards = {str(index): asdict(one) for index, one in self._shards.items()}
        if shards != self._written:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_json(self._path, shards)
        self._written = shards
        for index, one in self._shards.items():
            self.next[index] = one.next_address

    def _recall(self) -> None:
        """Reads what a former process knew.

        Of a shard that had moved already, the process at its first address may have come back.
        """
        for index, value in read_json(self._path).items():
            one, there = Successor(**value), self._addresses[int(index)]
            follower = one.next_address if one.address == there else one.address
            self._shards[int(index)] = replace(one, next_address=follower, is_recalled=True)

    def _answer(self, index: int, answer: Answer) -> Answer:
        former = self._shards.get(index)
        is_same = former is None or (
            answer is not None and answer.shard.instance == former.instance
        )
        if former is not None and former.next_address and not is_same:
            there = self._ask(former.next_address)
            if there is not None and there.shard.instance == former.instance:
                log.warning("a standby has taken over", shard=index, address=former.next_address)
                self._addresses[index], answer = former.next_address, there
            elif answer is not None and _may_have_all(former, there, answer):
                self._say(index, former.next_address, is_there=there is not None)
                return None
        if answer is not None:
            self._shards[index] = Successor(
                address=self._addresses[index],
                next_address=answer.next_address,
                instance=answer.shard.instance,
                jobs=sorted(jobs_with_weights(answer)),
            )
        return answer

    def _say(self, index: int, standby: str, *, is_there: bool) -> None:
        """Logs once that a person has to decide."""
        do = f"`psserver promote {standby}`" if is_there else "start that again, or restore the job"
        if self._said.get(index) != do:
            self._said[index] = do
            text = "a shard came back empty, and is not restored: its standby may have everything"
            log.error(text, shard=index, standby=standby, do=do)


def _may_have_all(former: Successor, standby: Answer, answer: pb.StatusReply) -> bool:
    """Returns whether a standby that does not serve may have what a shard came back without.

    A recalled one that does not answer may be of a cluster that is no more.
    """
    if set(former.jobs) <= jobs_with_weights(answer):
        return False  # A person has restored them.
    return standby.shard.stands_by if standby is not None else not former.is_recalled
