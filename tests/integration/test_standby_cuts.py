"""A shard's host is cut off from its standby and the register, but not from all workers.

Each process is on a host of its own, a network namespace. The old process must acknowledge nothing
that the standby lacks, so after the cut is healed each push counts once, on both shards: gradients
are ones at elements of each worker's own, so the weights show the steps that were counted.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

import psworker
from benchmarks import netlab
from benchmarks.forked import enter
from tests.integration.cluster import ROOT, Station, Worker
from tests.integration.command import eventually

FIRST, OLD, STANDBY, NEAR, FAR = range(5)  # Hosts; the workers' are the last two.
NUMEL = 1 << 14


def train(me: Station, namespace: str, mode: str) -> list[float]:
    """Adds ones to each second element until told; says each step that was acknowledged.

    Returns:
        The number of its own steps, and how often each worker's elements were counted: the
        smallest and the largest number.
    """
    enter(namespace)
    part = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([part], lr=1.0), [("part", part)], mode=mode
    )
    steps = 0
    while not me.is_told():
        grad = torch.zeros(NUMEL)
        grad[me.rank :: 2] = -1.0
        part.grad = grad
        optimizer.step()
        steps += 1
        me.tell(steps)
    me.hear()
    me.tell(0)  # It makes no further step.
    me.hear()
    with optimizer.global_weights():
        found = [part.detach()[rank::2] for rank in range(2)]
        ends = [(one.min().item(), one.max().item()) for one in found]
    optimizer.close()
    return [steps, *ends[0], *ends[1]]


class Hosts:
    """Two shards, an empty process for the second, and two workers, each on its host."""

    def __init__(self, lab: netlab.Lab, folder: Path, stack: ExitStack) -> None:
        self._lab, self._folder, self._stack = lab, folder, stack
        self.register = folder / "mount" / "night"
        self.register.mkdir(parents=True)
        self.shards = [self._shard(0, FIRST), self._shard(1, OLD), self._shard(1, STANDBY)]
        self.workers: list[Worker] = []

    def address(self, host: int) -> str:
        return f"{self._lab.address(host)}:7070"

    def _run(self, host: int, name: str, *words: object) -> subprocess.Popen[str]:
        env = {**os.environ, "XDG_RUNTIME_DIR": str(self._folder / name), "PACELINE_SPARE": "false"}
        line = [*self._lab.inside(host), sys.executable, "-m", "psserver", *map(str, words)]
        (self._folder / name).mkdir(exist_ok=True)
        out = self._stack.enter_context((self._folder / name / "log").open("a"))
        process = subprocess.Popen(
            line, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=out,
            stdin=subprocess.PIPE,
        )  # fmt: skip
        return self._stack.enter_context(process)

    def _shard(self, index: int, host: int) -> subprocess.Popen[str]:
        name = f"host{host}"
        own = ["--shards", 2, "--shard-index", index, "--cluster", "night", "--lease-s", 60]
        ports = ["--insecure", "--port", 7070, "--metrics-port", 0, "--log-level", "warning"]
        places = ["--host", self._lab.address(host), "--state-dir", self._folder / name / "state"]
        saving = ["--checkpoint-s", 1, "--shard-addresses", self.servers] if host == FIRST else []
        process = self._run(host, name, "start", *own, *ports, *places, *saving)
        self._stack.callback(process.terminate)
        return process

    @property
    def checkpoints(self) -> Path:
        return self._folder / f"host{FIRST}" / "state" / "checkpoints"

    @property
    def servers(self) -> str:
        return f"{self.address(FIRST)},{self.address(OLD)}"

    def begin(self, mode: str) -> None:
        """Starts the workers."""
        for host, process in enumerate(self.shards):
            assert process.stdout is not None
            assert process.stdout.readline().startswith("PACELINE_SERVERS="), self.log(host)
        env = {"WORLD_SIZE": "2", "PACELINE_SERVERS": self.servers, "PACELINE_TIMEOUT_S": "120"}
        env |= {"PACELINE_JOB": "night", "PACELINE_DATA_PLANE": "tcp"}
        for rank, host in enumerate((NEAR, FAR)):
            args = (self._lab.name(host), mode)
            worker = Worker(train, rank, args, env | {"RANK": str(rank)})
            self._stack.callback(worker.close)
            self.workers.append(worker)
        for rank in range(2):
            self.go_on(5, rank)

    def stand(self) -> None:
        """Gives the second shard its standby."""
        words = ["standby", self.address(STANDBY), "--servers", self.address(OLD), "--same-host"]
        own = ["--register", str(self.register), "--failover-s", "1"]
        command = self._run(NEAR, "command", *words, *own)
        assert command.wait() == 0, (self._folder / "command" / "log").read_text()

    def go_on(self, number: int, rank: int) -> None:
        """Waits until a worker has made so many steps from now on."""
        last = self.workers[rank].hear()
        last = max(last, self.told(rank))
        while self.workers[rank].hear() < last + number:
            pass

    def told(self, rank: int) -> int:
        """Returns the last step that a worker has said since it was heard; 0: none."""
        worker, last = self.workers[rank], 0
        while select.select([worker], [], [], 0)[0]:
            last = worker.hear()
        return last

    def cut(self, sender: int, receiver: int) -> None:
        """Drops packets in one direction."""
        self._route("add", sender, receiver)

    def heal(self, sender: int, receiver: int) -> None:
        """Passes them on again."""
        self._route("del", sender, receiver)

    def _route(self, verb: str, sender: int, receiver: int) -> None:
        words = ["route", verb, "blackhole", self._lab.address(receiver)]
        subprocess.run(["ip", "-n", self._lab.name(sender), *words], check=True)

    def hide_register(self, host: int, *, how: str) -> None:
        """Covers the register on a host: it is `gone`, or it is `empty`, as without its mount."""
        place = self.register if how == "empty" else self.register.parent
        self._on_mounts(host, "mount", "-t", "tmpfs", "none", str(place))

    def show_register(self, host: int, *, how: str) -> None:
        """Uncovers it."""
        place = self.register if how == "empty" else self.register.parent
        self._on_mounts(host, "umount", str(place))

    def _on_mounts(self, host: int, *words: str) -> None:
        pid = self.shards[host].pid
        subprocess.run(["nsenter", "-t", str(pid), "-m", *words], check=True)

    def lose(self, host: int) -> None:
        """Kills all processes of a shard's host, and starts an empty one in their place."""
        supervisor = psutil.Process(self.shards[host].pid)
        supervisor.suspend()
        for child in supervisor.children():
            child.kill()
        supervisor.kill()
        self.shards[host].wait()
        (self._folder / f"host{host}" / "state").rename(self._folder / f"lost{host}")
        self.shards[host] = self._shard(1, host)

    def log(self, host: int) -> str:
        return (self._folder / f"host{host}" / "log").read_text()

    def claims(self) -> list[str]:
        return sorted(path.read_text() for path in self.register.glob("*.claim"))

    def results(self) -> list[list[float]]:
        for worker in self.workers:
            worker.tell()
        for worker in self.workers:
            while worker.hear():
                pass
        for worker in self.workers:
            worker.tell()
        return [worker.result() for worker in self.workers]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if (reason := netlab.available()) is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    with netlab.Lab(5, "1gbit") as lab, ExitStack() as stack:
        yield Hosts(lab, tmp_path, stack)


