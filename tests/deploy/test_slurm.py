"""deploy/slurm/train.sbatch on a real Slurm: it trains through a requeue, and leaves nothing."""

import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch

from tests.deploy.slurm import DAEMONS, Slurm
from tests.house.source import ROOT

STEPS = 200
WORKERS = 2
# Its data are drawn from step and rank: a run that was requeued sees what an undisturbed one sees.
SCRIPT = f"""
import sys, time
from pathlib import Path
import torch
import psworker

model = torch.nn.Linear(8, 1)
torch.nn.init.constant_(model.weight, 0.1)
torch.nn.init.zeros_(model.bias)
optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
)
print("begins at step", optimizer.steps, flush=True)
while optimizer.steps < {STEPS}:
    torch.manual_seed(1000 * optimizer.steps + psworker.rank())
    x = torch.randn(16, 8)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if optimizer.steps == {STEPS // 4}:
        print("a quarter is done", flush=True)
    time.sleep(0.05)
if psworker.rank() == 0:
    with optimizer.global_weights():
        torch.save(model.state_dict(), sys.argv[1])
print("ends at step", optimizer.steps, flush=True)
"""

pytestmark = [
    pytest.mark.skipif(
        any(shutil.which(daemon) is None for daemon in DAEMONS),
        reason="no Slurm: apt-get install slurmctld slurmd slurm-client munge",
    ),
    pytest.mark.skipif(os.getuid() != 0, reason="only root starts a Slurm"),
]


def plain() -> dict[str, torch.Tensor]:
    """Returns the weights that one process gets with the mean gradient of all workers."""
    model = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORKERS):
            torch.manual_seed(1000 * step + rank)
            x = torch.randn(16, 8)
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            (loss / WORKERS).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.timeout(900)
def test_a_job_is_requeued_in_the_middle_and_ends_like_a_plain_run(tmp_path: Path) -> None:
    script, output, saved = tmp_path / "train.py", tmp_path / "out", tmp_path / "model.pt"
    script.write_text(SCRIPT)
    binaries = ROOT / ".venv" / "bin"
    with Slurm(tmp_path) as slurm:
        variables = f"ALL,PYTHON={binaries / 'python'},PSSERVER={binaries / 'psserver'}"
        words = ["sbatch", "--parsable", f"--ntasks={WORKERS}", f"--output={output}"]
        # Without journals, as on another node after the requeue: only the checkpoint is left.
        variables += ",PACELINE_DURABILITY=memory"
        words += [f"--export={variables},PACELINE_FOLDER={tmp_path / 'job'}"]
        job = slurm.call(
            *words, str(ROOT / "deploy/slurm/train.sbatch"), str(script), str(saved), cwd=tmp_path
        ).strip()
        try:
            slurm.wait("quarter", lambda: text(output).count("a quarter is done") == WORKERS)
            slurm.call("scancel", "--batch", "--signal=USR1", job)
            slurm.wait("end", lambda: slurm.state(job) == "COMPLETED", 600)
        except BaseException as problem:
            logs = [text(path)[-3000:] for path in [output, *(tmp_path / "job").glob("*.log")]]
            raise AssertionError("\n---\n".join(logs)) from problem
    later = [line for line in text(output).splitlines() if "begins at step" in line][WORKERS:]
    assert len(later) == WORKERS
    assert all(STEPS // 4 <= int(line.split()[-1]) < STEPS for line in later)
    weights = torch.load(saved)
    for name, expected in plain().items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)
    left = [
        each.cmdline() for each in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(each))
    ]
    assert [words for words in left if "psserver" in " ".join(words)] == []


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
