"""deploy/systemd in a booted machine: start, kill -9, the watchdog, a restart of the machine."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.deploy import booted

# Its data are drawn from the step: a run that continues sees those of an undisturbed one.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import psworker

WORK = Path("/opt/work")

def make():
    model = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def backward(model, step):
    torch.manual_seed(step)
    x = torch.randn(16, 8)
    ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()

model, inner = make()
optimizer = psworker.DistributedOptimizer(inner, named_parameters=model.named_parameters())
print("begins at step", optimizer.steps, flush=True)
while not (WORK / "last").exists():
    optimizer.zero_grad()
    backward(model, optimizer.steps)
    optimizer.step()
    time.sleep(0.05)
    if (WORK / "enough").exists():
        os._exit(7)  # Without a goodbye: the job is interrupted, not ended.
plain, its = make()
for step in range(optimizer.steps):
    its.zero_grad()
    backward(plain, step)
    its.step()
torch.testing.assert_close(model.weight, plain.weight, rtol=1e-5, atol=1e-6)
print("ends at step", optimizer.steps, flush=True)
"""
pytestmark = [
    pytest.mark.skipif(
        shutil.which("systemd-nspawn") is None or not Path("/lib/systemd/systemd").exists(),
        reason="no systemd to boot: apt-get install systemd systemd-container",
    ),
    pytest.mark.skipif(os.getuid() != 0, reason="only root boots a container"),
    pytest.mark.timeout(1800),
]


def test_units_live_through_kills_a_hanging_shard_and_a_restart_of_the_machine(
    tmp_path: Path,
) -> None:
    files = tmp_path / "files"
    work = files / "work"
    work.mkdir(parents=True)
    booted.install(files)
    shutil.copy(Path(__file__).parent / "inside.py", work / "inside.py")
    (work / "train.py").write_text(SCRIPT)
    log = booted.boot_twice(files)
    found = json.loads((work / "found.json").read_text())
    said = (work / "worker.log").read_text() if (work / "worker.log").exists() else ""
    assert "problem" not in found, f"{found}\n{said}\n{log[-6000:]}"
    assert found["commands"][0] == 0, found["commands"][1]
    assert found["without files"][:2] == ["inactive", "0"]
    assert "Assertion failed" in found["without files"][2]
    assert found["wrong number"][:2] == ["failed", "0"]
    assert "shard_index is 7, must be in 0..1 for 2 shards" in found["wrong number"][2]
    assert found["active"] == ["active", "active"]
    assert "1 shard(s) ready at 127.0.0.1:7070" in found["text"][0]
    assert found["user"] > 60000  # A dynamic user.
    assert set(found["capabilities"]) == {"0000000000000000"}
    assert found["after a shard"] == [0, 0]  # Its supervisor has started it again.
    assert found["after a supervisor"] == [1, 0]
    assert found["watchdog"]
    assert set(found["moves"]) == {True}
    assert (found["worker"], found["second worker"]) == (7, 0), said
    assert found["step after the boot"] == found["step"] > 0
    assert found["results"] == ["success", "success"]
    last = int(said.rpartition("ends at step ")[2].split()[0])
    # Both units were stopped at once: by the end of the machine, and by the page's command.
    assert {found["step"], last} <= set(found["saved"])
    assert f"begins at step {found['step']}" in said
