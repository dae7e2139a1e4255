"""Runs the workers of one machine as one job: starts them, passes on their output, ends them.

Each worker is the leader of a process group of its own, so a signal reaches it once and together
with its children. Events (a worker ended, a signal came) are put into one queue, and one loop
handles them.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from pscore.commandline import is_debugging
from pscore.errors import ConfigError, ThreadError
from pscore.net.addresses import PROBE_TIMEOUT_S, explain_silence, split_address
from pscore.signals import signal_pipe
from pscore.text import counted, printable
from pscore.threads import OwnedThread
from pscore.variables import require_name
from psworker.commands.interrupted import Interrupted
from psworker.commands.output import Drain, Write
from psworker.exits import Exit
from psworker.job.own_shards import OwnShards, start_shards
from psworker.job.place import LaunchPlace
from psworker.pipeline.plan.plan_file import read_plan
from psworker.training.script_errors import SHORT

LINE_CHARS_MAX = 1 << 16  # A longer line is passed on in pieces.
READERS_TIMEOUT_S = 2.0  # A worker's children may hold its output open after its end.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END = b"\0"  # No signal has this number.
SHARDS = -1  # Instead of a rank: the shards that were started for this job.

# Variables that would give a worker another place than the launcher does.
REPLACED_VARIABLES = (
    "PACELINE_RANK",
    "PACELINE_NUM_WORKERS",
    "PACELINE_MIN_WORKERS",
    "PACELINE_MAX_WORKERS",
    "PACELINE_LOCAL_RANK",
    "PACELINE_LOCAL_WORKERS",
    "DMLC_WORKER_ID",
    "DMLC_NUM_WORKER",
    "DMLC_ROLE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
# Where `torch.distributed.init_process_group` meets. A launch that starts all workers of a job sets
# them. For a job on several machines the user does, if the script needs them. An elastic job has no
# rank and no world size either, because its ranks come from the shards and its size changes.
STORE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
MASTER_ADDR = "127.0.0.1"  # All workers of one launch are on this machine.
# Variables for other shards than those started for the job.
FOREIGN_VARIABLES = (
    "PACELINE_TLS_CA",
    "PACELINE_TLS_CERT",
    "PACELINE_TLS_KEY",
    "PACELINE_TOKEN_FILE",
)


SIGNAL_BASE = 128  # As in a shell: a process that signal N ended has status 128 + N.


class OnFailure(enum.StrEnum):
    """The fate of the other workers when one fails."""

    STOP = "stop"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One job on this machine."""

    command: tuple[str, ...]  # The command line of each worker.
    place: LaunchPlace  # The workers to start here.
    pipeline: str = ""  # Path of the plan of a pipeline for the workers; empty: they have none.
    servers: tuple[str, ...] = ()  # Addresses of shards; empty: shards are started for this job.
    num_shards: int = 1  # Shards started for this job.
    token_file: str = ""  # Token file of shared shards; else from the environment.
    master_port: int = 0  # Where rank 0 may open the store of a torch process group.
    job: str  # Name of the job.
    on_failure: OnFailure = OnFailure.STOP  # The fate of the others when a worker fails.
    grace_s: float = 10.0  # From the request to end until a worker is killed.

    def __post_init__(self) -> None:
        """Checks the user's arguments.

        Raises:
            ConfigError: The shards of a job on several machines are not named, a blank is at an end
                of the job's name, or the period is negative or no number.
        """
        require_name(self.job)
        if self.place.has_others and not self.servers:
            raise ConfigError(
                "the job has workers on other machines, and no server address is given: start "
                "shards with `psserver start --host ADDRESS`, and set "
                "PACELINE_SERVERS=host:port,... on every machine (docs/machines.md)"
            )
        if not self.grace_s >= 0:  # Nor NaN.
            raise ConfigError(f"--grace-s is {self.grace_s:g}, must be a number from 0")


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker, or the shards, ended."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """This process was asked to end."""

    number: int


class Launch:
    """The workers of one job, from their start to their end.

    Attributes:
        is_ending: The workers were asked to end; their further output is of little use.
    """

    def __init__(
        self, plan: LaunchPlan, *, write: Write, tell: Callable[[str], None], is_quiet: bool = False
    ) -> None:
        """Prepares the job; starts nothing yet.

        Args:
            write: Is called on threads of its own with a worker's rank, one line of its output
                and the stream that it came for.
            tell: Is called with a line about the job, for a person.
        """
        self.plan = plan
        self._write, self._tell, self._is_quiet = write, tell, is_quiet
        self._events: queue.SimpleQueue[Ended | Signalled | ThreadError] = queue.SimpleQueue()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._shards: OwnShards | None = None
        self._drain = Drain(tell)
        self.is_ending = False
        self._is_interrupted = False  # Ctrl-C has been passed on.
        self._kill_s: float | None = None  # Time at which remaining processes are killed.
        self._code = 0

    def run(self) -> int:
        """Runs the job; returns the exit status, that of the first worker that failed.

        Raises:
            PacelineError: The shards did not start.
            ConfigError: The command is not a program.
            ThreadError: A thread that observes the workers has failed.
        """
        with self._signals():
            try:
                self._start()
                while self._running:
                    self._handle_next()
            finally:
                self._signal_all(signal.SIGKILL)
                if self._shards is not None:
                    self._shards.end()
        return self._code

    # ----- starting

    def _start(self) -> None:
        servers = self.plan.servers
        if not servers:
            self._shards = start_shards(self.plan.num_shards)
            servers = self._shards.addresses
            self.plan = replace(self.plan, token_file=self._shards.token_file)
            self._watch(SHARDS, self._shards.process, [])
        if not self._is_quiet:
            self._introduce(servers)
        self.plan = replace(self.plan, master_port=free_port())  # The shards have theirs already.
        first = self.plan.place.first_rank
        for rank in range(first, first + self.plan.place.num_workers):
            self._start_worker(rank, servers)

    def _introduce(self, servers: Sequence[str]) -> None:
        here = "" if self.plan.servers else " on this machine"
        self._tell(
            f"job {self.plan.job}: {describe(self.plan.place)}, "
            f"{counted(len(servers), 'shard')}{here} ({','.join(servers)})"
        )
        if self.plan.pipeline:
            pipeline = read_plan(self.plan.pipeline)
            self._tell(f"pipeline {pipeline.name}: {pipeline.places()}")
        if "OMP_NUM_THREADS" not in os.environ:
            self._tell(
                f"OMP_NUM_THREADS={threads_each(self.plan.place.num_workers)} for each worker "
                f"({counted(num_cores(), 'core')}); set it to use another number"
            )

    def _start_worker(self, rank: int, servers: Sequence[str]) -> None:
        try:
            process = subprocess.Popen(
                self.plan.command,
                env=worker_environment(self.plan, rank, servers, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
        except OSError as problem:
            raise ConfigError(
                f"cannot start {self.plan.command[0]!r}: {problem.strerror}"
            ) from problem
        self._running[rank] = process
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            OwnedThread(partial(self._read, rank, source, target), "output", self._events.put)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for reader in readers:
            reader.start()
        self._watch(rank, process, readers)

    def _watch(
        self, rank: int, process: subprocess.Popen[str], readers: Sequence[OwnedThread]
    ) -> None:
        """Queues an event for the end of a process, after all of its output."""

        def wait() -> None:
            status = process.wait()
            for reader in readers:
                reader.join(READERS_TIMEOUT_S)
            self._events.put(Ended(rank, status))

        OwnedThread(wait, "await-exit", self._events.put).start()

    def _read(self, rank: int, source: IO[str], target: IO[str]) -> None:
        """Passes on a worker's output to its end: a full pipe would block the worker."""
        interrupted = Interrupted()
        with source:
            while line := source.readline(LINE_CHARS_MAX):
                is_filtered = self._is_interrupted and target is sys.stderr
                self._pass_on(rank, interrupted.feed(line) if is_filtered else [line], target)
        self._pass_on(rank, interrupted.end(), target)

    def _pass_on(self, rank: int, lines: Sequence[str], target: IO[str]) -> None:
        for line in lines:
            try:
                self._write(rank, line, target)
            except (OSError, ValueError) as problem:
                self._drain.drop(target, problem)

    # ----- deciding

    def _handle_next(self) -> None:
        timeout_s = None if self._kill_s is None else max(0.0, self._kill_s - time.monotonic())
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            ranks = ", ".join(str(rank) for rank in self._running)
            self._tell(f"killing what has not ended within {self.plan.grace_s:g} s: worker {ranks}")
            self._kill_s = None
            self._signal_all(signal.SIGKILL)
            return
        if isinstance(event, ThreadError):
            raise event
        if isinstance(event, Signalled):
            self._on_signal(event.number)
        elif event.rank == SHARDS:
            self._on_shards_ended(event.status)
        else:
            self._on_worker_ended(event.rank, event.status)

    def _on_signal(self, number: int) -> None:
        """Passes the first signal on to the workers; the second one kills them."""
        if self.is_ending and self._code >= SIGNAL_BASE:
            self._signal_all(signal.SIGKILL)
            return
        self._code = SIGNAL_BASE + number
        self._is_interrupted = number == signal.SIGINT and not is_debugging()
        self._end_all(number)

    def _on_shards_ended(self, status: int) -> None:
        """Ends the job, which cannot continue without its shards."""
        if not self.is_ending:
            self._tell(f"the shards ended with exit status {status}; stopping the workers")
            self._code = self._code or Exit.NO_SHARDS
            self._end_all(signal.SIGTERM)

    def _on_worker_ended(self, rank: int, status: int) -> None:
        process = self._running.pop(rank)
        if status == 0 or self.is_ending:
            return
        end = f"was ended by {name_of(-status)}" if status < 0 else f"failed with status {status}"
        goes_on = self.plan.on_failure is OnFailure.CONTINUE
        others = "the others continue" if goes_on else "stopping the others"
        rest = f"; {others} (--on-failure {self.plan.on_failure})" if self._running else ""
        self._tell(f"worker {rank} (process {process.pid}) {end}{rest}")
        self._code = self._code or self._code_for(status)
        if not goes_on:
            self._end_all(signal.SIGTERM)

    def _code_for(self, status: int) -> int:
        """Returns the job's exit status for a worker's; a missing shard has its own."""
        if status < 0:
            return SIGNAL_BASE - status
        silent = unreachable(self.plan.servers) if status == Exit.FAILED else []
        if silent:
            remedy = explain_silence(silent[0]) or "start shards with psserver start"
            self._tell(f"no shard listens at {', '.join(silent)}; {remedy}")
            return Exit.NO_SHARDS
        return status

    # ----- ending

    def _end_all(self, number: int) -> None:
        self.is_ending = True
        self._kill_s = time.monotonic() + self.plan.grace_s
        self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turns the signals that end a process into events, which a thread reads."""
        with signal_pipe(FORWARDED) as (read_fd, write_fd):
            reader = OwnedThread(partial(self._hear, read_fd), "signals", self._events.put)
            reader.start()
            try:
                yield
            finally:
                os.write(write_fd, END)
                reader.join()

    def _hear(self, read_fd: int) -> None:
        """Queues an event for each signal, until the end."""
        while (number := os.read(read_fd, 1)) != END:
            if number[0] in FORWARDED:  # Handlers of others write here too.
                self._events.put(Signalled(number[0]))


# ----- commands and environments of workers


def worker_command(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the command that `words` mean: a script, `-m module`, or a program.

    Raises:
        ConfigError: There is no such file or program.
    """
    if not words:
        raise ConfigError("no command: psworker run --workers 2 -- train.py ARGS")
    first = words[0]
    if first == "-m":
        if len(words) == 1:
            raise ConfigError("-m needs the name of a module")
        return (sys.executable, *words)
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise ConfigError(f"no script {first!r} in {Path.cwd()}")
        return (sys.executable, *words)
    if shutil.which(first) is None:
        raise ConfigError(f"no program {first!r}; a script's name ends in .py")
    return tuple(words)


