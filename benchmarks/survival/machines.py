"""Shards on machines that are lost for good: each has a standby, which takes over by itself.

A machine is a supervisor with the process of one shard, and a folder of its own for its state. When
it is lost, both are killed and the folder is deleted. An empty machine then comes in its place, and
becomes the standby of the shard. The register is a folder that no loss touches.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks import kit
from benchmarks.survival.shards import Shards, exported, free_ports

FAILOVER_S = 1.0  # Silence after which a standby takes over.


@dataclass(slots=True)
class Pair:
    """The machine that has a shard, and the one that is its standby or is to be that.

    Attributes:
        command: Makes the second one the standby; None: it is, or is not asked yet.
    """

    holder: Shards
    standby: Shards
    command: subprocess.Popen[bytes] | None = None
    is_whole: bool = False


class Machines:
    """The machines of all shards of a job; `tend` has to be called again and again."""

    def __init__(self, folder: Path, num_shards: int, flags: list[str], rng: random.Random) -> None:
        """Starts nothing yet.

        Args:
            folder: Gets logs and state.
            num_shards: Number of shards.
            flags: More flags of `psserver start`.
            rng: Chooses which machine of a pair is lost.
        """
        self._folder, self._num_shards, self._flags, self._rng = folder, num_shards, flags, rng
        self._number = itertools.count()
        self._register = folder / "register"
        self._pairs: list[Pair] = []
        self._all: list[Shards] = []

    def start(self) -> None:
        """Starts all machines, and waits until each shard has its standby."""
        self._register.mkdir()
        for index in range(self._num_shards):
            holder, standby = self._machine(index), self._machine(index)
            self._pairs.append(Pair(holder, standby))
        while not all(self.is_whole(index) for index in range(self._num_shards)):
            self.tend()

    def tend(self) -> None:
        """Makes empty machines standbys, as far as they are ready."""
        for pair in self._pairs:
            if pair.is_whole:
                continue
            if pair.command is not None and pair.command.poll() == 0:
                pair.command, pair.is_whole = None, True
            elif pair.command is None or pair.command.poll() is not None:
                pair.command = self._stand(pair)

    def _stand(self, pair: Pair) -> subprocess.Popen[bytes]:
        words = ["standby", *pair.standby.addresses, "--servers", *pair.holder.addresses]
        words += ["--same-host", "--register", str(self._register), "--failover-s", str(FAILOVER_S)]
        with (self._folder / "standby.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "psserver", *words],
                cwd=kit.ROOT, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    def is_whole(self, index: int) -> bool:
        """Returns whether a shard has a standby that could take over."""
        return self._pairs[index].is_whole

    def lose(self, index: int) -> str:
        """Loses a machine of a shard, whose standby takes over; returns which one it was."""
        pair = self._pairs[index]
        pair.is_whole = False
        if self._rng.choice([True, False]):
            lost, name = pair.standby, f"standby {index}"
        else:
            lost, pair.holder, name = pair.holder, pair.standby, f"shard {index}"
        end(lost)
        shutil.rmtree(lost.folder)
        self._all.remove(lost)
        pair.standby = self._machine(index)
        return name

    def stop(self) -> None:
        """Ends all."""
        for pair in self._pairs:
            if pair.command is not None:
                pair.command.kill()
                pair.command.wait()
        for machine in self._all:
            machine.stop()

    @property
    def addresses(self) -> list[str]:
        """Addresses of the shards, in order."""
        return [pair.holder.addresses[0] for pair in self._pairs]

    def exported(self, job: str, name: str) -> np.ndarray:
        """Returns a parameter of a job as the shards have it now, float32."""
        return exported(self._folder / "exported.safetensors", self.addresses, job, name)

    def log(self) -> str:
        """Returns the logs of all machines that are there."""
        return "".join(machine.log() for machine in self._all)

    def _machine(self, index: int) -> Shards:
        """Starts an empty machine for a shard."""
        folder = self._folder / f"machine-{next(self._number)}"
        (folder / "state").mkdir(parents=True)
        own = ["--shards", str(self._num_shards), "--shard-index", str(index)]
        own += ["--cluster", "chaos", "--checkpoint-s", "0", "--no-spare", *self._flags]
        self._all.append(Shards(folder, folder / "state", own, port=free_ports(1)))
        self._all[-1].start()
        return self._all[-1]


def end(machine: Shards) -> None:
    """Kills all processes of a machine at once."""
    supervisor = psutil.Process(machine.supervisor.pid)
    supervisor.suspend()  # So that it starts none again.
    for child in supervisor.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    supervisor.kill()
    machine.supervisor.wait()
