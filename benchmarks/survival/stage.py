"""A cluster that is there to be broken: real shards under their supervisor, real workers.

The shards are those of `psserver start`, so that whatever dies is started again as it would be
anywhere; a worker that dies is started again here, as torchrun would. Where root may, each third of
the workers has a network namespace of its own, with a link that can be cut (`netlab.py`), and the
shards write to a small file system that can be filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

from benchmarks import kit, netlab
from benchmarks.survival import proof
from pscore.partition import Layout, make_layout
from pscore.types import TensorSpec
from psserver.durability.sealed import read_json, write_json
from psserver.remote.checkpoint_files import newest

RATE = "10gbit"
NUM_HOSTS = 3  # The shards' one, and two more.
PORT = 7070  # Of shard 0, in a namespace of its own.
NUM_FILES = 512  # That a shard may have open: few, so that a benchmark can use them up.
CHECKPOINT_S = 5.0
JOB = "recovery"
TCP_LISTEN = "0A"  # In /proc/net/tcp.
PATIENCE_S = 120.0  # From the end of the faults until the workers must have ended.
POLL_S = 0.02
SETTLE_S = 0.05  # Messages under way when a fault struck have arrived by then.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The size of a stage."""

    workers: int = 4
    shards: int = 2
    numel: int = 1 << 20
    mode: str = "asgd"
    think_s: float = 0.005  # Between two steps of a worker.
    lease_s: float = 3.0
    options: tuple[str, ...] = ()  # More flags of `psserver start`.
    net: bool = True  # Use namespaces if that can be.
    disk: bool = True  # Use a file system of their own for the shards if that can be.

    @property
    def layout(self) -> Layout:
        """The slices, as workers and shards cut them."""
        return make_layout(
            [TensorSpec(name="w", shape=(self.numel,), dtype="float32")], self.shards
        )


@dataclass(slots=True)
class Progress:
    """The workers' files, read as they grow."""

    books: list[Path]
    acknowledged: list[tuple[float, int, int]] = field(default_factory=list)  # When, who, slice.
    first: dict[tuple[int, int], float] = field(default_factory=dict)  # Since the last fault.
    since_s: float = 0.0
    _offsets: dict[Path, int] = field(default_factory=dict)

    def mark(self, now_s: float) -> None:
        """Begins to look for the first acknowledgements after a fault."""
        self.read()
        self.first.clear()
        self.since_s = now_s + SETTLE_S

    def forget(self) -> None:
        """Looks for acknowledgements from now on; the fault was when `mark` says."""
        self.read()
        self.first.clear()

    def read(self) -> None:
        """Reads the lines written since."""
        for rank, path in enumerate(self.books):
            offset = self._offsets.get(path, 0)
            for entry in proof.read(path, offset):
                offset += proof.RECORD.size
                if entry.kind == proof.SENT:
                    continue
                self.acknowledged.append((entry.time_s, rank, entry.slice))
                if entry.time_s > self.since_s:
                    self.first.setdefault((rank, entry.slice), entry.time_s)
            self._offsets[path] = offset

    def rate(self, from_s: float, to_s: float) -> float:
        """Returns acknowledged pushes per second of a stretch of time."""
        inside = sum(from_s <= when < to_s for when, _, _ in self.acknowledged)
        return inside / (to_s - from_s)


