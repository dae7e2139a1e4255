"""The shards of the kill loop: processes of `psserver start`, on ports that stay the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file

from benchmarks import kit
from psserver.process.spare import SPARE

NUM_FILES = 512  # Files that a shard may have open: few, so that a benchmark can use them up.
CHECKPOINT_S = 5.0
JOB = "recovery"
PORTS = range(20000, 32768)  # Below those that the kernel gives to connections.
TCP_LISTEN = "0A"  # In /proc/net/tcp.


class Shards:
    """Real shards under their supervisor, which restarts a shard that dies.

    Attributes:
        host: Address on which they listen.
        addresses: Addresses of the shards, once they have started.
    """

    def __init__(
        self,
        folder: Path,
        state: Path,
        flags: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        metrics_port: int = 0,
        num_files: int = NUM_FILES,
        prefix: Sequence[str] = (),
    ) -> None:
        """Prepares the command; starts nothing yet.

        Args:
            folder: Gets their log, and the weights that they export.
            state: Their `--state-dir`.
            flags: More flags of `psserver start`.
            host: Address to listen on.
            port: Port of shard 0.
            metrics_port: Port of its metrics page; 0: the shards have none.
            num_files: Files that a shard may have open.
            prefix: Words in front of each command, such as those that enter a namespace.
        """
        self.host, self.folder, self.prefix = host, folder, list(prefix)
        self.addresses: list[str] = []
        self._metrics_port, self._num_files = metrics_port, num_files
        self._command = [
            *self.prefix, sys.executable, "-m", "psserver", "start", "--host", host,
            "--port", str(port), "--metrics-port", str(metrics_port), "--state-dir", str(state),
            "--checkpoint-s", str(CHECKPOINT_S), "--grace-s", "2", "--log-level", "warning", *flags,
        ]  # fmt: skip

    def start(self) -> None:
        """Starts the supervisor, and waits until the shards are ready.

        Raises:
            RuntimeError: They did not start; the message has their log.
        """
        with (self.folder / "shards.log").open("ab") as errors:
            self.supervisor = subprocess.Popen(
                self._command, cwd=kit.ROOT, env=_clean(os.environ), stdout=subprocess.PIPE,
                stderr=errors, text=True, preexec_fn=self._limit_files,
            )  # fmt: skip
        assert self.supervisor.stdout is not None
        line = self.supervisor.stdout.readline()
        if not line.startswith("PACELINE_SERVERS="):
            raise RuntimeError(f"shards did not start\n{self.log()}")
        self.addresses = line.strip().partition("=")[2].split(",")

    def stop(self) -> None:
        """Asks the supervisor to end all, and kills it if it does not."""
        self.supervisor.terminate()
        try:
            self.supervisor.wait(30.0)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()
        assert self.supervisor.stdout is not None
        self.supervisor.stdout.close()

    def pids(self) -> dict[int, int]:
        """Returns the process of each running shard, as the kernel lists them."""
        found: dict[int, int] = {}
        for child in psutil.Process(self.supervisor.pid).children():
            with contextlib.suppress(psutil.Error):
                command = child.cmdline()  # Empty if it has just ended.
                if command[-2:-1] != ["shard"] or child.status() == psutil.STATUS_ZOMBIE:
                    continue
                if command[-1] != SPARE:
                    found[int(json.loads(command[-1])["index"])] = child.pid
                elif named := re.fullmatch(r"shard-(\d+)-of-\d+", child.name()):
                    found[int(named[1])] = child.pid
        return found

    def alive(self) -> dict[str, int]:
        """Returns the running processes by name: the supervisor and the shards."""
        found = {f"shard {index}": pid for index, pid in self.pids().items()}
        if self.supervisor.poll() is None:
            found["supervisor"] = self.supervisor.pid
        return found

    def signal(self, index: int, number: signal.Signals) -> bool:
        """Sends a signal to a shard; returns whether it was there."""
        pid = self.pids().get(index)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def ports(self, index: int) -> list[int]:
        """Returns the TCP ports on which a shard listens."""
        pid = self.pids().get(index)
        return [] if pid is None else listening(pid)

    @property
    def pages(self) -> list[int]:
        """The ports of the metrics pages."""
        return [self._metrics_port + index for index in range(len(self.addresses))]

    def log(self) -> str:
        """Returns the logs of the shards and their supervisor."""
        return (self.folder / "shards.log").read_text(errors="replace")

    def exported(self, job: str = JOB, name: str = "w") -> np.ndarray:
        """Returns a parameter of a job as the shards have it now, float32.

        Args:
            job: The job.
            name: The parameter.

        Raises:
            RuntimeError: They did not export them; the message says why.
        """
        path = self.folder / "exported.safetensors"
        return exported(path, self.addresses, job, name, self.prefix)

    def _limit_files(self) -> None:
        kit.end_with_parent()
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._num_files, self._num_files))


def exported(
    path: Path, addresses: Sequence[str], job: str, name: str, prefix: Sequence[str] = ()
) -> np.ndarray:
    """Returns a parameter of a job as its shards have it now, float32; writes it to a file, too.

    Raises:
        RuntimeError: They did not export them; the message says why.
    """
    words = [sys.executable, "-m", "psserver", "export", str(path), "--job", job]
    command = [*prefix, *words, "--servers", ",".join(addresses)]
    done = subprocess.run(command, cwd=kit.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return load_file(path)[name]


def listening(pid: int) -> list[int]:
    """Returns the TCP ports on which a process listens, in any network namespace."""
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


def free_ports(count: int) -> int:
    """Returns the first of so many free ports of loopback, one after the other.

    A connection of another process takes none of them, not even while a shard starts again.
    """
    while True:
        first = random.randrange(PORTS.start, PORTS.stop - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith("PACELINE_")}