def worker_environment(
    plan: LaunchPlan, rank: int, servers: Sequence[str], base: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables of one worker: torchrun's names, and ours for job and servers."""
    place = plan.place
    replaced = {
        *REPLACED_VARIABLES,
        "RANK",
        "WORLD_SIZE",
        *(() if place.has_others else STORE_VARIABLES),
        *(FOREIGN_VARIABLES if plan.token_file else ()),
    }
    own = {"RANK": str(rank), "WORLD_SIZE": str(place.job_workers)}
    if place.elastic is not None:
        least, most = place.elastic
        own = {"PACELINE_MIN_WORKERS": str(least), "PACELINE_MAX_WORKERS": str(most)}
    elif not place.has_others:
        own |= {"MASTER_ADDR": MASTER_ADDR, "MASTER_PORT": str(plan.master_port)}
    kept = {name: value for name, value in base.items() if name not in replaced}
    if plan.pipeline:
        kept["PACELINE_PIPELINE"] = plan.pipeline
    if plan.token_file:
        kept["PACELINE_TOKEN_FILE"] = plan.token_file
    return {
        "OMP_NUM_THREADS": str(threads_each(place.num_workers)),
        "PYTHONUNBUFFERED": "1",
        SHORT: "1",
        **kept,
        **own,
        "LOCAL_RANK": str(rank - place.first_rank),
        "LOCAL_WORLD_SIZE": str(place.num_workers),
        "PACELINE_JOB": plan.job,
        "PACELINE_SERVERS": ",".join(servers),
    }


def unreachable(servers: Sequence[str]) -> list[str]:
    """Returns the addresses of ports at which no process listens."""
    addresses = []
    for address in servers:
        if address.startswith("unix:"):
            continue
        try:
            socket.create_connection(split_address(address), PROBE_TIMEOUT_S).close()
        except OSError:
            addresses.append(address)
    return addresses


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind((MASTER_ADDR, 0))
        return int(probe.getsockname()[1])


def parse_elastic(text: str) -> tuple[int, int]:
    """Returns the minimum and maximum number of workers from `MIN:MAX`.

    Raises:
        ConfigError: It is not two numbers, the first at least 1 and at most the second.
    """
    bounds = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", text)
    if bounds is None or not 1 <= int(bounds[1]) <= int(bounds[2]):
        raise ConfigError(
            f"--elastic is {printable(text, 40)!r}, must look like MIN:MAX, such as 2:8"
        )
    return int(bounds[1]), int(bounds[2])


def new_job(kind: str = "run") -> str:
    """Returns a job name that no other launch has."""
    return f"{kind}-{secrets.token_hex(4)}"


def num_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_each(num_workers: int) -> int:
    """Returns the number of threads for one of `num_workers` on this machine's cores."""
    return max(1, num_cores() // num_workers)


def describe(place: LaunchPlace) -> str:
    """Returns `2 workers`, with their ranks or the bounds if the job has more."""
    workers = counted(place.num_workers, "worker")
    if place.elastic is not None:
        return "{} of {} to {}".format(workers, *place.elastic)
    if place.num_workers == place.job_workers:
        return workers
    last = place.first_rank + place.num_workers - 1
    ranks = f"rank {last}" if last == place.first_rank else f"ranks {place.first_rank} to {last}"
    return f"{workers} of {place.job_workers} ({ranks})"


def name_of(number: int) -> str:
    """Returns `SIGSEGV` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
