"""This process's place in a job, from arguments and environment; it exists once in a process.

Without any server address, shards are started on this machine and end with the job: by this process
if it is alone, else by the first of the local workers, which writes their addresses into a file for
the others that only this user can read.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import stat
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pscore.errors import ConfigError, PacelineError, ServerUnavailableError
from pscore.observe.timeline import open_timeline
from pscore.pb.ps.v1 import control_pb2 as pb
from psworker.connection.session import Session
from psworker.connection.shard_link import Link
from psworker.group.local_group import LocalGroup
from psworker.job.environment import Environment, parse_servers
from psworker.job.grouping import Choice, choose_group
from psworker.job.own_shards import OwnShards, start_shards
from psworker.job.phases import Phases

log = logging.getLogger("paceline")

EMBEDDED_TIMEOUT_S = 60.0
SAY_AFTER_S = 5.0  # A wait is reported after this, and then each time it has doubled.
POLL_S = 0.05


class Context:
    """One session, the shards that were started for it, and functions to call before it ends."""

    def __init__(self, session: Session, shards: OwnShards | None) -> None:
        """Keeps a session and, if there are any, its own shards."""
        self.session = session
        self._shards = shards
        self._phases = None if session.timeline is None else Phases(session.timeline)
        self._closers: list[Callable[[], None]] = []
        self._tables: dict[str, int] = {}
        self._pid = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this process itself has joined the job, and was not forked from a worker."""
        return self._pid == os.getpid()

    def at_close(self, closer: Callable[[], None]) -> None:
        """Registers a function that is called when the session ends in order."""
        self._closers.append(closer)

    def not_at_close(self, closer: Callable[[], None]) -> None:
        """Removes a function that was registered with `at_close`."""
        if closer in self._closers:
            self._closers.remove(closer)

    def table_name(self, name: str) -> str:
        """Returns `name`, or `name.1` and so on where it has been given out before."""
        number = self._tables.get(name, 0)
        self._tables[name] = number + 1
        return name if number == 0 else f"{name}.{number}"

    def close(self) -> None:
        """Closes in order: optimizers pull the global weights, then the worker leaves."""
        is_closed = False
        try:
            while self._closers:
                self._closers.pop()()
            is_closed = True
        finally:
            why = "finished" if is_closed else "its training could not be closed"
            self.abandon(why, failed=not is_closed)

    def abandon(self, reason: str, *, failed: bool = False) -> None:
        """Leaves at once. Its own shards stay for the other workers, unless this one failed."""
        if self._phases is not None:
            self._phases.close()
        self.session.leave(reason, failed=failed)
        if self._shards is not None:
            if self.session.num_workers > 1 and not failed:
                _await_others(self.session)
            self._shards.end()
            self._shards = None


_current: Context | None = None


def join(
    *,
    servers: str | list[str] | None = None,
    job: str | None = None,
    rank: int | None = None,
    num_workers: int | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    timeout_s: float | None = None,
    local_group: Choice = "auto",
    **files: str | None,
) -> Context:
    """Returns this process's context; joins the job the first time.

    Args:
        servers: Addresses of the shards in their order.
        job: Name of the job.
        rank: Rank of this worker.
        num_workers: Number of workers of the job.
        min_workers: Minimum of an elastic job; 1 by default.
        max_workers: Maximum, instead of `num_workers`: makes the job elastic.
        timeout_s: Seconds without an answer that are an error.
        local_group: The processes that are one worker (grouping.py).
        files: `tls_ca`, `tls_cert`, `tls_key`, `token_file`: paths (environment.py).

    Raises:
        ConfigError: It exists already with other arguments, or something is missing.
        PacelineError: The shards do not answer, or refuse this worker.
    """
    global _current
    if None not in (num_workers, max_workers):
        raise ConfigError(f"num_workers is {num_workers} and max_workers {max_workers}: give one")
    num_workers = num_workers or max_workers
    if _current is not None:
        _current.session.require_own()
        given = {"job": job, "rank": rank, "num_workers": num_workers, "min_workers": min_workers}
        _check_same(_current.session, servers, **given)
        _check_group(_current.session, local_group)
        return _current
    environment = Environment.read()
    paths: dict[str, Any] = {name: path for name, path in files.items() if path is not None}
    if min_workers is None:
        min_workers = environment.min_workers or int(max_workers is not None)
    environment = dataclasses.replace(
        environment,
        job=job or environment.job,
        min_workers=min_workers,
        rank=environment.rank if rank is None else rank,
        num_workers=num_workers or environment.num_workers,
        timeout_s=environment.timeout_s if timeout_s is None else timeout_s,
        **paths,
    )
    addresses = parse_servers(servers) or environment.servers
    shards = None
    if not addresses:
        addresses, token_file, shards = _embedded(environment)
        environment = dataclasses.replace(
            environment, tls_ca="", tls_cert="", tls_key="", token_file=token_file
        )
    group = choose_group(local_group, environment)
    _current = Context(open_session(addresses, environment, group), shards)
    atexit.register(_at_exit)
    return _current


