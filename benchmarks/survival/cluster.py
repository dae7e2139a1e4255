"""The cluster of the kill loop: real shards under their supervisor, and real workers.

The shards are those of `psserver start`, so that a shard that dies is restarted as it would be
anywhere; a worker that dies is started again here, as torchrun would. Where root may, each third of
the workers has a network namespace of its own, with a link that can be cut (`netlab.py`), and the
shards write to a small file system that can be filled.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import kit, netlab
from benchmarks.survival import proof
from benchmarks.survival.shards import JOB, NUM_FILES, Shards, free_ports
from pscore.partition import Layout, make_layout
from pscore.types import TensorSpec
from psserver.durability.sealed import read_json, write_json
from psserver.remote.checkpoint_files import newest

RATE = "10gbit"
NUM_HOSTS = 3  # The shards' one, and two more.
PORT = 7070  # Of shard 0, in a namespace of its own.
PATIENCE_S = 120.0  # From the end of the faults until the workers must have ended.
STUCK_S = 60.0  # Twice the limit of a worker's waits.
POLL_S = 0.02
SETTLE_S = 0.05  # Messages under way when a fault is made have arrived by then.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The size of a cluster."""

    workers: int = 4
    shards: int = 2
    numel: int = 1 << 20
    mode: str = "asgd"
    think_s: float = 0.005  # Between two steps of a worker.
    lease_s: float = 3.0
    options: tuple[str, ...] = ()  # More flags of `psserver start`.
    num_files: int = NUM_FILES  # That a shard may have open.
    net: bool = True  # Use namespaces if that can be.
    disk: bool = True  # Use a file system of their own for the shards if that can be.

    def layout(self, num_slices: int) -> Layout:
        """Returns the slices, as workers and shards cut them."""
        tensors = [TensorSpec(name="w", shape=(self.numel,), dtype="float32")]
        layouts = [make_layout(tensors, self.shards, is_long=is_long) for is_long in (False, True)]
        return next(layout for layout in layouts if len(layout.slices) == num_slices)


@dataclass(slots=True)
class Progress:
    """The workers' files, read as they grow."""

    books: list[Path]
    acknowledged: list[tuple[float, int, int]] = field(default_factory=list)  # When, who, slice.
    first: dict[tuple[int, int], float] = field(default_factory=dict)  # Since the last fault.
    since_s: float = 0.0
    _offsets: dict[Path, int] = field(default_factory=dict)
    _num_taken: int = 0

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

    def take_new(self) -> list[tuple[float, int, int]]:
        """Returns the acknowledgements that were read since the last call."""
        new = self.acknowledged[self._num_taken :]
        self._num_taken += len(new)
        return new

    def rate(self, from_s: float, to_s: float) -> float:
        """Returns acknowledged pushes per second of a stretch of time."""
        inside = sum(from_s <= when < to_s for when, _, _ in self.acknowledged)
        return inside / (to_s - from_s)