class Stage:
    """The cluster; a context manager."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.skipped: list[str] = []  # Faults that are impossible here, with reasons.
        self.failures: list[str] = []  # Of workers that ended with an error of their own.
        self.layout = setup.layout
        self.roles: list[kit.Role] = []
        self.lab: netlab.Lab | None = None
        self.eras: list[proof.Era] = []  # Stretches of the books that ended with a power cut.
        self._restarts = [0] * setup.workers
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as undo:
            self.folder = Path(tempfile.mkdtemp(prefix="paceline-recovery-"))
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.state = self.folder / "state"
            self.state.mkdir()
            self.ballast = self.state / "ballast"
            undo.enter_context(self._small_disk())
            undo.enter_context(self._network())
            self.books = [self.folder / f"{rank}.book" for rank in range(self.setup.workers)]
            self.progress = Progress(self.books)
            undo.enter_context(self._shards())
            undo.callback(self._end_workers)
            self.roles = [self._worker(rank) for rank in range(self.setup.workers)]
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    # ----- for faults

    def shard_pids(self) -> dict[int, int]:
        """Returns the process of each shard that runs, as the kernel lists them."""
        found: dict[int, int] = {}
        for child in psutil.Process(self._supervisor.pid).children():
            with contextlib.suppress(psutil.Error):
                command = child.cmdline()  # Empty if it has just ended.
                if command[-2:-1] == ["shard"] and child.status() != psutil.STATUS_ZOMBIE:
                    found[int(json.loads(command[-1])["index"])] = child.pid
        return found

    def alive(self) -> dict[str, int]:
        """Returns the processes that run, by name: the supervisor, shards and workers."""
        workers = {
            f"worker {rank}": role.popen.pid
            for rank, role in enumerate(self.roles)
            if role.popen.poll() is None
        }
        shards = {f"shard {index}": pid for index, pid in self.shard_pids().items()}
        supervisor = self._supervisor
        return (
            workers | shards | ({"supervisor": supervisor.pid} if supervisor.poll() is None else {})
        )

    def signal_shard(self, index: int, number: signal.Signals) -> bool:
        """Sends a signal to a shard; returns whether it was there."""
        pid = self.shard_pids().get(index)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def await_successors(self, ended: Mapping[str, int]) -> None:
        """Waits until other processes have taken the places of these, by name as in `alive`."""
        end_s = time.monotonic() + PATIENCE_S
        while any(self.alive().get(name, pid) == pid for name, pid in ended.items()):
            if time.monotonic() > end_s:
                return  # `await_all` will report it.
            self.watch(POLL_S)

    def ports_of(self, shard: int) -> list[int]:
        """Returns the TCP ports on which a shard listens."""
        pid = self.shard_pids().get(shard)
        if pid is None:
            return []
        return listening(pid)

    def cut_power(self) -> None:
        """Kills all processes at once, changes the boot, and starts all again as before.

        Processes are stopped first, so that none sees another's death. The stamps in the shards'
        folder then name another boot, so that nothing is believed that a power cut may have taken.
        The cut waits for the job's first checkpoint: without one nothing would be left to load.
        """
        while JOB not in newest(self.state / "checkpoints"):
            self.watch(POLL_S)
        pids = list(self.alive().values())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._supervisor.wait()
        for role in self.roles:
            role.end()
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 30.0)
        self.progress.read()
        ends = [path.stat().st_size for path in self.books]
        for path in self.state.rglob("stamp.json"):
            write_json(path, read_json(path) | {"boot": secrets.token_hex(8)})
        self._start_shards()
        self.eras.append(proof.Era(ends=ends, loaded=self._exported()))
        for rank in range(self.setup.workers):
            self._restarts[rank] += 1
            self.roles[rank] = self._worker(rank)

    def host_of(self, rank: int) -> int:
        """Returns the host of a worker; the shards are on host 0."""
        return rank % NUM_HOSTS if self.lab is not None else 0

    def slices_of(self, shard: int) -> list[int]:
        """Returns the slices that a shard owns."""
        return [spec.index for spec in self.layout.of_shard(shard)]

    # ----- time

    def watch(self, seconds: float) -> None:
        """Waits, and restarts workers that have died."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.tend()
            time.sleep(min(POLL_S, left_s))

    def tend(self) -> None:
        """Restarts workers that have died, and reads all files."""
        self.progress.read()
        for rank, role in enumerate(self.roles):
            status = role.popen.poll()
            if status in (None, 0):
                continue
            if status != -signal.SIGKILL:
                lines = role.written().strip().splitlines() or [f"status {status}"]
                self.failures.append(f"worker {rank}: {lines[-1]}")
            self.revive(rank)

    def revive(self, rank: int) -> None:
        """Starts a worker again that has ended."""
        self.roles[rank].end()
        self._restarts[rank] += 1
        self.roles[rank] = self._worker(rank)

    def await_all(self, wanted: set[tuple[int, int]], patience_s: float = PATIENCE_S) -> float:
        """Waits until each of `(worker, slice)` has been acknowledged since the mark.

        Returns:
            When the last of them was, of the monotonic clock; infinite if never.
        """
        end_s = time.monotonic() + patience_s
        while not wanted <= self.progress.first.keys():
            if time.monotonic() > end_s:
                return float("inf")
            self.watch(POLL_S)
        return max(self.progress.first[key] for key in wanted)

    def finish(self) -> list[np.ndarray]:
        """Stops the workers, the first of them last; returns the weights of each slice.

        Raises:
            TimeoutError: They do not end; the message has their logs.
        """
        (self.folder / "stop").touch()
        self._await_end(range(1, self.setup.workers))
        (self.folder / "last").touch()
        self._await_end([0])
        flat = np.load(self.folder / "weights.npy")
        return [flat[spec.start : spec.stop] for spec in self.layout.slices]

    def shard_log(self) -> str:
        """Returns the logs of the shards and their supervisor."""
        return (self.folder / "shards.log").read_text(errors="replace")

    def _await_end(self, ranks: Any) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while [rank for rank in ranks if self.roles[rank].popen.poll() != 0]:
            if time.monotonic() > end_s:
                logs = [role.written()[-1500:] for role in self.roles]
                raise TimeoutError(
                    "\n".join(["workers do not end", *logs, self.shard_log()[-3000:]])
                )
            self.watch(POLL_S)

    # ----- building

    def _worker(self, rank: int) -> kit.Role:
        environment = kit.worker_environment(self.addresses, rank, self.setup.workers, "auto", JOB)
        environment["TORCHELASTIC_RESTART_COUNT"] = str(self._restarts[rank])
        arguments = {
            "folder": str(self.folder),
            "rank": rank,
            "workers": self.setup.workers,
            "numel": self.setup.numel,
            "mode": self.setup.mode,
            "think_s": self.setup.think_s,
        }
        prefix = () if self.lab is None else self.lab.inside(self.host_of(rank))
        return kit.Role("benchmarks.recovery", "worker", arguments, environment, prefix)

    def _end_workers(self) -> None:
        for role in self.roles:
            role.end()

    @contextlib.contextmanager
    def _network(self) -> Iterator[None]:
        obstacle = netlab.available() if self.setup.net else "not asked for"
        if obstacle is not None:
            self.skipped.append(f"cut and slow links: {obstacle}")
            yield
            return
        with netlab.Lab(NUM_HOSTS, RATE) as lab:
            self.lab = lab
            yield

    @contextlib.contextmanager
    def _small_disk(self) -> Iterator[None]:
        """Mounts a file system in memory that holds the shards' files a few times over."""
        if not self.setup.disk or os.geteuid() != 0:
            self.skipped.append(f"full disk: {'needs root' if self.setup.disk else 'not asked'}")
            yield
            return
        with _memory_disk(self.state, (64 << 20) + 64 * self.setup.numel) as obstacle:
            if obstacle:
                self.skipped.append(f"full disk: {obstacle}")
            yield

    @property
    def has_small_disk(self) -> bool:
        """Whether the shards' disk can be filled."""
        return os.path.ismount(self.state)

    @contextlib.contextmanager
    def _shards(self) -> Iterator[None]:
        """Shards on fixed ports, so that the same commands find them after a power cut."""
        self.host, self.prefix, self.port = "127.0.0.1", [], 0
        if self.lab is None:
            self.port = _free_ports(self.setup.shards)
        else:
            self.host, self.prefix, self.port = self.lab.address(0), self.lab.inside(0), PORT
        try:
            self._start_shards()
            yield
        finally:
            self._end_shards()

    def _start_shards(self) -> None:
        command = [
            *self.prefix, sys.executable, "-m", "psserver", "start", "--host", self.host,
            "--shards", str(self.setup.shards), "--port", str(self.port), "--metrics-port", "0",
            "--state-dir", str(self.state), "--checkpoint-s", str(CHECKPOINT_S),
            "--lease-s", str(self.setup.lease_s), "--grace-s", "2", "--log-level", "warning",
            *(() if self.lab is None else ("--insecure",)), *self.setup.options,
        ]  # fmt: skip
        with (self.folder / "shards.log").open("ab") as errors:
            self._supervisor = subprocess.Popen(
                command, cwd=kit.ROOT, env=_clean(os.environ), stdout=subprocess.PIPE,
                stderr=errors, text=True, preexec_fn=_with_few_files,
            )  # fmt: skip
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        if not line.startswith("PACELINE_SERVERS="):
            raise RuntimeError(f"shards did not start\n{self.shard_log()}")
        self.addresses = line.strip().partition("=")[2].split(",")

    def _end_shards(self) -> None:
        supervisor = self._supervisor
        supervisor.terminate()
        try:
            supervisor.wait(30.0)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        assert supervisor.stdout is not None
        supervisor.stdout.close()

    def _exported(self) -> list[np.ndarray]:
        """Returns the weights with which the shards have come back, before any worker has."""
        path = self.folder / "exported.safetensors"
        command = [
            *self.prefix,
            sys.executable,
            "-m",
            "psserver",
            "export",
            str(path),
            "--job",
            JOB,
        ]
        command += ["--servers", ",".join(self.addresses)]
        done = subprocess.run(command, cwd=kit.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{done.stderr}\n{self.shard_log()[-3000:]}")
        flat = load_file(path)["w"]
        return [flat[spec.start : spec.stop].copy() for spec in self.layout.slices]


@contextlib.contextmanager
def _memory_disk(folder: Path, nbytes: int) -> Iterator[str]:
    """Mounts a file system in memory on a folder; yields the reason where that is impossible."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "paceline", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield done.stderr.strip() or f"mount ended with status {done.returncode}"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def listening(pid: int) -> list[int]:
    """Returns the TCP ports on which a process listens, in whatever network namespace it is."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # Closed meanwhile.
            sockets.add(os.readlink(link))
    ports = set()
    for name in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, *rest = line.split()
            if state == TCP_LISTEN and f"socket:[{rest[5]}]" in sockets:
                ports.add(int(local.rpartition(":")[2], 16))
    return sorted(ports)


def _with_few_files() -> None:
    kit.end_with_parent()
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))


def _free_ports(count: int) -> int:
    """Returns the first of so many free ports of loopback, one after the other."""
    while True:
        with contextlib.ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
                return int(first)


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith("PACELINE_")}
