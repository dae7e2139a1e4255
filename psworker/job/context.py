"""This process's place in a job, from arguments and environment; it exists once in a process.

Without any server address, shards are started on this machine and end with the job
(local_shards.py).
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pscore.errors import ConfigError
from pscore.net.addresses import parse_addresses
from pscore.observe.timeline import Timeline, open_timeline
from psworker.connection.membership.session import Session
from psworker.group.worker_group import WorkerGroup
from psworker.job.environment import Environment
from psworker.job.grouping import Choice, choose_group
from psworker.job.local_shards import await_others, find_or_start
from psworker.job.own_shards import OwnShards
from psworker.job.phases import Phases

log = logging.getLogger("paceline")


class Context:
    """One session, the shards that were started for it, and functions to call before it ends."""

    def __init__(self, session: Session, shards: OwnShards | None) -> None:
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

    def next_name(self, name: str) -> str:
        """Returns the name of the next table: `name`, or `name.1` and so on once it is taken."""
        number = self._tables.get(name, 0)
        return name if number == 0 else f"{name}.{number}"

    def take_name(self, name: str) -> None:
        """Marks the name that `next_name` returns as taken: its table trains."""
        self._tables[name] = self._tables.get(name, 0) + 1

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
                await_others(self.session)
            self._shards.end()
            self._shards = None


_current: Context | None = None
_pipeline: Session | None = None  # The part of this process in a job of stages; maybe over.


def join(
    *,
    servers: str | list[str] | None = None,
    max_workers: int | None = None,
    local_group: Choice = "auto",
    timeline: Timeline | None = None,
    **given: Any,
) -> Context:
    """Returns this process's context; joins the job the first time.

    Args:
        servers: Addresses of the shards in their order.
        max_workers: Maximum of an elastic job, in place of `num_workers`.
        local_group: The processes that are one worker (grouping.py).
        timeline: Where spans are recorded; None: in one of its own, if PACELINE_TIMELINE is set.
        given: Further arguments of `psworker.init`; None: not given.

    Raises:
        ConfigError: It exists already with other arguments, or something is missing.
        PacelineError: The shards do not answer, or refuse this worker.
    """
    global _current, _pipeline
    given["job"] = given.get("job") or None
    if None not in (given.get("num_workers"), max_workers):
        raise ConfigError(
            f"num_workers is {given['num_workers']} and max_workers {max_workers}: give one"
        )
    if _current is not None:
        _current.session.require_own()
        most = given.get("num_workers") if max_workers is None else max_workers
        _check_same(_current.session, servers, {**given, "num_workers": most})
        _check_group(_current.session, local_group)
        return _current
    environment = Environment.read(**given, max_workers=max_workers)
    addresses = parse_addresses(servers) or environment.servers
    shards = None
    if not addresses:
        addresses, token_file, shards = find_or_start(environment)
        environment = dataclasses.replace(
            environment, tls_ca="", tls_cert="", tls_key="", token_file=token_file
        )
    group, environment = choose_group(local_group, environment)
    _current = Context(open_session(addresses, environment, group, timeline), shards)
    _pipeline = None
    atexit.register(at_exit)
    return _current


def open_session(
    servers: Sequence[str],
    environment: Environment,
    group: WorkerGroup | None = None,
    timeline: Timeline | None = None,
) -> Session:
    """Joins the job that an environment describes.

    Args:
        servers: Addresses in the order of the shards.
        environment: The job, this worker's place in it, and its credentials.
        group: The processes that are this worker; None: this process alone.
        timeline: As in `join`: sessions of one process share it, as each has one file.

    Raises:
        PacelineError: The shards do not answer, or refuse this worker.
    """
    session = Session(
        servers,
        job=environment.job,
        rank=environment.rank,
        num_workers=environment.num_workers,
        min_workers=environment.min_workers,
        restart=environment.restart,
        run_id=environment.run_id,
        patience_s=environment.timeout_s,
        data_plane=environment.data_plane,
        credentials=environment.credentials(),
        group=group,
    )
    if timeline is None:
        timeline = open_timeline(environment.timeline, "worker", session.process_rank)
    session.timeline = timeline
    session.peer_host, session.peer_ports = environment.peer_host, environment.peer_ports
    return session


def _check_same(
    session: Session, servers: str | list[str] | None, given: Mapping[str, Any]
) -> None:
    """Raises a `ConfigError` for the first argument that differs from the session's."""
    held: dict[str, object] = {
        "job": session.job,
        "rank": session.rank,
        "num_workers": session.num_workers,
        "min_workers": session.min_workers,
        "servers": tuple(link.address for link in session.links),
        "timeout_s": session.links[0].patience.limit_s,
    }
    wanted = {**given, "servers": parse_addresses(servers) or None}
    for name, mine in held.items():
        value = wanted.get(name)
        if value is not None and value != mine:
            raise ConfigError(
                f"this process has joined with {name}={mine!r}; call psworker.shutdown() "
                f"before joining with {name}={value!r}"
            )


def _check_group(session: Session, choice: Choice) -> None:
    """Raises a `ConfigError` for a choice of the group that this process has not joined with."""
    is_grouped = not session.group.is_alone
    if (choice is None and is_grouped) or (choice not in ("auto", None) and not is_grouped):
        state = "as one of a local group" if is_grouped else "without a local group"
        raise ConfigError(
            f"this process has joined {state}; pass local_group to the first call, psworker.init() "
            "or DistributedOptimizer"
        )


def current() -> Context:
    """Returns this process's context; raises ConfigError if there is none yet."""
    if _current is None:
        raise ConfigError("call psworker.init() or make a DistributedOptimizer first")
    _current.session.require_own()
    return _current


def enter_pipeline(session: Session) -> None:
    """Numbers this process by the job of all stages, whose workers `session` is one of."""
    global _pipeline
    _pipeline = session


def place() -> Session:
    """Returns the session that numbers this process: of all stages of a pipeline, if it is in one.

    Raises:
        ConfigError: There is none yet.
    """
    if _pipeline is None:
        return current().session
    _pipeline.require_own()
    return _pipeline


def _take() -> Context | None:
    """Returns this process's context, which is forgotten; None: it has not joined a job."""
    global _current
    context, _current = _current, None
    return context if context is not None and context.is_own else None


def shutdown() -> None:
    """Ends this process's part of the job in order; does nothing if there is none."""
    if (context := _take()) is not None:
        context.close()


def at_exit() -> None:
    """Leaves the job when the script ends, so that no worker waits for this one."""
    if (context := _take()) is not None:
        has_failed = hasattr(sys, "last_value")  # The interpreter has printed an exception.
        context.abandon(f"its process {'failed' if has_failed else 'ended'}", failed=has_failed)
