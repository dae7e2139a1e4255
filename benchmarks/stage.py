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
import shutil
import signal
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

from benchmarks import kit, netlab, proof
from pscore.partition import Layout, make_layout
from pscore.types import TensorSpec

RATE = "10gbit"
NUM_HOSTS = 3  # The shards' one, and two more.
PATIENCE_S = 120.0  # Until a cluster that was mended must have come to its end.
POLL_S = 0.02
SETTLE_S = 0.05  # What was under way when a fault struck has arrived by then.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is built."""

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
    """What the workers' files say, read as they grow."""

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

    def read(self) -> None:
        """Takes in what has been written since."""
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
        self.skipped: list[str] = []  # What cannot be done here, and why.
        self.failures: list[str] = []  # Of workers that ended with an error of their own.
        self.layout = setup.layout
        self.roles: list[kit.Role] = []
        self.lab: netlab.Lab | None = None
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

    # ----- what a fault needs

    def shard_pid(self, index: int) -> int:
        """Returns the process of a shard, as the supervisor last wrote it down."""
        path = next(self.state.glob("*/run.json"))
        return int(json.loads(path.read_text())["shards"][index]["pid"] or 0)

    def signal_shard(self, index: int, number: signal.Signals) -> bool:
        """Sends a signal to a shard; returns whether it was there."""
        with contextlib.suppress(ProcessLookupError):
            pid = self.shard_pid(index)
            if pid:
                os.kill(pid, number)
                return True
        return False

    def host_of(self, rank: int) -> int:
        """Returns the host of a worker; the shards are on host 0."""
        return rank % NUM_HOSTS if self.lab is not None else 0

    def slices_of(self, shard: int) -> list[int]:
        """Returns the slices that a shard owns."""
        return [spec.index for spec in self.layout.of_shard(shard)]

    # ----- time

    def watch(self, seconds: float) -> None:
        """Lets time pass, and starts workers again that have died."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.tend()
            time.sleep(min(POLL_S, left_s))

    def tend(self) -> None:
        """Starts workers again that have died, and reads what all have written."""
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
        """Lets the workers end, the first of them last; returns the weights of each slice.

        Raises:
            TimeoutError: They do not end; says what stands in their logs.
        """
        (self.folder / "stop").touch()
        self._await_end(range(1, self.setup.workers))
        (self.folder / "last").touch()
        self._await_end([0])
        flat = np.load(self.folder / "weights.npy")
        return [flat[spec.start : spec.stop] for spec in self.layout.slices]

    def shard_log(self) -> str:
        """Returns what the shards and their supervisor have logged."""
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
        environment = kit.worker_environment(
            self.addresses, rank, self.setup.workers, "auto", "recovery"
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
        """Mounts a file system in memory that holds what the shards need a few times over."""
        nbytes = (64 << 20) + 64 * self.setup.numel
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "paceline", str(self.state)]
        if not self.setup.disk or os.geteuid() != 0:
            self.skipped.append(
                "full disk: needs root" if self.setup.disk else "full disk: not asked"
            )
            yield
            return
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.skipped.append(f"full disk: {done.stderr.strip()}")
            yield
            return
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(self.state)], check=False)

    @property
    def has_small_disk(self) -> bool:
        """Whether the shards' disk can be filled."""
        return os.path.ismount(self.state)

    @contextlib.contextmanager
    def _shards(self) -> Iterator[None]:
        where: list[str] = ["--host", "127.0.0.1"]
        prefix: list[str] = []
        if self.lab is not None:
            where, prefix = ["--host", self.lab.address(0), "--insecure"], self.lab.inside(0)
        command = [
            *prefix, sys.executable, "-m", "psserver", "start", "--shards", str(self.setup.shards),
            "--port", "0", "--metrics-port", "0", "--state-dir", str(self.state), "--lease-s",
            str(self.setup.lease_s), "--grace-s", "2", "--log-level", "warning", *where,
            *self.setup.options,
        ]  # fmt: skip
        with (self.folder / "shards.log").open("wb") as errors:
            popen = subprocess.Popen(
                command, cwd=kit.ROOT, env=_clean(os.environ), stdout=subprocess.PIPE,
                stderr=errors, text=True, preexec_fn=kit.end_with_parent,
            )  # fmt: skip
        assert popen.stdout is not None
        try:
            line = popen.stdout.readline()
            if not line.startswith("PACELINE_SERVERS="):
                raise RuntimeError(f"shards did not start\n{self.shard_log()}")
            self.addresses = line.strip().partition("=")[2].split(",")
            yield
        finally:
            popen.terminate()
            try:
                popen.wait(30.0)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
            popen.stdout.close()


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith("PACELINE_")}
