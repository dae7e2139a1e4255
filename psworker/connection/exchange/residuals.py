"""Residuals of error feedback in checkpoints: sent when a shard requests them, fetched at a start.

A shard asks in the acknowledgement of a push; then this worker sends the residual before it pushes
the slice again. Or it asks in the answer to a heartbeat, if this worker has stopped between two
steps. Either way the residual is the one after an acknowledged push.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from pscore.errors import PacelineError
from pscore.partition import Layout
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from pscore.types import ANY_STEP, FloatArray, Verdict
from psworker.compression.error_feedback import Feedback
from psworker.connection.membership.session import Session

log = logging.getLogger("paceline")
NEVER = -1  # Not pushed yet: the residual is the fetched one, after any step.


class Residuals:
    """The residuals of this worker in one table, as checkpoints need them."""

    def __init__(
        self,
        session: Session,
        table: int,
        layout: Layout,
        feedback: Sequence[Feedback | None],
        pushes: Mapping[int, Future[data_pb2.PushReply]],
    ) -> None:
        """Fetches the residuals that a restored checkpoint has for this rank.

        Args:
            feedback: Error feedback by slice, None where nothing is compressed; read again each
                time, since entries may be replaced.
            pushes: Pushes by slice whose answers have not been handled yet.

        Raises:
            PacelineError: A shard does not answer.
        """
        self.table = table
        self._session = session
        self._layout = layout
        self._feedback = feedback
        self._pushes = pushes
        self._lock = threading.Lock()
        self._begun: dict[int, int] = {}  # By slice: step of the last push.
        self._settled: dict[int, int] = {}  # By slice: step of the last push that is settled.
        if any(entry is not None for entry in feedback):
            self._fetch()
            session.residual_senders[table] = self

    def begin(self, index: int, step: int) -> None:
        """Records the start of a push. The slice's previous push must be settled."""
        with self._lock:
            self._begun[index] = step

    def settle(self, index: int, reply: data_pb2.PushReply) -> None:
        """Settles the last push of a slice, and sends the residual if the shard requests it."""
        feedback = self._feedback[index]
        if feedback is None:
            return
        with self._lock:
            feedback.settle(Verdict(int(reply.verdict)))
            self._settled[index] = self._begun.get(index, NEVER)
        if reply.send_residual:
            self._send(index, self._settled[index])

    def restart(self, table: int) -> None:
        """Settles all pushes, which may have been counted or not; keeps the residuals."""
        self.table = table
        self._session.residual_senders[table] = self
        for index in range(len(self._feedback)):
            self.settle(index, data_pb2.PushReply())

    def send_after(self, step: int, slices: Sequence[int]) -> None:
        """Sends residuals as they are after `step`, unless this worker has pushed a later step.

        It may be called from any thread.

        Args:
            step: Step of the push; `ANY_STEP`: the last one.
        """
        for index in slices:
            begun = self._settle_early(index)
            if begun == NEVER:
                self._send(index, max(step, 0))
            elif begun is not None and (step == ANY_STEP or begun <= step):
                self._send(index, begun)

    def _settle_early(self, index: int) -> int | None:
        """Settles the last push of a slice if it is answered; returns its step, else None."""
        with self._lock:
            begun, feedback = self._begun.get(index, NEVER), self._feedback[index]
            if begun == NEVER or feedback is None:
                return begun
            if self._settled.get(index) != begun:
                push = self._pushes.get(index)
                if push is None or not push.done() or push.exception() is not None:
                    return None
                feedback.settle(Verdict(int(push.result().verdict)))
                self._settled[index] = begun
            return begun

    def _send(self, index: int, step: int) -> None:
        """Sends the residual of a slice after `step`, unless the slice has been pushed again."""
        request = pb.SendResidualRequest(
            job=self._session.job,
            worker=self._session.rank,
            incarnation=self._session.incarnation,
            table=self.table,
            slice=index,
            step=step,
        )
        with self._lock:
            feedback = self._feedback[index]
            if feedback is None or self._begun.get(index, NEVER) not in (step, NEVER):
                return
            for name, array in feedback.state.items():
                request.arrays.add(name=name, data=np.asarray(array, "<f4").tobytes())
        link = self._session.links[self._layout.slices[index].shard]
        try:
            link.call(link.control.SendResidual, request)
        except PacelineError as problem:  # Training continues; the checkpoint reports the gap.
            log.warning("the residual of slice %d is missing in a checkpoint: %s", index, problem)

    def _fetch(self) -> None:
        """Loads the residuals that the shards have for this rank."""
        for link in self._session.links:
            request = pb.FetchResidualRequest(
                job=self._session.job,
                worker=self._session.rank,
                incarnation=self._session.incarnation,
                table=self.table,
            )
            for index in link.call(link.control.FetchResidual, request).slices:
                request.slice = index
                feedback = self._feedback[index]
                if feedback is None:
                    continue  # Another process of this worker has the slice.
                for array in link.call(link.control.FetchResidual, request).arrays:
                    value: FloatArray = np.frombuffer(array.data, dtype="<f4")
                    feedback.load(array.name, value)
