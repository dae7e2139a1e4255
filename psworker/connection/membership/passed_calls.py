"""Calls of a script that other workers have passed already."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules.base import waits_for_all
from pscore.table_names import TENSOR
from pscore.table_spec import TableSpec
from psworker.connection.membership.heartbeats import Heartbeats
from psworker.connection.membership.joining import JobMember
from psworker.connection.shard_link import Link

ASKED_BEATS = 2  # The first heartbeat that is answered may have been under way before.
LATER_STEPS = "later steps"
FIRST_WAIT_MS, WAIT_MS_MAX = 200, 2_000  # Between two questions.


class PassedCalls:
    """Asks the shards where others wait for this worker, while it waits for them.

    A worker that is started again waits at a barrier of its script's start, and the others at its
    step: they never come to that barrier (psserver/decisions/passed_calls.py).

    Attributes:
        came_late: Whether it has come to a job under way: others may have passed what it calls.
        at_start: Whether it has come late, and has not made a step.
        places: The tables and barriers at which others wait for it, by the last answers.
        wait_ms: Time until the next question.
    """

    def __init__(
        self,
        member: JobMember,
        links: Sequence[Link],
        heartbeats: Heartbeats,
        specs: Mapping[int, TableSpec],
    ) -> None:
        """Asks nothing yet.

        Args:
            specs: The tables that this worker has declared.
        """
        self.came_late = self.at_start = False
        self.places: list[str] = []
        self.wait_ms = FIRST_WAIT_MS
        self._member = member
        self._links = links
        self._heartbeats = heartbeats
        self._specs = specs
        self._next_s = 0.0  # When to ask the next question at a tensor.
        self._beats: list[int] = []  # By shard: heartbeats from which on the answers count.
        self._found: list[str] = []  # Where others wait for it, when it has asked last.

    def note(self, name: str, places: list[str]) -> None:
        """Keeps the answer at a barrier or tensor; if others wait there, they go on from it."""
        self._found = [] if name in places else places

    def settled(self, name: str) -> list[str]:
        """Returns the last answer if it holds at a barrier or tensor too: nobody need be asked.

        Others wait until this worker comes to where they are, or makes its first step.
        """
        is_there = name in self._found or f"barrier {name!r}" in self._found
        is_over = self._found == [LATER_STEPS] and not self._is_free
        return [] if is_there or is_over or not self.at_start else self._found

    @contextmanager
    def asked(self) -> Iterator[PassedCalls]:
        """Context manager around a wait in which `ask` is called."""
        self.places, self.wait_ms, self._next_s = [], FIRST_WAIT_MS, 0.0
        self._beats = [link.num_beats + ASKED_BEATS for link in self._links]
        self._member.asks = True
        try:
            yield self
        finally:
            self._member.asks = False

    def ask(self, request: pb.BarrierRequest) -> None:
        """Asks again, and prepares the next request by the answers that have come.

        This worker withdraws if it has come late and others wait for it elsewhere, or train on
        without it; behind its first step it does not leave the others in a change of the job. It
        excuses those that have come later and wait for its step.
        """
        links = self._ask()
        del request.excuses[:]
        awaited_by = {rank for link in links for rank in link.awaited_by}
        request.excuses.extend(awaited_by)
        if self.came_late and (self.at_start or not (awaited_by or request.holds)):
            self.places = list(dict.fromkeys(place for link in links for place in link.awaited_at))
            step_on = any(link.others_step for link in links)
            if not self.places and self.at_start and self._is_free and step_on:
                self.places.append(LATER_STEPS)
            request.withdraws = bool(self.places)
        if request.withdraws:
            del request.excuses[:]

    def excuse_at(self, table: str) -> None:
        """Asks again once it is time, while this worker waits for a tensor.

        Rounds of the tensor do not wait for those that have come later, and wait for its step.
        """
        if time.monotonic() < self._next_s:
            return
        links = self._ask()
        self._next_s = time.monotonic() + self.wait_ms / 1000
        if awaited_by := {rank for link in links for rank in link.awaited_by}:
            request = pb.BarrierRequest(
                job=self._member.job,
                worker=self._member.rank,
                incarnation=self._member.incarnation,
                name=table,
                withdraws=True,
                excuses=awaited_by,
                table=table,
            )
            for link in self._links:
                link.call(link.control.Barrier, request)

    def _ask(self) -> list[Link]:
        """Asks all shards, and returns those that have answered."""
        self._heartbeats.hurry(all_shards=True)
        self.wait_ms = min(2 * self.wait_ms, WAIT_MS_MAX)
        answers = zip(self._links, self._beats, strict=True)
        return [link for link, beats in answers if link.num_beats >= beats]

    @property
    def _is_free(self) -> bool:
        """Whether steps of others do without this worker: it has no table, or in such a mode.

        Else they may be on their way to where it waits, and wait for its step only behind that.
        """
        rules = [spec.rule for spec in self._specs.values() if not spec.name.startswith(TENSOR)]
        return not any(waits_for_all(rule, self._member.num_workers) for rule in rules)
