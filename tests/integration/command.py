"""Runs `psserver` as a user does, on free ports, and leaves no process behind."""

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from tests.integration import warm

T = TypeVar("T")
WAIT_S = 200.0
# Below the ports that the system chooses from; each process of the tests has a block of its own.
PORT_FIRST, NUM_PORTS, BLOCK = 10_000, 20_000, 500
_guards: list[socket.socket] = []


def eventually(claim: Callable[[], T], wait_s: float = WAIT_S) -> T:
    """Returns the first true value of `claim`, or fails after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while not (value := claim()):
        assert time.monotonic() < deadline_s, f"not within {wait_s} s"
        time.sleep(0.01)
    return value


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended.

    Its first thread may have ended while others still hold its ports.
    """
    try:
        is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return is_zombie and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return True


def join_threads(name: str) -> None:
    """Waits for the threads of this name that have failed or are about to end."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(WAIT_S)


class Command:
    """`psserver` with a run directory of its own; `fresh` starts an interpreter for each."""

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self.folder = folder
        self._fresh = fresh
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        self.environment = {**kept, "XDG_RUNTIME_DIR": str(folder), "COLUMNS": "200"}
        self.environment["PACELINE_SPARE"] = "false"  # The children of a supervisor are its shards.

    def line(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "psserver", *map(str, arguments)]

    def _start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        line = self.line(*arguments)
        if self._fresh or line[0] != sys.executable:
            return subprocess.Popen(line, text=True, **options)
        return warm.Popen(line[1:], text=True, **options)

    def run(
        self, *arguments: object, code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, which must be exit code `code`."""
        pipe = subprocess.PIPE
        variables = self.environment | environment
        with self._start(*arguments, env=variables, stdout=pipe, stderr=pipe) as process:
            try:
                stdout, stderr = process.communicate(timeout=WAIT_S)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == code, (process.returncode, stdout, stderr)
        return subprocess.CompletedProcess(process.args, code, stdout, stderr)

    @contextmanager
    def spawn(
        self, *arguments: object, stderr: IO[str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Runs a command beside the test; ends it, in order if it can, when the test is over."""
        pipe = subprocess.PIPE
        process = self._start(
            *arguments,
            env=self.environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe if stderr is None else stderr,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.communicate(timeout=WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise

    @contextmanager
    def detached(self, *arguments: object) -> Iterator[dict[str, Any]]:
        """Starts detached shards on free ports; yields the run file's content."""
        self.run("start", "--port", 0, "--detach", *arguments)
        run = self.run_file()
        try:
            yield run
        finally:
            for pid in [run["pid"]]:
                if not gone(pid):
                    os.kill(pid, signal.SIGTERM)
                eventually(lambda: gone(run["pid"]))

    def run_file(self) -> dict[str, Any]:
        """Returns the only run file there is."""
        return read_run(self.folder)


def read_run(folder: Path) -> dict[str, Any]:
    """Returns the only run file below a folder."""
    (path,) = folder.rglob("run.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def live_shards(folder: Path) -> list[int]:
    """Returns the numbers of the shards' processes, once all of them run.

    A shard answers its workers before the supervisor has noted its process in the run file: until
    then the file has the number of the one that was killed, or none.
    """

    def found() -> list[int]:
        pids = [shard["pid"] for shard in read_run(folder)["shards"]]
        return [] if any(pid is None or gone(pid) for pid in pids) else pids

    return eventually(found)


def bound(port: int) -> socket.socket | None:
    """Returns a socket at a port of loopback; None: the port is taken."""
    found = socket.socket()
    try:
        found.bind(("127.0.0.1", port))
    except OSError:
        found.close()
        return None
    return found


@functools.cache
def own_ports() -> Iterator[int]:
    """Yields the ports of a block, over and over; a socket at its first one keeps others out."""
    for first in range(PORT_FIRST, PORT_FIRST + NUM_PORTS, BLOCK):
        if (guard := bound(first)) is not None:
            _guards.append(guard)
            return itertools.cycle(range(first + 1, first + BLOCK))
    raise AssertionError("no block of ports is free")


def taken_port() -> socket.socket:
    """Returns a socket that listens on a port that neither the system nor another test gives away.

    So a process may listen there long after the socket was closed, and again after its end.
    """
    for port in itertools.islice(own_ports(), BLOCK):
        if (listener := bound(port)) is not None:
            listener.listen()
            return listener
    raise AssertionError("no port is free")


def free_ports(count: int) -> list[int]:
    """Returns ports on which nobody listens."""
    with ExitStack() as taken:
        return [taken.enter_context(taken_port()).getsockname()[1] for _ in range(count)]


def free_row(count: int) -> int:
    """Returns the first of so many such ports in a row."""
    ports = free_ports(count)
    return ports[0] if ports[-1] - ports[0] == count - 1 else free_row(count)


def lasting_ports(num_shards: int = 2) -> tuple[object, ...]:
    """Returns flags of `psserver start` for a test that kills shards.

    The ports of `--port 0` are those of the system, which may give them to another process before
    the next process of a shard listens there.
    """
    return "--port", free_row(num_shards), "--metrics-port", free_row(num_shards)


def require_started(process: subprocess.Popen[str]) -> None:
    """Waits until `psserver start` prints its addresses; fails with its errors if it ends."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("PACELINE_SERVERS="):
        raise AssertionError(line + (process.stderr.read() if process.stderr else ""))
