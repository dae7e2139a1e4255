"""Checkpoints of a job: all its numbers out of the shards at one step, and back into shards.

A slice is copied right behind the update that makes the wanted version, in a mode that counts by
steps; training continues meanwhile. In an asynchronous mode slices have no step in common: they are
copied at one moment, each with the steps of each worker that are in it. Residuals belong to each
worker; the shards request them as of its last push in that step (residuals.py). checkpoint_files.py
describes the files.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import numpy as np

from pscore.net.credentials import Credentials
from pscore.net.rpc import ChannelOptions, error_of
from pscore.optimizers import OPTIMIZERS
from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from pscore.pb.ps.v1 import checkpoint_pb2_grpc, control_pb2
from pscore.table_spec import TableSpec
from psserver.archives import archive_of
from psserver.decisions.job import State
from psserver.exits import CommandError, Exit
from psserver.remote import ask
from psserver.remote.checkpoint_files import Checkpoint, TableState

CHUNK_NBYTES = 4 << 20
CALL_TIMEOUT_S = 30.0
WAIT_MS = 2000
RESIDUALS_WAIT_S = 60.0  # Workers that have stopped are asked at each of their heartbeats.
ATTEMPTS = 8

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Stub = checkpoint_pb2_grpc.CheckpointsStub


class JobShards:
    """Connections to the shards of a job."""

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        options: ChannelOptions = (),
    ) -> None:
        """Connects lazily; `options` are those of the channels."""
        self.addresses = addresses
        self._channels = [credentials.channel(address, options) for address in addresses]
        self.stubs = [Stub(channel) for channel in self._channels]

    def call(
        self,
        shard: int,
        method: Callable[[Stub], grpc.UnaryUnaryMultiCallable[Request, Reply]],
        request: Request,
    ) -> Reply:
        """Makes one call.

        Args:
            shard: Index of the shard.
            method: Returns the method of the shard's stub.
            request: Its argument.

        Raises:
            CommandError: The shard does not answer, or refuses.
        """
        try:
            return method(self.stubs[shard])(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as failure:
            error = error_of(failure, self.addresses[shard])
            raise CommandError(Exit.NO_ANSWER, f"{self.addresses[shard]}: {error}") from failure

    def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels:
            channel.close()


# ----- out of the shards


def capture(
    addresses: Sequence[str], credentials: Credentials, job: str | None, *, weights_only: bool
) -> Checkpoint:
    """Returns a job as it is at one step.

    Args:
        addresses: Addresses of all shards, in order.
        credentials: With the token for everything.
        job: Its name; may be left out if there is one only.
        weights_only: Leave the optimizer's state and the mode's memory out.

    Raises:
        CommandError: There is no such job, or a shard does not answer.
    """
    statuses = ask.statuses(addresses, credentials, is_patient=True)
    found = _choose(statuses[0], job)
    if not holds_weights(found):
        raise CommandError(
            Exit.USAGE,
            f"job {found.job!r} runs its optimizer on the workers (optimizer_on='worker'), so the "
            "shards have no weights to save; let the script save state_dict()",
        )
    shards = JobShards(addresses, credentials, ask.PATIENT)
    try:
        checkpoint = Checkpoint(
            job=found.job,
            num_workers=found.num_workers,
            min_workers=found.min_workers,
            is_finished=is_finished(found),
        )
        for table in found.tables:
            versions = [
                (entry.version_min, entry.version_max)
                for status in statuses
                for other in status.jobs
                if other.job == found.job
                for entry in other.tables
                if entry.name == table.name and entry.num_slices
            ]
            newest = max((version for _, version in versions), default=-1)
            state = _capture_table(shards, found.job, table.name, newest, weights_only)
            checkpoint.tables.append(state)
        return checkpoint
    finally:
        shards.close()


def is_finished(job: control_pb2.JobStatus) -> bool:
    """Returns whether a job has ended: its name is free for another one."""
    return job.state == State.ENDED.value


def holds_weights(job: control_pb2.JobStatus) -> bool:
    """Returns whether the weights of a job's models are on the shards."""
    return all(
        OPTIMIZERS[table.optimizer].holds_weights
        for table in job.tables
        if table.optimizer in OPTIMIZERS
    )


