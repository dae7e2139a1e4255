"""What error feedback owes, for checkpoints: sent when a shard asks for it, and taken back.

A shard asks in an acknowledgement, and then this worker sends what it owes before it pushes the
slice again; or in the answer to a heartbeat, because this worker has stopped between two steps.
Either way it is what is owed after a push that has been answered.
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
from psworker.connection.session import Session

log = logging.getLogger("paceline")
NEVER = -1  # A process that has just been started owes what it has claimed, after any step.


class Debts:
    """What this worker owes of one table."""

    def __init__(
        self,
        session: Session,
        table: int,
        layout: Layout,
        feedback: Sequence[Feedback | None],
        pushes: Mapping[int, Future[data_pb2.PushReply]],
    ) -> None:
        """Owes nothing, or what a checkpoint has of this rank.

        Args:
            session: This worker's part in the job.
            table: Its number.
            layout: Its slices.
            feedback: By slice; None where nothing is compressed. Another one may take its place.
            pushes: Those that nobody has seen the answer of, by slice.

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
        self._settled: dict[int, int] = {}  # By slice: step of the last one that is settled.
        if any(entry is not None for entry in feedback):
            self._claim()
            session.debtors[table] = self

    def begin(self, index: int, step: int) -> None:
        """Is told that a slice is pushed; its last push is settled."""
        with self._lock:
            self._begun[index] = step

    def settle(self, index: int, reply: data_pb2.PushReply) -> None:
        """Settles the last push of a slice, and sends what is owed then, if the shard asks."""
        feedback = self._feedback[index]
        if feedback is None:
            return
        with self._lock:
            feedback.settle(Verdict(int(reply.verdict)))
            self._settled[index] = self._begun.get(index, NEVER)
        if reply.owe:
            self._send(index, self._settled[index])

    def restart(self, table: int) -> None:
        """Ends what was under way, which may have been counted; what is owed stays owed."""
        self.table = table
        self._session.debtors[table] = self
        for index in range(len(self._feedback)):
            self.settle(index, data_pb2.PushReply())

    def owe(self, step: int, slices: Sequence[int]) -> None:
        """Sends what is owed after `step`, if this worker has not gone on; from any thread."""
        for index in slices:
            begun = self._settle_early(index)
            if begun == NEVER:
                self._send(index, max(step, 0))
            elif begun is not None and (step == ANY_STEP or begun <= step):
                self._send(index, begun)

    # ----- inside

    def _settle_early(self, index: int) -> int | None:
        """Returns the step of a slice's last push once that is settled: now, if it is answered."""
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
        """Sends what is owed of a slice after `step`, unless it has been pushed again."""
        request = pb.OweRequest(
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
            link.call(link.control.Owe, request)
        except PacelineError as problem:  # Training goes on; whoever takes the checkpoint is told.
            log.warning("what slice %d owes did not get into a checkpoint: %s", index, problem)

    def _claim(self) -> None:
        """Takes back what the shards have for this rank."""
        for shard, link in enumerate(self._session.links):
            request = pb.ClaimRequest(
                job=self._session.job,
                worker=self._session.rank,
                incarnation=self._session.incarnation,
                table=self.table,
            )
            for index in link.call(link.control.Claim, request).slices:
                request.slice = index
                feedback = self._feedback[index]
                assert feedback is not None, f"shard {shard} has a debt of slice {index}"
                for array in link.call(link.control.Claim, request).arrays:
                    value: FloatArray = np.frombuffer(array.data, dtype="<f4")
                    feedback.load(array.name, value)
