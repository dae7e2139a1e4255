"""Real shards and real workers for tests: processes on free ports that end with the test.

A worker is a function that runs in a process of its own, forked from an interpreter that has
imported torch and psworker (`tests.integration.warm`), with the variables that a launcher would
set. It gets a `Station`: its rank, and a line to the test, so that both can wait for each other
without a clock. Its return value is the result; an exception fails the test, with all its output.
For effects of a whole interpreter (exit status, Ctrl-C, a script that just ends) there is
`Script`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.integration import warm

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200.0  # Against a hang only: no test waits for it to pass.
PR_SET_PDEATHSIG = 1
WORK = "from tests.integration.cluster import work; work()"
_numbers = itertools.count()


class WorkerError(AssertionError):
    """A worker raised, died or did not come to its end; the message holds what it wrote."""


class Station:
    """The argument of a worker function."""

    def __init__(self, rank: int, num_workers: int, line: Connection) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self._line = line

    def tell(self, value: Any = None) -> None:
        """Sends something to the test (`Worker.hear`)."""
        self._line.send(("said", value))

    def hear(self) -> Any:
        """Waits for a message of the test (`Worker.tell`)."""
        return self._line.recv()

    def is_told(self) -> bool:
        """Whether the test has sent something that was not heard yet."""
        return self._line.poll()


class Worker:
    """One worker process, as the test sees it."""

    def __init__(
        self, function: Callable[..., Any], rank: int, args: Sequence[Any], env: Mapping[str, str]
    ) -> None:
        self.rank = rank
        self._line, theirs = multiprocessing.Pipe()
        self._folder = tempfile.TemporaryDirectory()
        self._written = Path(self._folder.name) / "written"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        with theirs, self._written.open("ab") as written:
            self._process = warm.Popen(
                ["-c", WORK], env=kept | dict(env), stdin=theirs, stdout=written, stderr=written
            )
        self._line.send((function, rank, int(env["WORLD_SIZE"]), tuple(args)))
        self._over: tuple[str, Any] | None = None  # How it ended, once `is_over` has seen it.

    @property
    def pid(self) -> int:
        return self._process.pid

    def written(self) -> str:
        """Returns what the worker has written to standard output and error."""
        return self._written.read_text(encoding="utf-8", errors="replace")

    def tell(self, value: Any = None) -> None:
        """Sends something to the worker (`Station.hear`)."""
        self._line.send(value)

    def hear(self, deadline_s: float = DEADLINE_S) -> Any:
        """Returns the next thing that the worker tells."""
        kind, value = self._receive(deadline_s)
        if kind != "said":
            raise WorkerError(f"worker {self.rank} {kind} {value!r} early\n{self.written()}")
        return value

    def result(self, deadline_s: float = DEADLINE_S) -> Any:
        """Waits for the end of the worker function and returns its result."""
        kind, value = self._over or self._receive(deadline_s)
        while kind == "said":
            kind, value = self._receive(deadline_s)
        self._process.wait(deadline_s)
        if kind != "returned":
            raise WorkerError(f"worker {self.rank} raised\n{value}\n{self.written()}")
        return value

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the worker; after SIGKILL it is gone when this returns."""
        os.kill(self.pid, number)
        if number is signal.SIGKILL:
            self._process.wait()

    def close(self) -> None:
        """Ends the process in any case."""
        self._process.kill()
        self._process.wait()
        self._line.close()
        self._folder.cleanup()

    def is_over(self) -> bool:
        """Whether the result is there, or the process has ended; drops what it has told."""
        while self._over is None and self._line.poll():
            kind, value = self._receive(0.0)
            self._over = None if kind == "said" else (kind, value)
        return self._over is not None

    def fileno(self) -> int:
        """Readable when the worker has told something."""
        return self._line.fileno()

    def _receive(self, deadline_s: float) -> tuple[str, Any]:
        if not self._line.poll(deadline_s):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(1.0)  # For its stacks, which nobody else will tell.
            raise WorkerError(
                f"worker {self.rank} did nothing for {deadline_s:g} s\n{self.written()}"
            )
        try:
            kind, value = self._line.recv()
        except EOFError:
            self._process.wait(DEADLINE_S)
            raise WorkerError(
                f"worker {self.rank} ended with {self._process.returncode}\n{self.written()}"
            ) from None
        return kind, value


def results_of(workers: Sequence[Worker]) -> list[Any]:
    """Returns all results; the first worker that fails is the one that is told of."""
    pending = list(workers)
    while pending:
        if not wait([worker.fileno() for worker in pending], DEADLINE_S):
            pending[0].result(0.0)  # Says what it does instead.
        for worker in [worker for worker in pending if worker.is_over()]:
            worker.result()
            pending.remove(worker)
    return [worker.result() for worker in workers]


