"""Shards on this machine for a job without a server address, shared by its local workers.

They end with the job. One worker alone starts them for itself. Of several, the first one starts
them and writes their addresses into a file for the others that only this user can read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import tempfile
import time
import urllib.parse
from pathlib import Path

from pscore.errors import ConfigError, PacelineError, ServerUnavailableError
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.variables import require_no_other_shards
from psworker.connection.membership.session import Session
from psworker.connection.shard_link import Link
from psworker.job.environment import Environment
from psworker.job.own_shards import OwnShards, start_shards

log = logging.getLogger("paceline")

EMBEDDED_TIMEOUT_S = 60.0
SAY_AFTER_S = 5.0  # A wait is reported after this, and then each time it has doubled.
POLL_S = 0.05


def find_or_start(environment: Environment) -> tuple[tuple[str, ...], str, OwnShards | None]:
    """Returns addresses and token file of shards on this machine, started here or by a sibling.

    Raises:
        ConfigError: The job has workers on other machines, the ranks are not known, or a variable
            is for other shards.
    """
    if environment.min_workers:
        raise ConfigError(
            f"{environment.min_workers} to {environment.num_workers} workers that may join "
            f"and leave, and "
            "no server address: start shards with `psserver start` and set "
            "PACELINE_SERVERS=host:port,..."
        )
    if environment.num_groups > 1:
        raise ConfigError(
            f"{environment.num_groups} groups, and no server address: start shards with "
            "`psserver start` and set PACELINE_SERVERS=host:port,... for every group"
        )
    if environment.num_workers > environment.local_workers:
        raise ConfigError(
            f"{environment.num_workers} workers, {environment.local_workers} of them on this "
            "machine, and no server address: start shards with `psserver start` and set "
            "PACELINE_SERVERS=host:port,... on every machine"
        )
    require_no_other_shards(os.environ)
    if environment.num_workers == 1:
        shards = start_shards()
        return shards.addresses, shards.token_file, shards
    if environment.rank < 0:
        raise ConfigError(
            f"{environment.num_workers} workers, but neither a server address nor this worker's "
            "rank is set: use `psworker run`, torchrun, or set PACELINE_SERVERS"
        )
    path = _rendezvous(environment)
    if environment.local_rank == 0:
        sweep(path.parent)
        starts, draft = path.with_suffix(".pid"), path.with_suffix(".draft")
        starts.write_text(str(os.getpid()))
        try:
            shards = dataclasses.replace(start_shards(), rendezvous=path)
            draft.write_text(json.dumps([shards.addresses, shards.token_file]))
            draft.replace(path)
        finally:
            starts.unlink(missing_ok=True)
        return shards.addresses, shards.token_file, shards
    return *await_addresses(path), None


def _rendezvous(environment: Environment) -> Path:
    """Returns the file in which the first local worker writes the shards' addresses."""
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{folder} must belong to this user, without access for others")
    launch = f"{os.getppid()}-{os.environ.get('MASTER_PORT', '0')}-{environment.restart}"
    return folder / f"{urllib.parse.quote(environment.job, safe='')}-{launch}.json"


def sweep(folder: Path) -> None:
    """Removes the files of launches whose process is gone, since their first worker was killed."""
    for file in (*folder.glob("*-*-*-*.json"), *folder.glob("*-*-*-*.pid")):
        launcher = file.stem.rsplit("-", 3)[1]
        if launcher.isdecimal() and not Path("/proc", launcher).exists():
            file.unlink(missing_ok=True)


def await_others(session: Session) -> None:
    """Waits until no other worker needs the shards of this process."""
    started_s, say_s = time.monotonic(), SAY_AFTER_S
    first = session.links[0]
    link = Link(first.address, patience_s=0.0, credentials=first.credentials)
    try:
        while True:
            jobs = link.call(link.control.Status, pb.StatusRequest()).jobs
            workers = [worker for job in jobs if job.job == session.job for worker in job.workers]
            live = [str(worker.rank) for worker in workers if worker.state == "live"]
            waited_s = time.monotonic() - started_s
            may_come = len(workers) < session.num_workers and waited_s < EMBEDDED_TIMEOUT_S
            if not live and not may_come:
                return
            if waited_s >= say_s:
                say_s *= 2
                who = f"worker {', '.join(live)}" if live else "workers that have not joined yet"
                log.warning(
                    "worker %d has finished and keeps the shards running for %s", session.rank, who
                )
            time.sleep(POLL_S)
    except PacelineError as error:
        log.info("the shards have ended before their workers: %s", error)
    finally:
        link.close()


def await_addresses(path: Path) -> tuple[tuple[str, ...], str]:
    """Waits for the file of the first local worker; returns its addresses and its token file.

    Raises:
        ServerUnavailableError: The file has not come within EMBEDDED_TIMEOUT_S, and no process is
            about to write it.
    """
    deadline_s = time.monotonic() + EMBEDDED_TIMEOUT_S
    while time.monotonic() < deadline_s or _is_starting(path):
        if path.exists():
            addresses, token_file = json.loads(path.read_text())
            return tuple(addresses), token_file
        time.sleep(POLL_S)
    raise ServerUnavailableError(
        f"the first worker on this machine has not started shards within {EMBEDDED_TIMEOUT_S:g} s "
        f"(no {path}); if that process is no worker of this job, start shards with `psserver "
        "start` and set PACELINE_SERVERS=host:port,..."
    )


def _is_starting(path: Path) -> bool:
    """Returns whether the first local worker is starting shards; a cold disk may take minutes."""
    try:
        pid = path.with_suffix(".pid").read_text()
    except FileNotFoundError:
        return path.exists()
    return Path("/proc", pid or "self", "exe").exists()  # One that has ended has none.
