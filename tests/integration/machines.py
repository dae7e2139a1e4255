"""Machines with a shard each, which a test can lose with all that they have."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import psutil

from psserver.durability.sealed import read_json, write_json
from tests.integration.command import Command, eventually, free_ports, gone, require_started


class Machine:
    """A machine with one of two shards."""

    def __init__(
        self,
        folder: Path,
        index: int,
        addresses: list[str],
        second: Path | None = None,
        lease_s: float = 60,
    ) -> None:
        self.state = folder / f"machine-{index}"
        self._command = Command(folder)
        options = ["--shards", 2, "--shard-index", index, "--cluster", "night"]
        options += ["--lease-s", lease_s]
        port = int(addresses[index].rpartition(":")[2])
        ports = ["--port", port, "--metrics-port", *free_ports(1)]
        places = ["--state-dir", self.state, "--shard-addresses", ",".join(addresses)]
        self._line = [*options, *ports, *places, "--checkpoint-s", 1, "--log-level", "warning"]
        if second is not None:
            self._line += ["--checkpoint-copies", second]

    @contextmanager
    def running(self) -> Iterator[Popen[str]]:
        """Starts the shard; yields its supervisor."""
        with self._command.spawn("start", *self._line) as process:
            require_started(process)
            yield process

    def crash(self, supervisor: Popen[str]) -> None:
        """Kills all processes, and makes the journals those of another boot."""
        children = psutil.Process(supervisor.pid).children()
        supervisor.kill()
        for child in children:
            child.kill()
        for child in children:
            eventually(lambda child=child: gone(child.pid))  # type: ignore[misc]
        for stamp in self.state.glob("journal/*/stamp.json"):
            write_json(stamp, {**read_json(stamp), "boot": "another"})

    def lose(self, supervisor: Popen[str]) -> None:
        """Kills all processes, and deletes the folder."""
        self.crash(supervisor)
        shutil.rmtree(self.state)


def addresses_of_two() -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(2)]