def work() -> None:
    """Runs the worker process, whose line to the test is standard input."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # None outlives the test.
    line = Connection(os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    faulthandler.register(signal.SIGUSR1)
    function, rank, num_workers, args = line.recv()
    import psworker  # Loaded already where this was forked from; the test may do without.

    try:
        value = function(Station(rank, num_workers, line), *args)
        psworker.shutdown()
    except BaseException:  # noqa: BLE001 - whatever it is, the test has to see it
        line.send(("raised", traceback.format_exc()))
    else:
        line.send(("returned", value))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Shards:
    """A cluster of real shard processes on free ports; ends when closed, or with this process."""

    def __init__(
        self, num_shards: int = 2, *, lease_s: float = 10.0, env: Mapping[str, str] | None = None
    ) -> None:
        options = ["--shards", str(num_shards), "--lease-s", str(lease_s)]
        self._folder = tempfile.TemporaryDirectory()
        self._written = Path(self._folder.name) / "written"
        with self._written.open("wb") as stderr:
            self._popen = warm.Popen(
                ["-m", "psserver", "embedded", *options, "--log-level", "warning"],
                cwd=ROOT,
                env={**clean_environment(), **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            written = self.written()
            self.close()
            raise AssertionError(f"shards did not start\n{written}")
        self.addresses: list[str] = json.loads(line)["addresses"]

    @property
    def servers(self) -> str:
        """The addresses as PACELINE_SERVERS holds them."""
        return ",".join(self.addresses)

    @property
    def pid(self) -> int:
        """The parent of the shards' processes."""
        return self._popen.pid

    def written(self) -> str:
        """Returns what the shards have logged: warnings and worse."""
        return self._written.read_text(encoding="utf-8", errors="replace")

    def require_alive(self) -> None:
        """Raises AssertionError, with the shards' logs, if they have ended."""
        status = self._popen.poll()
        assert status is None, f"the shards ended by themselves ({status})\n{self.written()}"

    def wait_until_lost(self, job: str, rank: int) -> None:
        """Waits until every shard has declared a worker lost; a new process may join then."""
        fields = rf"(?=.*\bjob={re.escape(job)}\b)(?=.*\bworker={rank}\b)"
        said = re.compile(rf"^{fields}.*worker lost", re.MULTILINE)
        wait_until(lambda: len(said.findall(self.written())) >= len(self.addresses))

    def environment(self, rank: int, num_workers: int, job: str) -> dict[str, str]:
        """Returns what a launcher would set for one worker."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_workers),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_workers),
            "PACELINE_SERVERS": self.servers,
            "PACELINE_JOB": job,
        }

    @contextmanager
    def workers(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_workers: int = 2,
        ranks: Sequence[int] | None = None,
        job: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator[list[Worker]]:
        """Starts workers of one job (all ranks of it, or some), and ends them in any case."""
        job = job or new_job()
        started: list[Worker] = []
        try:
            for rank in range(num_workers) if ranks is None else ranks:
                variables = self.environment(rank, num_workers, job) | dict(env or {})
                started.append(Worker(function, rank, args, variables))
            yield started
        finally:
            for worker in started:
                worker.close()

    def run(
        self, function: Callable[..., Any], *args: Any, num_workers: int = 2, **options: Any
    ) -> list[Any]:
        """Runs a function as every worker of a job and returns the results by rank."""
        with self.workers(function, *args, num_workers=num_workers, **options) as workers:
            return results_of(workers)

    def close(self) -> None:
        """Ends the shards in order."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.stdout.close()
        try:
            self._popen.wait(DEADLINE_S)
        finally:
            self._popen.kill()
            self._popen.wait()
            self._folder.cleanup()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and (status := self._popen.poll()) is not None:
            sys.stderr.write(f"the shards ended by themselves ({status})\n{self.written()}\n")
        self.close()


class Script:
    """A Python script in an interpreter of its own, as a user starts it; a context manager."""

    def __init__(
        self, path: Path, *arguments: object, env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._stderr = Path(self._folder.name) / "stderr"
        with self._stderr.open("wb") as stderr:
            self.process = warm.Popen(
                [path, *arguments],
                cwd=self._folder.name,
                env={**clean_environment(), "PYTHONPATH": str(ROOT), **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def line(self) -> str:
        """Returns the next line that the script prints."""
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline().rstrip("\n")
        assert line, f"the script ended early\n{self.stderr()}"
        return line

    def stderr(self) -> str:
        """Returns what the script has written to standard error."""
        return self._stderr.read_text(encoding="utf-8", errors="replace")

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Waits for the end of the script and returns its exit status."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"the script has not ended\n{self.stderr()}") from None

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self._folder.cleanup()


def clean_environment() -> dict[str, str]:
    """Returns this process's environment without what would make it a worker."""
    launcher = ("PACELINE_", "DMLC_", "TORCHELASTIC_")
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(launcher) and name not in torchrun
    }


def new_job() -> str:
    """Returns a job name that nobody else has."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def wait_until(claim: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Waits for something that only looking can tell, such as the end of a foreign process."""
    end_s = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s"
        time.sleep(0.02)