def _choose(status: control_pb2.StatusReply, name: str | None) -> control_pb2.JobStatus:
    jobs = [job for job in status.jobs if name in (None, job.job) and job.tables]
    if len(jobs) == 1:
        return jobs[0]
    listed = ", ".join(repr(job.job) for job in status.jobs) or "none"
    wanted = "a job with weights" if name is None else f"a job {name!r} with weights"
    hint = "; choose one with --job" if jobs else ""
    raise CommandError(Exit.USAGE, f"this needs {wanted}, and there are {listed}{hint}")


def _capture_table(
    shards: JobShards, job: str, table: str, newest: int, weights_only: bool
) -> TableState:
    """Copies a table at the newest version, or at one soon to come if that is gone already."""
    version, margin = newest, 1
    gone = -1  # The newest version that is no longer available.
    for _ in range(ATTEMPTS):
        name = secrets.token_hex(8)
        try:
            request = pb.CaptureRequest(
                job=job, table=table, id=name, version=version, weights_only=weights_only
            )
            replies = _capture_at(shards, request, gone)
            if all(reply.state == pb.CAPTURE_DONE for reply in replies):
                state = _read(shards, name, replies, weights_only)
                _require_weights(state, job)
                return state
        finally:
            for shard in range(len(shards.stubs)):
                shards.call(shard, lambda stub: stub.Release, pb.ReleaseRequest(id=name))
        if not all(reply.by_step for reply in replies):
            version = -1
        elif any(reply.state == pb.CAPTURE_PASSED for reply in replies):
            gone = max(gone, version)
            version = max(reply.version_max for reply in replies) + margin
            margin *= 2
        else:  # Nobody pushes: the version that all have is the newest.
            version = max(reply.version_max for reply in replies)
    raise CommandError(
        Exit.NO_ANSWER,
        f"table {table!r} of job {job!r} could not be copied at one version in {ATTEMPTS} "
        "attempts: a worker has stopped in the middle of a step (see psserver status), or "
        "steps are too fast",
    )


def _require_weights(state: TableState, job: str) -> None:
    """Raises a `CommandError` if a slice has been declared, and has no weights yet."""
    if state.updates[0] < 0:
        raise CommandError(
            Exit.NO_ANSWER,
            f"table {state.spec.name!r} of job {job!r} has no weights yet; worker 0 uploads them "
            "when it has joined",
        )


def _capture_at(shards: JobShards, request: pb.CaptureRequest, gone: int) -> list[pb.CaptureReply]:
    """Requests a copy at one version from all shards; returns when they have it, or one cannot.

    Also returns if no worker pushes, unless the version that all have is `gone`: one worker has
    stopped, and others have pushed the step that it has not, so their earlier residuals are gone.

    Raises:
        CommandError: Workers do not send their residuals, or do not continue.
    """
    everybody = range(len(shards.stubs))
    deadline_s = time.monotonic() + RESIDUALS_WAIT_S
    replies = [
        shards.call(shard, lambda stub: stub.Capture, request) for shard in everybody
    ]  # All are armed.
    if not all(reply.by_step for reply in replies) and request.version >= 0:
        for reply in replies:
            reply.state = pb.CAPTURE_PASSED
    request.wait_ms = WAIT_MS
    while not any(reply.state == pb.CAPTURE_PASSED for reply in replies):
        with ThreadPoolExecutor(len(everybody)) as pool:  # All wait at once.
            replies = list(
                pool.map(
                    lambda shard: shards.call(shard, lambda stub: stub.Capture, request), everybody
                )
            )
        states = {reply.state for reply in replies}
        is_idle = pb.CAPTURE_WAITING in states and max(r.version_max for r in replies) > gone
        if is_idle or states == {pb.CAPTURE_DONE}:
            break
        if time.monotonic() > deadline_s:
            ranks = sorted({rank for reply in replies for rank in reply.missing})
            awaited = next((r.waiting_for for r in replies if r.waiting_for), "nothing")
            raise CommandError(
                Exit.NO_ANSWER,
                f"table {request.table!r} of job {request.job!r} could not be copied within "
                f"{RESIDUALS_WAIT_S:g} s: a worker has stopped in the middle of a step, or has not "
                f"sent its residuals: {ranks or 'nobody'}; the job waits for {awaited}",
            )
    return replies


