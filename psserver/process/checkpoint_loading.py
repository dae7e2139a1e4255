"""Loads the newest checkpoint of each job from the state directory when shards start.

Journals do not survive a crash of the machine, and a shard may have none. A job that was resumed
from a journal is newer than its checkpoint, and stays. A job that had ended is not loaded: its name
is free for another one.

Shards that are started one by one have folders of their own, and the checkpoints are with shard 0.
It brings their parts to those that lack the job before it lets workers in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from pscore.errors import ConfigError, LimitError, PacelineError
from pscore.net.credentials import Credentials
from psserver.decisions.shard import require_name
from psserver.engine.engine import Engine
from psserver.exits import CommandError, Exit
from psserver.mending.losses import is_held
from psserver.remote import ask
from psserver.remote import checkpoint as shards
from psserver.remote.checkpoint_files import PROBLEMS, Checkpoint, Found, newest, verified
from psserver.service.checkpoint_restore import CheckpointUpload

log = structlog.get_logger()
MARKER = "loading"  # In the journals: names the job whose journal is not complete yet.


def load(engine: Engine, folder: Path, journals: Path | None) -> dict[str, Checkpoint]:
    """Makes the jobs of a folder of checkpoints that a shard does not have; returns them.

    Args:
        engine: The shard; it does not listen yet.
        journals: Where the shard keeps its journals, if it does.

    Raises:
        CommandError: A good checkpoint cannot be loaded: without it the job would start over.
    """
    marker = None if journals is None else journals / MARKER
    half = marker.read_text(encoding="utf-8") if marker is not None and marker.exists() else None
    loaded: dict[str, Checkpoint] = {}
    for job, found in newest(folder).items():
        try:
            require_name("job", job)
        except ConfigError as problem:
            log.error("checkpoint cannot be used", path=str(found[0].path), reason=str(problem))
            continue
        if job in engine.shard.jobs and job != half:
            continue  # Its journal is newer.
        if found[0].manifest.get("finished"):
            log.info("job had ended; it is not loaded", job=job, path=str(found[0].path))
            continue
        chosen = _newest_good(engine, job, found)
        if chosen is None:
            continue
        path, checkpoint, upload = chosen
        try:
            if marker is not None:
                with contextlib.suppress(OSError):  # A full disk has no room for a journal.
                    marker.write_text(job, encoding="utf-8")
            index, num_shards = engine.shard.index, engine.shard.num_shards
            for _, message in shards.messages("", checkpoint, num_shards, [index]):
                upload.write(message)
            upload.finish()
            if marker is not None:
                marker.unlink(missing_ok=True)
        except (PacelineError, OSError) as problem:
            raise _no_room(path, job, problem) from problem
        loaded[job] = checkpoint
        log.warning(
            "job recovered from its newest checkpoint",
            job=job,
            at=checkpoint.position,
            path=str(path),
        )
    return loaded


def _newest_good(
    engine: Engine, job: str, found: Sequence[Found]
) -> tuple[Path, Checkpoint, CheckpointUpload] | None:
    """Returns where the newest good checkpoint is, the checkpoint, and its declared job."""
    for one in found:
        try:
            checkpoint = verified(one)
            request = shards.preparation("", checkpoint, job, engine.shard.num_shards)
            return one.path, checkpoint, CheckpointUpload(request, engine, 0)
        except LimitError as problem:
            raise _no_room(one.path, job, problem) from problem
        except (*PROBLEMS, PacelineError) as problem:
            log.error("checkpoint cannot be used", job=job, path=str(one.path), reason=str(problem))
    log.error("no checkpoint of a job can be used; the job would start over", job=job)
    return None


def _no_room(path: Path, job: str, problem: Exception) -> CommandError:
    return CommandError(
        Exit.STATE_DIR,
        f"cannot load {path}: {problem}; make room for it, or move its checkpoints away if job "
        f"{job!r} is not to be continued",
    )


def bring(
    addresses: Sequence[str], credentials: Credentials, loaded: Mapping[str, Checkpoint]
) -> None:
    """Sends the jobs that shard 0 has loaded to the other shards, each its parts.

    A shard that still has a job is set back too, so that all are at one step; live workers join
    again. If these have all of it, they fill shard 0 instead.

    Raises:
        CommandError: A shard does not answer, or cannot hold its part.
    """
    statuses = ask.statuses(addresses, credentials)
    ask.require_order(addresses, statuses)
    on_workers = {job.job for status in statuses for job in status.jobs if is_held(job)}
    for job, checkpoint in loaded.items():
        if job in on_workers:
            continue
        others = range(1, len(addresses))
        having = [i for i in others if job in {found.job for found in statuses[i].jobs}]
        lacking = [i for i in others if i not in having]
        if lacking:
            shards.restore(addresses, credentials, checkpoint, job, lacking)
            log.warning("checkpoint sent to the other shards", job=job, shards=lacking)
        if having:
            shards.restore(addresses, credentials, checkpoint, job, having, replaces=True)
            log.warning("shards set back to the checkpoint of shard 0", job=job, shards=having)
