"""Checkpoints of a job: all its numbers out of the shards at one step, and back into shards.

A slice is copied right behind the update that makes the wanted version, in a mode that counts by
steps; training continues meanwhile. Tables that make their steps together are copied at one step.
In an asynchronous mode slices have no step in common: they are copied at one moment, each with the
steps of each worker that are in it. Residuals belong to each worker; the shards request them as of
its last push in that step (residuals.py). checkpoint_files.py describes the files.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import numpy as np

from pscore.errors import ConfigError
from pscore.net.credentials import Credentials
from pscore.net.rpc import ChannelOptions
from pscore.optimizers import OPTIMIZERS
from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from pscore.pb.ps.v1 import checkpoint_pb2_grpc, control_pb2
from pscore.rows.spec import Rows
from pscore.table_names import BESIDE, GROWN
from pscore.table_spec import TableSpec
from psserver.archives import archive_of
from psserver.archives.base import Tensors
from psserver.decisions.job_state import State
from psserver.decisions.membership import Presence
from psserver.exits import CommandError, Exit
from psserver.remote import ask
from psserver.remote.checkpoint_files import Checkpoint, TableState, Written

CHUNK_NBYTES = 4 << 20
CALL_TIMEOUT_S = 30.0
WAIT_MS = 2000
RESIDUALS_WAIT_S = 60.0  # Workers that have stopped are asked at each of their heartbeats.
ATTEMPTS = 8
NO_ARRAYS: Mapping[str, Tensors] = {}

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Stub = checkpoint_pb2_grpc.CheckpointsStub


class JobShards:
    """Connections to the shards of a job."""

    def __init__(
        self, addresses: Sequence[str], credentials: Credentials, options: ChannelOptions = ()
    ) -> None:
        """Connects lazily; `options` are those of the channels."""
        self.addresses, self._credentials = addresses, credentials
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
            method: Returns the method of the shard's stub.

        Raises:
            CommandError: The shard does not answer, or refuses.
        """
        try:
            return method(self.stubs[shard])(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as failure:
            about = self.addresses[shard], self._credentials, CALL_TIMEOUT_S
            raise ask.explained(failure, *about) from failure

    def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels:
            channel.close()


# ----- out of the shards


def capture(
    addresses: Sequence[str],
    credentials: Credentials,
    job: str | None,
    *,
    weights_only: bool,
    base: Checkpoint | None = None,
) -> Checkpoint:
    """Returns a job as it is at one step.

    Args:
        addresses: Addresses of all shards, in order.
        job: Its name; may be left out if there is one only.
        weights_only: Leave the optimizer's state and the mode's memory out.
        base: An earlier checkpoint of the job: of rows only the changes since then are fetched.

    Raises:
        CommandError: There is no such job, a shard does not answer, or is at another place.
    """
    statuses = ask.statuses(addresses, credentials, is_patient=True)
    ask.require_order(addresses, statuses)
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
        entries = [
            entry
            for status in statuses
            for other in status.jobs
            if other.job == found.job
            for entry in other.tables
            if entry.num_slices
        ]
        states: dict[str, TableState] = {}
        former = {table.spec.name: table for table in (base.tables if base else ())}
        has_workers = any(worker.state == Presence.LIVE.value for worker in found.workers)
        for leads in _together(found.tables):
            newest = max(
                (entry.version_max - entry.lead for entry in entries if entry.name in leads),
                default=-1,
            )
            about = found.job, leads, newest, weights_only, former
            states |= _capture_tables(shards, *about, has_workers=has_workers)
        checkpoint.tables += [states[table.name] for table in found.tables]
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


def _together(tables: Sequence[control_pb2.TableStatus]) -> list[dict[str, int]]:
    """Returns the tables in sets that make their steps together, each with its lead.

    Tables beside a model have the steps of its newest table. In another mode than that one they
    count their updates otherwise, and no version of theirs is of the same step.
    """
    newest = {table.name.partition(GROWN)[0]: table.name for table in tables}
    sets: dict[tuple[str, str], dict[str, int]] = {}
    for table in tables:
        stem, beside, _ = table.name.partition(BESIDE)
        leader = newest.get(stem, table.name) if beside else table.name
        sets.setdefault((leader, table.mode), {})[table.name] = table.lead
    return list(sets.values())


def _capture_tables(
    shards: JobShards,
    job: str,
    leads: Mapping[str, int],
    newest: int,
    weights_only: bool,
    former: Mapping[str, TableState],
    *,
    has_workers: bool,
) -> dict[str, TableState]:
    """Copies tables at the newest step, or at one soon to come if that is gone already.

    After the last worker's end in the middle of a step no step of all slices is to come, and each
    is copied as it is: those without its push lack that step.

    Args:
        leads: By name of a table: its version, less its step.
        newest: The newest step of any of them.
        former: Tables of an earlier checkpoint, by name.
        has_workers: Whether steps are to come.
    """
    step: int | None = newest  # None: each slice as it is.
    margin, gone = 1, newest - 1  # Steps up to `gone` are no longer available.
    for _ in range(ATTEMPTS):
        requests = [
            pb.CaptureRequest(
                job=job,
                table=table,
                id=secrets.token_hex(8),
                version=-1 if step is None else step + lead,
                weights_only=weights_only,
                base=json.dumps(former[table].marks) if table in former else "",
            )
            for table, lead in leads.items()
        ]
        try:
            replies = _capture_at(shards, requests, [gone + lead for lead in leads.values()])
            everything = [reply for of_table in replies for reply in of_table]
            if all(reply.state == pb.CAPTURE_DONE for reply in everything):
                states = {}
                for request, of_table in zip(requests, replies, strict=True):
                    base = former.get(request.table)
                    arrays = NO_ARRAYS if base is None else base.arrays
                    state = _read(shards, request.id, of_table, weights_only, arrays)
                    _require_weights(state, job)
                    states[request.table] = state
                return states
        finally:
            for request in requests:
                for shard in range(len(shards.stubs)):
                    release = pb.ReleaseRequest(id=request.id)
                    shards.call(shard, lambda stub: stub.Release, release)
        by_table = zip(leads.values(), replies, strict=True)
        found = max(reply.version_max - lead for lead, of in by_table for reply in of)
        if step is None or not all(reply.by_step for reply in everything):
            step = None
        elif any(reply.state == pb.CAPTURE_PASSED for reply in everything):
            gone = max(gone, step)
            step = found + margin
            margin *= 2
        else:  # Nobody pushes: the version that all have is the newest.
            step = found if has_workers or found != step else None
    raise CommandError(
        Exit.UNHEALTHY,
        f"{_named(leads)} of job {job!r} could not be copied at one version in {ATTEMPTS} "
        "attempts: a worker has stopped in the middle of a step (see psserver status), or "
        "steps are too fast",
    )


def _named(tables: Iterable[str]) -> str:
    names = [repr(table) for table in tables]
    return f"table{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _require_weights(state: TableState, job: str) -> None:
    """Raises a `CommandError` if a slice has been declared, and has no weights yet."""
    if state.updates[0] < 0:
        raise CommandError(
            Exit.UNHEALTHY,
            f"table {state.spec.name!r} of job {job!r} has no weights yet; worker 0 uploads them "
            "when it has joined",
        )


def _capture_at(
    shards: JobShards, requests: Sequence[pb.CaptureRequest], gone: Sequence[int]
) -> list[list[pb.CaptureReply]]:
    """Requests copies from all shards; returns when they have them, or one cannot.

    Also returns if no worker pushes, unless the version that all have is gone: one worker has
    stopped, and others have pushed the step that it has not, so their earlier residuals are gone.

    Args:
        requests: One for each table.
        gone: By table: the newest version that is no longer available.

    Returns:
        By table: the reply of each shard.
    """
    everybody = range(len(shards.stubs))
    calls = [(shard, request) for request in requests for shard in everybody]

    def capture(call: tuple[int, pb.CaptureRequest]) -> pb.CaptureReply:
        return shards.call(call[0], lambda stub: stub.Capture, call[1])

    deadline_s = time.monotonic() + RESIDUALS_WAIT_S
    replies = [capture(call) for call in calls]  # All are armed.
    if not all(reply.by_step for reply in replies):
        for (_, request), reply in zip(calls, replies, strict=True):
            if request.version >= 0:
                reply.state = pb.CAPTURE_PASSED
    for request in requests:
        request.wait_ms = WAIT_MS
    while not any(reply.state == pb.CAPTURE_PASSED for reply in replies):
        with ThreadPoolExecutor(len(calls)) as pool:  # All wait at once.
            replies = list(pool.map(capture, calls))
        states = {reply.state for reply in replies}
        before = [version for version in gone for _ in everybody]
        is_new = any(r.version_max > old for r, old in zip(replies, before, strict=True))
        if (pb.CAPTURE_WAITING in states and is_new) or states == {pb.CAPTURE_DONE}:
            break
        if time.monotonic() > deadline_s:
            ranks = sorted({rank for reply in replies for rank in reply.missing})
            awaited = next((r.waiting_for for r in replies if r.waiting_for), "nothing")
            raise CommandError(
                Exit.UNHEALTHY,
                f"{_named(request.table for request in requests)} of job {requests[0].job!r} "
                f"could not be copied within {RESIDUALS_WAIT_S:g} s: a worker has stopped in the "
                f"middle of a step, or has not sent its residuals: {ranks or 'nobody'}; the job "
                f"waits for {awaited}",
            )
    return [replies[i : i + len(everybody)] for i in range(0, len(calls), len(everybody))]


def _read(
    shards: JobShards,
    name: str,
    replies: Sequence[pb.CaptureReply],
    weights_only: bool,
    base: Mapping[str, Tensors],
) -> TableState:
    about = [json.loads(reply.about) for reply in replies]
    spec = TableSpec.from_json(about[0]["spec"])
    layout, archive = spec.layout(), archive_of(spec.content.name)
    room = archive.room(spec, layout, base)
    marks: dict[str, list[int]] = {}
    counts = [0] * len(spec.tensors)
    slices: dict[str, Any] = {}
    for part in layout.slices:
        entry = about[part.shard]["slices"][str(part.index)]
        marks[str(part.index)] = entry.get("mark", [])
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
    versions, arrays = {entry["version"] for entry in slices.values()}, room.arrays()
    return TableState(
        spec=spec,
        version=versions.pop() if len(versions) == 1 else -1,
        slices=slices,
        counts=counts,
        arrays=arrays,
        marks=marks,
        base=base if isinstance(base, Written) else None,
        changes=room.changes,
    )


# ----- back into shards


def give_room(checkpoint: Checkpoint, wanted: Iterable[str]) -> None:
    """Changes the bounds of row tables in a checkpoint that is about to be restored.

    Args:
        wanted: For each row table `NAME=N`: the new `max_rows`.

    Raises:
        ConfigError: One is not of that form, or no row table has that name or such a bound.
    """
    room: dict[str, int] = {}
    for text in wanted:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal():
            raise ConfigError(f"--max-rows {text}: must be TABLE=N, such as users=20000000")
        room[name] = int(number)
    known = [
        tensor.name
        for table in checkpoint.tables
        if isinstance(table.spec.content, Rows)
        for tensor in table.spec.tensors
    ]
    if unknown := room.keys() - set(known):
        there = f"there are {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"the checkpoint has no row table {min(unknown)!r}; {there}")
    for table in checkpoint.tables:
        content, tensors = table.spec.content, table.spec.tensors
        if isinstance(content, Rows):
            own = {one.name: room[one.name] for one in tensors if one.name in room}
            table.spec = replace(table.spec, content=content.with_max_rows(tensors, own))


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

    If it is killed, shards without the job are beside those that have it again: workers are
    refused until it is repeated, as after the loss of a shard.

    Args:
        addresses: Addresses of all shards, in order.
        only: The shards that get their part, in the order in which they begin, one that has the
            job first; None: all of them.
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
        for shard in chosen[1:]:
            shards.call(shard, lambda stub: stub.Clear, pb.ClearRequest(id=name))
        for shard in chosen:
            shards.call(shard, lambda stub: stub.Finish, pb.FinishRequest(id=name))
    finally:
        shards.close()


def preparation(name: str, checkpoint: Checkpoint, job: str, num_shards: int) -> pb.PrepareRequest:
    """Returns the message that declares a job to each of its shards."""
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