def open_session(
    servers: Sequence[str], environment: Environment, group: LocalGroup | None = None
) -> Session:
    """Joins the job that an environment describes.

    Args:
        servers: Addresses in the order of the shards.
        environment: The job, this process's place in it, and its credentials.
        group: The processes that are this worker; None: this process alone is.

    Raises:
        PacelineError: The shards do not answer, or refuse this worker.
    """
    session = Session(
        servers,
        job=environment.job,
        rank=environment.rank if group is None else group.worker,
        num_workers=environment.num_workers if group is None else group.num_workers,
        min_workers=environment.min_workers,
        restart=environment.restart,
        patience_s=environment.timeout_s,
        data_plane=environment.data_plane,
        credentials=environment.credentials(),
        group=group,
    )
    session.timeline = open_timeline(environment.timeline, "worker", session.process_rank)
    return session


def _check_same(
    session: Session, servers: str | list[str] | None, **given: str | int | None
) -> None:
    """Refuses arguments that differ from those of the session.

    Raises:
        ConfigError: One differs; names the first.
    """
    held: dict[str, object] = {
        "job": session.job,
        "rank": session.rank,
        "num_workers": session.num_workers,
        "min_workers": session.min_workers,
        "servers": tuple(link.address for link in session.links),
    }
    for name, value in {**given, "servers": parse_servers(servers) or None}.items():
        if value is not None and value != held[name]:
            raise ConfigError(
                f"this process has joined with {name}={held[name]!r}; call psworker.shutdown() "
                f"before joining with {name}={value!r}"
            )


def _check_group(session: Session, choice: Choice) -> None:
    """Refuses a choice of the group that this process has not joined with.

    Raises:
        ConfigError: It has joined alone, or as one of a group.
    """
    is_grouped = session.group is not None
    if (choice is None and is_grouped) or (choice not in ("auto", None) and not is_grouped):
        how = "as one of a local group" if is_grouped else "without a local group"
        raise ConfigError(
            f"this process has joined {how}; pass local_group to the first call, psworker.init() "
            "or DistributedOptimizer"
        )


def current() -> Context:
    """Returns this process's context.

    Raises:
        ConfigError: There is none yet.
    """
    if _current is None:
        raise ConfigError("call psworker.init() or make a DistributedOptimizer first")
    _current.session.require_own()
    return _current


def shutdown() -> None:
    """Ends this process's part of the job in order; does nothing if there is none."""
    global _current
    if _current is not None:
        context, _current = _current, None
        if context.is_own:
            context.close()


def _at_exit() -> None:
    """Leaves the job when the script ends, so that no worker waits for this one."""
    global _current
    if _current is not None:
        context, _current = _current, None
        if context.is_own:
            has_failed = hasattr(sys, "last_value")  # The interpreter has printed an exception.
            how = "failed" if has_failed else "ended"
            context.abandon(f"its process {how}", failed=has_failed)


# ----- shards of our own


def _embedded(environment: Environment) -> tuple[tuple[str, ...], str, OwnShards | None]:
    """Returns addresses and token file of shards on this machine, started here or by a sibling.

    Raises:
        ConfigError: The job has workers on other machines, or the ranks are not known.
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
        _sweep(path.parent)
        shards = dataclasses.replace(start_shards(), rendezvous=path)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps([shards.addresses, shards.token_file]))
        draft.replace(path)
        return shards.addresses, shards.token_file, shards
    return *_await_addresses(path), None


def _rendezvous(environment: Environment) -> Path:
    """Returns the file in which the first local worker writes the shards' addresses."""
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{folder} must belong to this user, without access for others")
    launch = f"{os.getppid()}-{os.environ.get('MASTER_PORT', '0')}-{environment.restart}"
    return folder / f"{urllib.parse.quote(environment.job, safe='')}-{launch}.json"


def _sweep(folder: Path) -> None:
    """Removes the files of launches whose process is gone, since their first worker was killed."""
    for file in folder.glob("*-*-*-*.json"):
        launcher = file.stem.rsplit("-", 3)[1]
        if launcher.isdecimal() and not Path("/proc", launcher).exists():
            file.unlink(missing_ok=True)


def _await_others(session: Session) -> None:
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


def _await_addresses(path: Path) -> tuple[tuple[str, ...], str]:
    deadline_s = time.monotonic() + EMBEDDED_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if path.exists():
            addresses, token_file = json.loads(path.read_text())
            return tuple(addresses), token_file
        time.sleep(POLL_S)
    raise ServerUnavailableError(
        f"the first worker on this machine has not started shards within {EMBEDDED_TIMEOUT_S:g} s "
        f"(no {path})"
    )
