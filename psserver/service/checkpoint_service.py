"""Numbers of a job for a checkpoint: out of the slices at one version, and back into a new job.

A slice is copied by its own queue, right behind the update that makes the wanted version, so all
slices of all shards are of one step and training does not wait for more than the copy. What has
been copied stays until it is released, or nobody has asked for it for a minute; the way back
(checkpoint_restore.py) likewise.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import structlog

from pscore.errors import ConfigError, LimitError, PacelineError, RemoteProtocolError
from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from pscore.pb.ps.v1 import checkpoint_pb2_grpc
from pscore.types import ANY_STEP, Origin
from psserver.decisions.shard import Job
from psserver.decisions.table import Table
from psserver.engine.engine import Engine
from psserver.engine.requests import AtVersion
from psserver.engine.residuals import Ask
from psserver.engine.slice_queue import CopyOut
from psserver.service.barrier_wait import WAIT_S_MAX
from psserver.service.checkpoint_restore import DELIVERIES_MAX, Delivery
from psserver.service.control import refuse

if TYPE_CHECKING:
    from psserver.service.control import Context

log = structlog.get_logger()
IDLE_S = 60.0
CAPTURES_MAX = 8
READ_NBYTES_MAX = 1 << 23
POLL_S = 0.02
OWED_POLL_S = 0.1  # Each looks at every slice and rank.
PENDING = (pb.CAPTURE_WAITING, pb.CAPTURE_OWED)

Arrays = dict[str, np.ndarray]


@dataclass(slots=True, kw_only=True)
class Cut:
    """One table on its way into a checkpoint."""

    job: Job
    table: Table
    version: int
    step: int = 0  # Of training, at that moment.
    touched_s: float
    state: pb.CaptureState = pb.CAPTURE_WAITING
    slices: dict[int, Arrays] = field(default_factory=dict)
    about: dict[int, dict[str, Any]] = field(default_factory=dict)  # By slice.
    at_version: dict[int, AtVersion] = field(default_factory=dict)  # By slice.
    ask: Ask | None = None  # For what the workers owe.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, index: int, arrays: Arrays) -> None:
        """Has the copy of one slice; called by its queue."""
        with self.lock:
            self.slices[index] = arrays
            if len(self.slices) == len(self.table.clocks) and self.state == pb.CAPTURE_WAITING:
                self.state = pb.CAPTURE_DONE


class Checkpointer(checkpoint_pb2_grpc.CheckpointsServicer):
    """The checkpoint service of one shard."""

    def __init__(self, engine: Engine) -> None:
        """Serves `engine`."""
        self._engine = engine
        self._captures: dict[str, Cut] = {}
        self._deliveries: dict[str, Delivery] = {}
        self._timer: asyncio.TimerHandle | None = None

    # ----- out

    async def Capture(self, request: pb.CaptureRequest, context: Context) -> pb.CaptureReply:
        """Copies a table, and waits for that for a while."""
        try:
            capture = self._captures.get(request.id) or self._begin(request)
        except PacelineError as error:
            await refuse(context, error)
            raise
        deadline_s = self._engine.now() + min(request.wait_ms / 1000, WAIT_S_MAX)
        state, owing = self._state(capture)
        while state in PENDING and self._engine.now() < deadline_s:
            await asyncio.sleep(POLL_S if state == pb.CAPTURE_WAITING else OWED_POLL_S)
            state, owing = self._state(capture)
        capture.touched_s = self._engine.now()
        with self._engine.lock:
            versions = [clock.version for clock in capture.table.clocks.values()] or [-1]
            waiting_for = self._engine.waits.of_table(capture.job, capture.table)
            is_done = state == pb.CAPTURE_DONE
            about = json.dumps(self._describe(capture)) if is_done else ""
            by_step = capture.table.spec.rule.by_step
        return pb.CaptureReply(
            state=state,
            owing=owing,
            version_min=min(versions),
            version_max=max(versions),
            about=about,
            by_step=by_step,
            waiting_for=waiting_for,
        )

    async def Read(self, request: pb.ReadRequest, context: Context) -> pb.ReadReply:
        """Returns a part of a copied array."""
        try:
            array = self._array(request)
        except PacelineError as error:
            await refuse(context, error)
            raise
        start = request.offset
        stop = start + min(request.nbytes, READ_NBYTES_MAX)
        return pb.ReadReply(data=array.view(np.uint8)[start:stop].tobytes())

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        """Forgets what was copied."""
        self._forget(request.id)
        return pb.ReleaseReply()

    def _begin(self, request: pb.CaptureRequest) -> Cut:
        engine = self._engine
        with engine.lock:
            job = engine.shard.jobs.get(request.job)
            table = None if job is None else job.tables.get(request.table)
            if job is None or table is None:
                raise ConfigError(
                    f"no table {request.table!r} of a job {request.job!r} on shard "
                    f"{engine.shard.index}"
                )
            if len(self._captures) >= CAPTURES_MAX:
                raise LimitError(f"{CAPTURES_MAX} checkpoints are being read already")
            self._require_room(job, table, weights_only=request.weights_only)
            capture = Cut(job=job, table=table, version=request.version, touched_s=engine.now())
            self._captures[request.id] = capture
            self._arm(capture)
            if not request.weights_only and table.spec.compressor.state_names:
                step = request.version - 1 if request.version >= 0 else ANY_STEP
                capture.ask = engine.requests.debts.ask(job, table, step)
        self._watch()
        return capture

    def _require_room(self, job: Job, table: Table, *, weights_only: bool) -> None:
        """Refuses a copy that the host has no memory for.

        Raises:
            LimitError: It has none.
        """
        owed = 0 if weights_only else len(table.spec.compressor.state_names)
        num_arrays = 1 + len(table.optimizer.state_names) + owed * job.membership.num_workers
        available = psutil.virtual_memory().available
        if num_arrays * table.nbytes > available:
            raise LimitError(
                f"a copy of table {table.spec.name!r} of job {job.name!r} on shard "
                f"{self._engine.shard.index} is of {num_arrays * table.nbytes} bytes, {available} "
                "are left on its host"
            )

    def _state(self, capture: Cut) -> tuple[pb.CaptureState, list[int]]:
        """Returns how far a copy has come, and the ranks that are waited for."""
        if capture.state != pb.CAPTURE_DONE or capture.ask is None:
            return capture.state, []
        with self._engine.lock:
            missing = capture.ask.missing()
            if missing:
                has_passed = capture.ask.has_passed(missing)
                state = pb.CAPTURE_PASSED if has_passed else pb.CAPTURE_OWED
                return state, sorted({rank for _, rank in missing})
            for index, arrays in capture.slices.items():
                arrays |= capture.ask.named(index)
            self._engine.requests.debts.drop(capture.ask)
            capture.ask = None
        return capture.state, []

    def _arm(self, capture: Cut) -> None:
        """Has each slice copied now, or when it gets there; called under the engine's lock."""
        job, table, wanted = capture.job, capture.table, capture.version
        if any(clock.version > wanted >= 0 for clock in table.clocks.values()):
            capture.state = pb.CAPTURE_PASSED
            return
        at = [wanted] if wanted >= 0 else [clock.progress() for clock in table.clocks.values()]
        capture.step = table.spec.step_at(min(at, default=0))
        if not table.clocks:
            capture.state = pb.CAPTURE_DONE
        for index, clock in table.clocks.items():
            key = (id(job), table.index, index)
            copy = CopyOut(take=partial(capture.take, index))
            capture.about[index] = {"version": wanted, "clocks": {}}
            if wanted == -1:  # Without a step in common: which steps are in tells the numbers.
                clocks = {str(rank): steps.clock for rank, steps in clock.counted.items()}
                capture.about[index] = {"version": clock.version, "clocks": clocks}
            if wanted in (-1, clock.version):
                self._engine.requests.queues[key].submit([copy])
            else:
                capture.at_version[index] = AtVersion(version=wanted, work=copy)
                self._engine.requests.at_version.setdefault(key, []).append(
                    capture.at_version[index]
                )

    def _describe(self, capture: Cut) -> dict[str, Any]:
        # The count of pushes is set when it is restored: not all modes have one.
        spec = replace(capture.table.spec, origin=Origin(0, capture.step))
        return {
            "spec": spec.to_json(),
            "num_workers": capture.job.membership.num_workers,
            "slices": {
                str(index): {
                    **capture.about[index],
                    "counts": arrays["counts"].tolist(),
                    "arrays": sorted(name for name in arrays if name != "counts"),
                }
                for index, arrays in capture.slices.items()
            },
        }

    def _array(self, request: pb.ReadRequest) -> np.ndarray:
        capture = self._captures.get(request.id)
        if capture is None:
            raise RemoteProtocolError(f"no checkpoint {request.id!r} is being read here")
        capture.touched_s = self._engine.now()
        try:
            return capture.slices[request.slice][request.array]
        except KeyError:
            raise RemoteProtocolError(
                f"no array {request.array!r} of slice {request.slice} was copied"
            ) from None

    # ----- back

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:
        """Makes room for a job's numbers."""
        try:
            if len(self._deliveries) >= DELIVERIES_MAX:
                raise LimitError(f"{DELIVERIES_MAX} checkpoints are being restored already")
            with self._engine.lock:
                staged_nbytes = sum(other.nbytes for other in self._deliveries.values())
                delivery = Delivery(request, self._engine, staged_nbytes)
        except PacelineError as error:
            await refuse(context, error)
            raise
        self._deliveries[request.id] = delivery
        self._watch()
        return pb.PrepareReply()

    async def Write(self, request: pb.WriteRequest, context: Context) -> pb.WriteReply:
        """Takes a part of an array."""
        try:
            self._delivery(request.id).write(request)
        except PacelineError as error:
            await refuse(context, error)
            raise
        return pb.WriteReply()

    async def Finish(self, request: pb.FinishRequest, context: Context) -> pb.FinishReply:
        """Makes the job, with all that was written."""
        try:
            delivery = self._delivery(request.id)
            del self._deliveries[request.id]
            with self._engine.lock:
                delivery.finish()
        except PacelineError as error:
            await refuse(context, error)
            raise
        return pb.FinishReply()

    def _delivery(self, name: str) -> Delivery:
        delivery = self._deliveries.get(name)
        if delivery is None:
            raise RemoteProtocolError(f"no checkpoint {name!r} is being restored here")
        return delivery

    # ----- time

    def _forget(self, name: str) -> None:
        with self._engine.lock:
            capture = self._captures.pop(name, None)
            if capture is None:
                return
            if capture.ask is not None:
                self._engine.requests.debts.drop(capture.ask)
            for index, at_version in capture.at_version.items():
                key = (id(capture.job), capture.table.index, index)
                others = self._engine.requests.at_version[key]
                others.remove(at_version)
                if not others:
                    del self._engine.requests.at_version[key]

    def _watch(self) -> None:
        """Has what nobody asks for any more forgotten in time."""
        if self._timer is None and (self._captures or self._deliveries):
            self._timer = asyncio.get_running_loop().call_later(IDLE_S / 2, self._expire)

    def _expire(self) -> None:
        """Forgets what nobody has asked for in a while: whoever asked was killed, perhaps."""
        self._timer = None
        before_s = self._engine.now() - IDLE_S
        for name in [k for k, v in self._captures.items() if v.touched_s < before_s]:
            log.warning("a checkpoint was not read to its end", job=self._captures[name].job.name)
            self._forget(name)
        for name in [k for k, v in self._deliveries.items() if v.touched_s < before_s]:
            log.warning("a checkpoint was not written to its end", job=self._deliveries[name].job)
            del self._deliveries[name]
        self._watch()