def _read(
    shards: JobShards, name: str, replies: Sequence[pb.CaptureReply], weights_only: bool
) -> TableState:
    about = [json.loads(reply.about) for reply in replies]
    spec = TableSpec.from_json(about[0]["spec"])
    layout, archive = spec.layout(), archive_of(spec.content.name)
    room = archive.room(spec, layout)
    counts = [0] * len(spec.tensors)
    slices: dict[str, Any] = {}
    for part in layout.slices:
        entry = about[part.shard]["slices"][str(part.index)]
        slices[str(part.index)] = {"version": entry["version"], "clocks": entry["clocks"]}
        for segment, count in zip(part.segments, entry["counts"], strict=True):
            counts[segment.tensor] = count
        names = entry["arrays"]
        for array in archive.weights_only(names) if weights_only else names:
            target = room.target(part, array, entry["nbytes"][array])
            for offset in range(0, target.nbytes, CHUNK_NBYTES):
                request = pb.ReadRequest(
                    id=name, slice=part.index, array=array, offset=offset, nbytes=CHUNK_NBYTES
                )
                data = shards.call(part.shard, lambda stub: stub.Read, request).data
                target[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
    versions = {entry["version"] for entry in slices.values()}
    return TableState(
        spec=spec,
        version=versions.pop() if len(versions) == 1 else -1,
        slices=slices,
        counts=counts,
        arrays=room.arrays(),
    )


# ----- back into shards


def restore(
    addresses: Sequence[str],
    credentials: Credentials,
    checkpoint: Checkpoint,
    job: str,
    only: Sequence[int] | None = None,
    *,
    replaces: bool = False,
) -> None:
    """Makes a job of a checkpoint, on any number of shards; workers then join it.

    Args:
        addresses: Addresses of all shards, in order.
        credentials: With the token for everything.
        checkpoint: The checkpoint that was read.
        job: Name of the job to make.
        only: The shards that get their part, in the order in which they begin; None: all of them.
        replaces: Whether it takes the place of a job with live workers, which then join again.

    Raises:
        CommandError: A shard does not answer, or has a job of that name with live workers.
    """
    name = secrets.token_hex(8)
    chosen = range(len(addresses)) if only is None else only
    request = preparation(name, checkpoint, job, len(addresses))
    request.replaces = replaces
    shards = JobShards(addresses, credentials)
    try:
        for shard in chosen:
            shards.call(shard, lambda stub: stub.Prepare, request)
        for shard, message in messages(name, checkpoint, len(addresses), chosen):
            shards.call(shard, lambda stub: stub.Write, message)
        for shard in chosen:
            shards.call(shard, lambda stub: stub.Finish, pb.FinishRequest(id=name))
    finally:
        shards.close()


def preparation(name: str, checkpoint: Checkpoint, job: str, num_shards: int) -> pb.PrepareRequest:
    """Returns the message that declares a job to each of its shards.

    Args:
        name: Name of this delivery.
        checkpoint: The checkpoint that is delivered.
        job: Name of the job to make.
        num_shards: Number of shards of the cluster.
    """
    return pb.PrepareRequest(
        job=job,
        id=name,
        num_workers=checkpoint.num_workers,
        min_workers=checkpoint.min_workers,
        tables=[json.dumps(_about(table, num_shards)) for table in checkpoint.tables],
    )


def messages(
    name: str, checkpoint: Checkpoint, num_shards: int, chosen: Container[int]
) -> Iterator[tuple[int, pb.WriteRequest]]:
    """Returns the messages that bring numbers to chosen shards, each with the shard's index."""
    for number, table in enumerate(checkpoint.tables):
        spec = replace(table.spec, num_shards=num_shards)
        layout, archive = spec.layout(), archive_of(spec.content.name)
        own = [part.index for part in layout.slices if part.shard in chosen]
        for part, known_as, array in archive.parts(spec, layout, table.arrays, own):
            data = array.view(np.uint8)
            for offset in range(0, data.nbytes, CHUNK_NBYTES):
                yield (
                    part.shard,
                    pb.WriteRequest(
                        id=name,
                        table=number,
                        slice=part.index,
                        array=known_as,
                        offset=offset,
                        data=data[offset : offset + CHUNK_NBYTES].tobytes(),
                    ),
                )


def _about(table: TableState, num_shards: int) -> dict[str, Any]:
    spec = replace(table.spec, num_shards=num_shards)
    return {
        "spec": spec.to_json(),
        "version": max(table.updates[1], 0),
        "clock": table.clock,
        "counts": table.counts,
        **archive_of(spec.content.name).about(spec, spec.layout(), table.arrays),
    }
