"""Finds the servers that a command means: by address, by port, or the only ones that run here."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from pscore.errors import ConfigError
from pscore.net import tls
from pscore.net.addresses import parse_addresses
from pscore.net.credentials import Credentials, read_credentials
from psserver.exits import CommandError, Exit
from psserver.process.run_dir import RunDirectory, StartedRun, require_path
from psserver.remote import ask

PORT = 7070
POLL_S = 0.02
STOP_MARGIN_S = 10.0  # More than the supervisor's own, so that it can still kill what hangs.


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServers:
    """The servers that a command is about."""

    addresses: list[str]
    run: StartedRun | None  # Known if they were started on this machine by this user.
    credentials: Credentials  # Credentials of the connection.


def find(servers: str | None, port: int | None, state_dir: Path | None) -> FoundServers:
    """Returns the servers that the flags of a command name.

    Args:
        servers: Addresses with commas between them; they are believed. Without any argument, those
            that PACELINE_SERVERS names.
        port: Port of shard 0 on this machine.
        state_dir: As given to `start`.

    Raises:
        CommandError: There are none, or several and it is not clear which.
        ConfigError: The variables name files that cannot be used, an address is malformed, or an
            argument would have no effect.
    """
    require_one_way(servers, port, state_dir)
    if port is None and state_dir is None:
        servers = servers or os.environ.get("PACELINE_SERVERS")
    if servers:
        addresses = list(parse_addresses(servers))
        return FoundServers(addresses=addresses, run=None, credentials=_credentials())
    runs = RunDirectory(_state_dir(state_dir)).runs()
    chosen = [run for run in runs if port in (None, run.port)]
    if len(chosen) == 1:
        run = chosen[0]
        credentials = _credentials(token_file=run.token_file)
        return FoundServers(addresses=run.addresses, run=run, credentials=credentials)
    if chosen:
        listed = ", ".join(str(run.port) for run in chosen)
        raise CommandError(
            Exit.USAGE, f"servers run on ports {listed}; choose one with --port, or with --servers"
        )
    # Started by another user, in a container, or with another --state-dir.
    credentials = _credentials()
    addresses = ask.neighbours("127.0.0.1", PORT if port is None else port, credentials)
    return FoundServers(addresses=addresses, run=None, credentials=credentials)


def _credentials(token_file: str | None = None) -> Credentials:
    """Returns those of the variables; gRPC would log lines about a file that it cannot use."""
    found = read_credentials(token_file=token_file)
    tls.client_context(found)
    return found


def require_one_way(servers: str | None, port: int | None, state_dir: Path | None) -> None:
    """Raises a `ConfigError` if servers are named by address, and as those of this machine too."""
    for flag, value in (("--port", port), ("--state-dir", state_dir)):
        if servers is not None and value is not None:
            raise ConfigError(
                f"{flag} {value} has no effect with --servers: it names servers of this machine; "
                "leave one of them out"
            )


def run_directory(state_dir: Path | None) -> RunDirectory:
    """Returns the run directory: the argument's, else the variable's, else this user's."""
    return RunDirectory(_state_dir(state_dir))


def find_run(directory: RunDirectory, port: int | None) -> StartedRun | None:
    """Returns the run on this machine that is meant; None if none is alive.

    Raises:
        CommandError: There are several.
    """
    runs = [run for run in directory.runs() if port in (None, run.port)]
    if len(runs) > 1:
        listed = ", ".join(str(run.port) for run in runs)
        raise CommandError(Exit.USAGE, f"servers run on ports {listed}; choose one with --port")
    return runs[0] if runs else None


def end(run: StartedRun) -> None:
    """Ends a run of this machine in order, and returns when it has ended.

    Raises:
        CommandError: It is another user's, or does not end in time.
    """
    try:
        os.kill(run.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as problem:
        raise CommandError(
            Exit.NOT_PERMITTED, f"process {run.pid} belongs to another user"
        ) from problem
    wait_s = 2 * run.grace_s + STOP_MARGIN_S  # For last checkpoints, and for the shards.
    deadline_s = time.monotonic() + wait_s
    while run.is_alive():
        if time.monotonic() > deadline_s:
            raise CommandError(
                Exit.SHARD_DIED, f"process {run.pid} has not ended within {wait_s:g} s"
            )
        time.sleep(POLL_S)


def _state_dir(flag: Path | None) -> Path | None:
    """Returns the directory of a flag, else of the variable."""
    variable = os.environ.get("PACELINE_STATE_DIR")
    found = flag or (Path(variable) if variable else None)
    if found is not None:
        require_path("--state-dir (PACELINE_STATE_DIR)", found)
    return found
