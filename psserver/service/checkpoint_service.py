"""The checkpoint service: numbers of a job out of a shard, and back into a new job.

Copies (engine/capture.py) stay until they are released or no client has asked for them for a
minute;
uploads (checkpoint_restore.py) likewise.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import structlog

from pscore.errors import LimitError, RemoteProtocolError
from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from pscore.pb.ps.v1 import checkpoint_pb2_grpc
from psserver.decisions.shard import JOBS_MAX
from psserver.engine.capture import PENDING, CaptureState, TableCapture, capture
from psserver.engine.engine import Engine
from psserver.engine.views import CopiesView
from psserver.service.barrier_wait import WAIT_S_MAX
from psserver.service.checkpoint_restore import UPLOADS_MAX, CheckpointUpload
from psserver.service.last_checkpoint import LastCheckpoint
from psserver.service.messages import to_proto

if TYPE_CHECKING:
    from psserver.service.control import Context

log = structlog.get_logger()
IDLE_S = 60.0
CAPTURES_MAX = JOBS_MAX + 8  # A scheduled one of each job, and some more.
READ_NBYTES_MAX = 1 << 23
POLL_S = 0.02
RESIDUALS_POLL_S = 0.1  # Each looks at every slice and rank.
STATES = {
    CaptureState.WAITING: pb.CAPTURE_WAITING,
    CaptureState.COLLECTING: pb.CAPTURE_RESIDUALS,
    CaptureState.PASSED: pb.CAPTURE_PASSED,
    CaptureState.DONE: pb.CAPTURE_DONE,
}


@dataclass(slots=True, kw_only=True)
class ReadCapture:
    """A copy that a client reads."""

    copy: TableCapture
    touched_s: float


class Checkpointer(checkpoint_pb2_grpc.CheckpointsServicer):
    """The checkpoint service of one shard.

    Attributes:
        captures: The copies that clients read, by the client's id.
        uploads: The checkpoints that clients write, likewise.
    """

    def __init__(self, engine: Engine, last: LastCheckpoint) -> None:
        """Serves `engine`; `last` hears of the last checkpoint before a stop."""
        self._engine = engine
        self._last = last
        self.captures: dict[str, ReadCapture] = {}
        self.uploads: dict[str, CheckpointUpload] = {}
        self._timer: asyncio.TimerHandle | None = None

    # ----- out of the shard

    async def Capture(self, request: pb.CaptureRequest, context: Context) -> pb.CaptureReply:
        """Copies a table, and waits for the copy for a while."""
        found = self.captures.get(request.id) or self._begin(request)
        deadline_s = self._engine.now() + min(request.wait_ms / 1000, WAIT_S_MAX)
        state, _ = found.copy.progress()
        while state in PENDING and self._engine.now() < deadline_s:
            await asyncio.sleep(POLL_S if state is CaptureState.WAITING else RESIDUALS_POLL_S)
            state, _ = found.copy.progress()
        found.touched_s = self._engine.now()
        view = found.copy.view()
        if view.state is CaptureState.DONE and not request.weights_only:
            self._engine.note_saved(request.job)
        about = "" if view.about is None else json.dumps(view.about)
        return to_proto(pb.CaptureReply, view, state=STATES[view.state], about=about)

    async def Read(self, request: pb.ReadRequest, context: Context) -> pb.ReadReply:
        """Returns a part of a copied array."""
        array = self._array(request)
        start = request.offset
        stop = start + min(request.nbytes, READ_NBYTES_MAX)
        return pb.ReadReply(data=array.view(np.uint8)[start:stop].tobytes())

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        """Frees a copy."""
        self._close(request.id)
        return pb.ReleaseReply()

    async def NoteCopies(
        self, request: pb.NoteCopiesRequest, context: Context
    ) -> pb.NoteCopiesReply:
        """Records how copies at a second place fare."""
        self._engine.note_copies(
            CopiesView(place=request.place, problem=request.problem, count=request.count)
        )
        return pb.NoteCopiesReply()

    async def NoteLast(self, request: pb.NoteLastRequest, context: Context) -> pb.NoteLastReply:
        """Records that the last checkpoints before a stop begin, or are over."""
        self._last.note(is_over=request.is_over)
        return pb.NoteLastReply()

    def _begin(self, request: pb.CaptureRequest) -> ReadCapture:
        if len(self.captures) >= CAPTURES_MAX:
            raise LimitError(f"{CAPTURES_MAX} checkpoints are already being read")
        copy = capture(
            self._engine,
            request.job,
            request.table,
            request.version,
            weights_only=request.weights_only,
            base=_base_of(request.base),
        )
        found = ReadCapture(copy=copy, touched_s=self._engine.now())
        self.captures[request.id] = found
        self._schedule_expiry()
        return found

    def _array(self, request: pb.ReadRequest) -> np.ndarray:
        found = self.captures.get(request.id)
        if found is None:
            raise RemoteProtocolError(f"no checkpoint {request.id!r} is being read here")
        found.touched_s = self._engine.now()
        return found.copy.array(request.slice, request.array)

    def _close(self, name: str) -> None:
        found = self.captures.pop(name, None)
        if found is not None:
            found.copy.close()

    # ----- back into a shard

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:
        """Allocates memory for a job's numbers."""
        if len(self.uploads) >= UPLOADS_MAX:
            raise LimitError(f"{UPLOADS_MAX} checkpoints are already being restored")
        staged_nbytes = sum(other.nbytes for other in self.uploads.values())
        upload = CheckpointUpload(request, self._engine, staged_nbytes)
        self.uploads[request.id] = upload
        self._schedule_expiry()
        return pb.PrepareReply()

    async def Write(self, request: pb.WriteRequest, context: Context) -> pb.WriteReply:
        """Receives a part of an array."""
        self._upload(request.id).write(request)
        return pb.WriteReply()

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearReply:
        """Frees the job whose place the new one takes."""
        self._upload(request.id).clear()
        return pb.ClearReply()

    async def Finish(self, request: pb.FinishRequest, context: Context) -> pb.FinishReply:
        """Makes the job of all parts."""
        upload = self._upload(request.id)
        del self.uploads[request.id]
        upload.finish()
        return pb.FinishReply()

    def _upload(self, name: str) -> CheckpointUpload:
        upload = self.uploads.get(name)
        if upload is None:
            raise RemoteProtocolError(f"no checkpoint {name!r} is being restored here")
        return upload

    # ----- time

    def _schedule_expiry(self) -> None:
        """Schedules the expiry of copies and uploads that no client asks for any more."""
        if self._timer is None and (self.captures or self.uploads):
            self._timer = asyncio.get_running_loop().call_later(IDLE_S / 2, self._expire)

    def _expire(self) -> None:
        """Frees copies and uploads that have been idle for long: their client may be dead."""
        self._timer = None
        before_s = self._engine.now() - IDLE_S
        for name in [k for k, v in self.captures.items() if v.touched_s < before_s]:
            job = self.captures[name].copy.job
            log.warning("a checkpoint was not read to its end", job=job)
            self._close(name)
        for name in [k for k, v in self.uploads.items() if v.touched_s < before_s]:
            log.warning("a checkpoint was not written to its end", job=self.uploads[name].job)
            del self.uploads[name]
        self._schedule_expiry()


def _base_of(text: str) -> dict[str, tuple[int, ...]]:
    """Returns the marks of a copy that a client has, by slice.

    Raises:
        RemoteProtocolError: They are not in this form.
    """
    try:
        found = json.loads(text or "{}")
        return {str(index): tuple(map(int, mark)) for index, mark in found.items()}
    except (ValueError, OverflowError, TypeError, AttributeError, RecursionError) as problem:
        raise RemoteProtocolError("the base of a copy is not one") from problem
