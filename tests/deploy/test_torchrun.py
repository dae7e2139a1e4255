"""torchrun with a worker that is killed, and with a host that is lost, on real shards."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from scripts.printed import commands
from tests.deploy.plain import WORKERS, train_plain
from tests.deploy.shells import FIRST, SECOND, two_hosts
from tests.integration.cluster import Shards, clean_environment

STEPS = 1500
PORT = 24971  # Of torchrun's own store.
SCRIPT = """
import torch, psworker

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9), model.named_parameters()
)
print(f"rank {psworker.rank()} begins at step {optimizer.steps}", flush=True)
while optimizer.steps < STEPS:
    data = torch.Generator().manual_seed(1000 * optimizer.steps + psworker.rank())
    x = torch.randn(16, 8, generator=data)
    if optimizer.steps % 100 == 0:
        print(f"rank {psworker.rank()} is at step {optimizer.steps}", flush=True)
    optimizer.zero_grad()
    ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean().backward()
    optimizer.step()
with optimizer.global_weights():
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    loss = ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean()
print(f"rank {psworker.rank()} ends with loss {loss.item():.8f}", flush=True)
"""

pytestmark = pytest.mark.timeout(1200)


class Agent:
    """One torchrun, the agent of a host, with its workers."""

    def __init__(
        self,
        folder: Path,
        name: str,
        environment: dict[str, str],
        *options: str,
        steps: int = STEPS,
    ) -> None:
        script = folder / "train.py"
        script.write_text(SCRIPT.replace("STEPS", str(steps)))
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, str(script)],
                env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def workers(self) -> list[psutil.Process]:
        """Returns its workers in the order of their local ranks, which is that of their start."""
        return sorted(self.process.children(), key=lambda it: it.pid)

    def steps(self) -> int:
        """Returns the newest step that one of its workers has reported."""
        return max(map(int, re.findall(r"is at step (\d+)", self.said)), default=0)

    def close(self) -> None:
        """Ends the agent and its workers, which have sessions of their own."""
        if self.process.is_running():
            for process in (self.process, *self.process.children(recursive=True)):
                process.kill()
        self.process.wait()


def wait(agent: Agent, what: str, is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 400
    while not is_so():
        assert time.monotonic() < end_s, f"{what}: {agent.said[-3000:]}"
        assert agent.process.poll() is None, agent.said[-3000:]
        time.sleep(0.1)


@pytest.fixture
def shards() -> Iterator[Shards]:
    running = Shards(2)
    try:
        yield running
    finally:
        running.close()


def environment(shards: Shards, **more: str) -> dict[str, str]:
    return {
        **clean_environment(),
        "PACELINE_SERVERS": shards.servers,
        "OMP_NUM_THREADS": "1",
        **more,
    }


def test_a_gang_that_torchrun_starts_again_continues_at_the_step_of_the_shards(
    shards: Shards, tmp_path: Path
) -> None:
    """No checkpoint is read; the loss is that of a run without a fault.

    Where all are killed when one slice has the step and another has not, the other goes without it.
    """
    options = ("--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "2")
    agent = Agent(tmp_path, "all", environment(shards), *options)
    try:
        wait(agent, "steps", lambda: agent.steps() >= 300)
        os.kill(agent.workers()[1].pid, signal.SIGKILL)
        assert agent.process.wait(600) == 0, agent.said[-3000:]
    finally:
        agent.close()
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", agent.said)]
    assert len(begun) == 2 * WORKERS
    assert min(begun[WORKERS:]) >= 300
    ends = dict(re.findall(r"rank (\d) ends with loss ([\d.]+)", agent.said))
    assert sorted(ends) == ["0", "1"]
    assert ends["0"] == ends["1"]
    assert float(ends["0"]) == pytest.approx(train_plain(STEPS), abs=1e-3)


def test_the_workers_of_other_hosts_train_on_when_a_host_is_lost(
    shards: Shards, tmp_path: Path
) -> None:
    """torchrun starts nobody again: no worker waits for a collective with the lost ones."""
    options = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{PORT}", "--rdzv-id", "lost"),
        *("--rdzv-conf", "is_host={},last_call_timeout=60,keep_alive_interval=1"),
    )
    variables = environment(shards, PACELINE_MIN_WORKERS="1", PACELINE_MAX_WORKERS="2")
    first, second = (
        Agent(tmp_path, name, variables, *(word.format(is_host) for word in options))
        for name, is_host in (("first", "true"), ("second", "false"))
    )
    try:
        for agent in (first, second):
            wait(agent, "steps", lambda agent=agent: agent.steps() >= 200)  # type: ignore[misc]
        for process in (second.process, *second.workers()):
            process.kill()
        # Then torchrun waits for the lost agent, 300 s long; the worker does not.
        wait(first, "the end", lambda: re.search(r"ends with loss 0\.\d+", first.said) is not None)
        wait(first, "the end of the worker", lambda: not first.workers())
    finally:
        first.close()
        second.close()
    assert len(re.findall(r"begins at step \d+", first.said)) == 1  # It was not started again.


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes a network namespace")
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
def test_the_commands_of_the_page_train_on_two_hosts(tmp_path: Path) -> None:
    """As printed, but for one worker a host instead of eight."""
    shards, workers = commands("torchrun.md")
    assert "--nproc-per-node 8" in workers
    with two_hosts(tmp_path) as shells:
        code, said = shells[FIRST].run(shards)
        assert code == 0, said
        assert f"PACELINE_SERVERS={FIRST}:7070,{FIRST}:7071" in said
        secrets = shells[FIRST].folder / "secrets"
        there = shells[SECOND].folder / "secrets"
        there.mkdir(mode=0o700)
        for name in ("ca.pem", "client.pem", "client.key", "token"):
            shutil.copy2(secrets / name, there)
        for shell in shells.values():
            (shell.folder / "train.py").write_text(SCRIPT.replace("STEPS", "20"))
        lines = workers.replace("--nproc-per-node 8", "--nproc-per-node 1")
        running = [shell.start(lines) for shell in shells.values()]
        said = "".join(each.communicate()[0] for each in running)
        assert [each.returncode for each in running] == [0, 0], said
        assert sorted(re.findall(r"rank (\d) ends", said)) == ["0", "1"]


def test_a_host_joins_with_a_torchrun_of_its_own(shards: Shards, tmp_path: Path) -> None:
    """The commands of docs/torchrun.md; with a common rendezvous torchrun would end both hosts."""
    (block,) = commands("torchrun.md", "Hosts that come and go")
    variables = dict(re.findall(r"(PACELINE_\w+)=(\S+)", block))
    (line,) = re.findall(r"^torchrun (.+) train.py$", block, re.M)
    options = line.replace("--nproc-per-node 8", "--nproc-per-node 1").split()
    variables = environment(shards, **variables)
    first = Agent(
        tmp_path, "first", variables, *options, steps=1_000_000
    )  # Until the test ends it.
    try:
        wait(first, "steps", lambda: first.steps() >= 200)
        second = Agent(tmp_path, "second", variables, *options, steps=1_000_000)
        try:
            wait(second, "steps of the new host", lambda: second.said.count("is at step") > 1)
            at = first.steps()
            wait(first, "steps of the first host", lambda: first.steps() > at)
        finally:
            second.close()
    finally:
        first.close()
    assert len(re.findall(r"begins at step \d+", first.said)) == 1  # It was not started again.
    (step,) = re.findall(r"begins at step (\d+)", second.said)
    assert int(step) >= 200, second.said