BOTH = ((OLD, STANDBY), (STANDBY, OLD))
CUTS = {
    "both ways, and from the register": (BOTH, "gone"),
    "to the standby, with a register that is not mounted": (BOTH[:1], "empty"),
    "from the standby": (BOTH[1:], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_a_process_that_is_cut_off_acknowledges_nothing_that_its_standby_lacks(
    name: str, hosts: Hosts
) -> None:
    """One worker reaches only the old process; the other one the new one, or both."""
    cuts, how = CUTS[name]
    cuts = (*cuts, (NEAR, STANDBY), (STANDBY, NEAR))
    hosts.begin("asgd")
    hosts.stand()
    if how:
        hosts.hide_register(OLD, how=how)
        cuts = (*cuts, (FAR, OLD), (OLD, FAR))
    for ends in cuts:
        hosts.cut(*ends)
    eventually(lambda: len(hosts.claims()) == 3)
    hosts.go_on(20, 1)  # At the standby, or at the old process, which has claimed the shard alone.
    if how:  # The old process has noticed it, and does not go on alone with the other worker.
        asks, first = "neither standby nor register", 0

        def has_gone_on() -> bool:
            nonlocal first
            now = hosts.told(0)
            first = first or now
            return now >= first + 5 > 5  # A step or two may have been told late.

        eventually(lambda: asks in hosts.log(OLD) or has_gone_on())
    for ends in cuts:
        hosts.heal(*ends)
    if how:
        hosts.show_register(OLD, how=how)
    hosts.go_on(20, 0)
    (near, *by_near), (far, *by_far) = hosts.results()
    assert by_near == by_far == [near, near, far, far]


@pytest.mark.slow
def test_a_job_is_not_set_back_where_nobody_has_heard_of_the_standby_that_has_it(
    hosts: Hosts,
) -> None:
    """The host that restores lost jobs is cut off from the shard until all is over."""
    hosts.begin("asgd")
    eventually(lambda: any(hosts.checkpoints.glob("night-*")))
    cuts = ((FIRST, OLD), (OLD, FIRST))
    for ends in cuts:
        hosts.cut(*ends)
    hosts.stand()  # Once the shard takes that host for gone.
    hosts.lose(OLD)
    for rank in range(2):
        hosts.go_on(20, rank)
    for ends in cuts:
        hosts.heal(*ends)
    eventually(lambda: "workers reach it elsewhere" in hosts.log(FIRST))
    for rank in range(2):
        hosts.go_on(20, rank)
    (near, *by_near), (far, *by_far) = hosts.results()
    assert by_near == by_far == [near, near, far, far]
