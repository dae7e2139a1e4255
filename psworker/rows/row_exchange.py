"""Pushes and pulls of row tables over the network: one message a row slice.

Every worker pushes every row slice at every step, also without a row: so that a step closes, and
the mean's weight is that of all workers. A slice has at most one push under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pscore.errors import TableFullError
from pscore.net import wire
from pscore.pb.ps.v1 import data_pb2
from pscore.rows.payload import ALL, encode_pull
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, HyperArray, Role
from psworker.connection.accounts.missed import Missed
from psworker.connection.accounts.traffic import Traffic
from psworker.connection.exchange.answer_wait import AnswerWait
from psworker.connection.exchange.exchange import WAIT_MS
from psworker.connection.membership.session import Session
from psworker.rows.lookups import IdArray
from psworker.transports import OutgoingPush, PullCall, Transport


@dataclass(slots=True, kw_only=True, eq=False)
class RowPull(PullCall):
    """A pull of rows: all of them into `weights`, or those that have changed since a version."""

    since: int = ALL  # The version; `ALL`: the answer has every row.
    # The payload of the answer.
    answer: memoryview = field(default_factory=lambda: memoryview(b""))

    def targets(self, reply: data_pb2.PullReply, nbytes: int) -> list[memoryview]:
        """Returns the memory for a payload of `nbytes`.

        Raises:
            DecodeError: The payload has another length than this pull's.
        """
        if self.since == ALL:
            targets = PullCall.targets(self, reply, nbytes)
        else:
            targets = [memoryview(bytearray(nbytes))]
        self.answer = targets[0]
        return targets


class RowExchange:
    """Pushes and pulls of the row tables of one optimizer.

    Attributes:
        layout: The row slices.
        counts: By slice: pushes of this worker, as the shards count them; the step of its next.
        versions: By slice: version of the rows that training has pulled last.
        has_weights: Whether all slices had a first version when this worker joined.
        missed: Steps whose rows did not count in every slice.
        answers: The waits for answers to pushes, and to pulls behind them.
        first_answers: The waits for pulls that no push of this worker has to precede.
    """

    def __init__(self, session: Session, spec: TableSpec) -> None:
        """Declares the tables at every shard.

        Raises:
            JobMismatchError: The job's tables are others; names the difference.
        """
        self.session, self.spec, self.layout = session, spec, spec.layout()
        self.dims = [tensor.shape[1] for tensor in spec.tensors]
        self.traffic = Traffic()
        self.missed = Missed(len(self.layout.slices), session.rank, of=" of the row tables")
        self.counts = [0] * len(self.layout.slices)
        self.versions = [0] * len(self.layout.slices)
        self._pushes: dict[int, OutgoingPush] = {}  # Under way, by slice.
        # By slice: the step that it expects of this worker next, and its version, once asked.
        self._found: list[tuple[int, int]] = []
        self._define()
        self.answers = AnswerWait(session, spec.name, self.layout, self._raise_failed)
        self.first_answers = AnswerWait(session, spec.name, self.layout, lambda: None)
        session.pushes.add(self)

    def _define(self) -> None:
        """Declares the tables in the present membership."""
        agreed = self.session.define(self.spec, again=self.has_updates)
        self._table, self.origin = agreed[:2]
        self.has_weights = agreed.has_weights
        self._joined_as = self.session.incarnation

    @property
    def has_updates(self) -> bool:
        """Whether some answer had an update in it."""
        return any(self.versions)

    def ask(self) -> int:
        """Asks every slice with which step this worker begins; from its answer on it waits for it.

        Returns:
            The newest of these steps, as training counts them.

        Raises:
            PacelineError: A shard refused the request, or does not answer.
        """
        places = range(len(self.counts))
        self.counts = [0 for _ in places]
        replies = [self.wait(index, self._request_to_begin(index)) for index in places]
        self.missed.report_lost(self.spec.rule)
        by_step, origin = self.spec.rule.by_step, self.origin
        # An asynchronous slice has as many versions as all workers together have pushed.
        self._found = [
            (reply.clock, reply.version if by_step else reply.clock) for reply in replies
        ]
        return origin.step + max(0, max(map(max, self._found)) - origin.clock)

    def begin_at(self, step: int | None) -> Callable[[], None]:
        """Announces to every slice, after `ask`, the step with which this worker begins.

        Args:
            step: Step of the training; None: the newest step that a slice expects next.

        Returns:
            A function that waits until every slice has been told; it raises as `ask` does.
        """
        first, origin = max(map(max, self._found)), self.origin
        if step is not None:
            first = max(first, origin.clock + step - origin.step)
        self.counts = [first for _ in self.counts]
        calls = {
            index: self._request_to_begin(index)
            for index, found in enumerate(self._found)
            if found != (first, first)
        }

        def wait() -> None:
            for index, call in calls.items():
                self.wait(index, call)

        return wait

    def _request_to_begin(self, index: int) -> RowPull:
        """Requests no row of a slice, as a worker that has come anew."""
        nothing = [np.zeros(0, np.uint64) for _ in self.dims]
        return self.request(index, nothing, np.zeros(0, np.float32), begins=True)

    # ----- pulls

    def request(
        self,
        index: int,
        ids: Sequence[IdArray],
        out: FloatArray,
        *,
        is_look: bool = False,
        is_early: bool = False,
        begins: bool = False,
        since: int = ALL,
    ) -> RowPull:
        """Requests rows of one slice, as they are after this worker's last push.

        Args:
            ids: By table: `(n,) uint64`, ascending, all of this slice.
            out: Receives the rows, flat, table by table.
            is_early: Whether rows of any version will do.
            begins: Whether this worker has come anew, and pushes no step before `counts[index]`.
            since: Version of rows that this worker has; `ALL`: none.
        """
        rule, count = self.spec.rule, 0 if is_early else self.counts[index]
        header = data_pb2.PullHeader(
            sender=self._sender(),
            slice=index,
            clock=count,
            min_version=rule.min_version(count - 1) if count else 0,
            wait_ms=WAIT_MS,
            begins=begins,
            look=is_look,
        )
        request = encode_pull(ids, since)
        call = RowPull(header=header, weights=out, state=[], request=request, since=since)
        self.session.pace.follow(call.done)
        self._transport(index).pull(call)
        return call

    def wait(self, index: int, call: RowPull) -> data_pb2.PullReply:
        """Waits for the rows of a slice; returns the answer.

        Raises:
            PacelineError: The shard refused the request, or does not answer.
        """
        what = f"rows after step {self.counts[index] - 1}" if self.counts[index] else "first rows"
        answers = self.answers if call.header.clock else self.first_answers
        reply = answers.wait(call.done, index, what)
        if not call.header.look:
            self.versions[index] = reply.version
            self.missed.compare(index, reply.counted - 1)
        self.traffic.pulled_nbytes += call.answer.nbytes
        self.traffic.num_pulls += 1
        return reply

    # ----- pushes

    def push(
        self,
        index: int,
        parts: Sequence[memoryview],
        *,
        hyper: HyperArray,
        present: int,
        samples: float,
    ) -> None:
        """Sends the gradient of a slice's rows, as this worker's next push.

        Args:
            parts: The payload, which must not change; empty: no rows.
            hyper: `(num_groups, num_hyper) float64`.
            present: Bit i: table i has a gradient, perhaps of no row.
        """
        header = data_pb2.PushHeader(
            step=self.counts[index],
            base_version=self.versions[index],
            samples=samples,
            present=wire.pack_bits(present, len(self.spec.tensors)),
            hyper=hyper.ravel().tolist(),
        )
        self._send(index, header, parts)
        self.missed.sent(index, self.counts[index])
        self.counts[index] += 1
        self.traffic.num_pushes += 1
        self.traffic.pushed_nbytes += sum(part.nbytes for part in parts)

    def load(self, index: int, role: Role, parts: Sequence[memoryview] = (), step: int = 0) -> None:
        """Sends first values of a slice's rows, before the first step; or the step of a state."""
        header = data_pb2.PushHeader(role=data_pb2.Role.Name(int(role)), step=step)
        self._send(index, header, parts)

    def flush(self) -> None:
        """Waits until every push is acknowledged."""
        for index in list(self._pushes):
            self._await_acknowledgement(index)

    def follow(self) -> None:
        """Forgets pushes under way if this worker has joined the job again; they may be counted."""
        if self._joined_as != self.session.incarnation:
            self._define()
            self._pushes.clear()
            self.session.pushes.add(self)
            self.missed.doubt(self.session.rank)

    def _send(self, index: int, header: data_pb2.PushHeader, parts: Sequence[memoryview]) -> None:
        self._await_acknowledgement(index)
        header.sender.CopyFrom(self._sender())
        header.slice = index
        self._start(index, header, parts)

    def _start(self, index: int, header: data_pb2.PushHeader, parts: Sequence[memoryview]) -> None:
        outgoing = OutgoingPush(header=header, payload=lambda: parts)
        self._pushes[index] = outgoing
        self.session.pace.follow(outgoing.done)
        self._transport(index).push(outgoing)

    def _await_acknowledgement(self, index: int) -> None:
        push = self._pushes.pop(index, None)
        if push is None:
            return
        try:
            reply = self.answers.wait(push.done, index, "room for rows")
        except TableFullError:
            self._pushes[index] = push
            self._raise_failed()
            raise  # It is of another slice.
        if reply.verdict == data_pb2.VERDICT_TOO_LATE:
            self.traffic.num_too_late += 1
            self.missed.late(self.session.rank, index, self.spec.rule)

    def _raise_failed(self) -> None:
        """Raises the error of pushes that were refused: answers may depend on them.

        A push for which there is no room leaves once more without rows, so that its step can close
        and this worker may continue. One error names all of them: the others are waited for.
        """
        problems = [push.done.exception() for push in self._pushes.values() if push.done.done()]
        for problem in filter(None, problems):
            if not isinstance(problem, TableFullError):
                raise problem
        if not any(problems):
            return
        refused: dict[int, TableFullError] = {}
        for index, push in list(self._pushes.items()):
            try:
                self.first_answers.wait(push.done, index, "room for rows")
            except TableFullError as problem:
                refused[index] = problem
        for index in refused:
            push = self._pushes[index]
            self._start(index, push.header, [])
            self.missed.left_out(index)
        step = max(self._pushes[index].header.step for index in refused)
        places = ", ".join(map(str, refused))
        raise TableFullError(
            f"{'; '.join(map(str, refused.values()))}. The rows of step {step} of worker "
            f"{self.session.rank} do not count in slice {places}; a script that catches this may "
            "continue"
        )

    def _transport(self, index: int) -> Transport:
        self.session.require_own()
        return self.session.links[self.layout.slices[index].shard].transport

    def _sender(self) -> data_pb2.Sender:
        session = self.session
        return data_pb2.Sender(
            job=session.job, table=self._table, worker=session.rank, incarnation=session.incarnation
        )