class Cluster:
    """The shards, the workers and the links between them; a context manager."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.skipped: list[str] = []  # Faults that are impossible here, with reasons.
        self.failures: list[str] = []  # Of workers that ended with an error of their own.
        self.roles: list[kit.Role] = []
        self.lab: netlab.Lab | None = None
        self.eras: list[proof.Era] = []  # Stretches of the books that ended with a power cut.
        self.num_stuck = 0  # Waits of workers that were longer than `STUCK_S`.
        self._restarts = [0] * setup.workers
        self.moved_s = [math.inf] * setup.workers  # Time of each worker's last progress or imports.
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as undo:
            self.folder = Path(tempfile.mkdtemp(prefix="paceline-recovery-"))
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.state = self.folder / "state"
            self.state.mkdir()
            self.filler = self.state / "filler"  # Fills the disk while it exists.
            undo.enter_context(self._small_disk())
            undo.enter_context(self._network())
            self.books = [self.folder / f"{rank}.book" for rank in range(self.setup.workers)]
            self.progress = Progress(self.books)
            undo.enter_context(self._started_shards())
            undo.callback(self._end_workers)
            self.roles = [self._worker(rank) for rank in range(self.setup.workers)]
            self.layout = self._await_layout()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    # ----- for faults

    def alive(self) -> dict[str, int]:
        """Returns the processes that run, by name: the supervisor, shards and workers."""
        workers = {
            f"worker {rank}": role.popen.pid
            for rank, role in enumerate(self.roles)
            if role.popen.poll() is None
        }
        return workers | self.shards.alive()

    def await_successors(self, ended: Mapping[str, int]) -> None:
        """Waits until other processes have taken the places of these, by name as in `alive`."""
        end_s = time.monotonic() + PATIENCE_S
        while any(self.alive().get(name, pid) == pid for name, pid in ended.items()):
            if time.monotonic() > end_s:
                return  # `await_all` will report it.
            self.watch(POLL_S)

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
        self.shards.supervisor.wait()
        for role in self.roles:
            role.end()
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 30.0)
        self.progress.read()
        ends = [path.stat().st_size for path in self.books]
        for path in self.state.rglob("stamp.json"):
            write_json(path, read_json(path) | {"boot": secrets.token_hex(8)})
        self.shards.start()
        flat = self.shards.exported()
        loaded = [flat[spec.start : spec.stop].copy() for spec in self.layout.slices]
        self.eras.append(proof.Era(ends=ends, loaded=loaded))
        for rank in range(self.setup.workers):
            self._restarts[rank] += 1
            self.roles[rank] = self._worker(rank)

    def host_of(self, rank: int) -> int:
        """Returns the host of a worker; the shards are on host 0."""
        return rank % NUM_HOSTS if self.lab is not None else 0

    def slices_of(self, shard: int) -> list[int]:
        """Returns the slices that a shard owns."""
        return [spec.index for spec in self.layout.of_shard(shard)]

    def imported(self, rank: int) -> Path:
        """Returns the file that a worker makes when its imports are done."""
        return self.folder / f"{rank}.imported"

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
        for _, rank, _ in self.progress.take_new():
            self.moved_s[rank] = time.monotonic()
        for rank, role in enumerate(self.roles):
            with contextlib.suppress(FileNotFoundError):  # Imports may take long on a busy machine.
                self.imported(rank).unlink()
                self.moved_s[rank] = time.monotonic()
            if time.monotonic() - self.moved_s[rank] > STUCK_S:
                self.num_stuck += 1
                self.moved_s[rank] = math.inf  # Counted once, until it moves again.
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

    def _await_layout(self) -> Layout:
        """Returns the slices of the job, which its first worker chooses.

        Raises:
            TimeoutError: No worker has begun.
        """
        file, end_s = proof.num_slices_of(self.folder), time.monotonic() + PATIENCE_S
        while not file.exists():
            if time.monotonic() > end_s:
                raise TimeoutError(f"no worker has begun: {self.failures}")
            self.watch(POLL_S)
        return self.setup.layout(int(file.read_text()))

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

    def _await_end(self, ranks: Any) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while [rank for rank in ranks if self.roles[rank].popen.poll() != 0]:
            if time.monotonic() > end_s:
                logs = [role.written()[-1500:] for role in self.roles]
                raise TimeoutError(
                    "\n".join(["workers do not end", *logs, self.shards.log()[-3000:]])
                )
            self.watch(POLL_S)

    # ----- building

    def _worker(self, rank: int) -> kit.Role:
        environment = kit.worker_environment(
            self.shards.addresses, rank, self.setup.workers, "auto", JOB
        )
        environment["TORCHELASTIC_RESTART_COUNT"] = str(self._restarts[rank])
        arguments = {
            "folder": str(self.folder),
            "rank": rank,
            "workers": self.setup.workers,
            "numel": self.setup.numel,
            "mode": self.setup.mode,
            "think_s": self.setup.think_s,
        }
        self.imported(rank).unlink(missing_ok=True)
        self.moved_s[rank] = math.inf
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
    def _started_shards(self) -> Iterator[None]:
        """Shards on fixed ports, so that the same commands find them after a power cut."""
        flags = ["--shards", str(self.setup.shards), "--lease-s", str(self.setup.lease_s)]
        flags += ["--insecure"] * (self.lab is not None) + list(self.setup.options)
        if self.lab is None:
            port = free_ports(2 * self.setup.shards)
            place: dict[str, Any] = {"port": port}
        else:
            port = PORT
            place = {"host": self.lab.address(0), "port": port, "prefix": self.lab.inside(0)}
        self.shards = Shards(
            self.folder,
            self.state,
            flags,
            metrics_port=port + self.setup.shards,
            num_files=self.setup.num_files,
            **place,
        )
        try:
            self.shards.start()
            yield
        finally:
            self.shards.stop()


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
