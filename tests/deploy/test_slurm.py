"""deploy/slurm/train.sbatch on a real Slurm of two nodes: requeues, preemption, an array."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from scripts.printed import commands
from tests.deploy.slurm import DAEMONS, Slurm
from tests.house.source import ROOT

STEPS = 200
PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
STANDBY_PAGE = (ROOT / "docs" / "standby.md").read_text(encoding="utf-8")
WORKERS = 2
# Its data are drawn from step and rank: a run that was requeued sees what an undisturbed one sees.
SCRIPT = f"""
import os, sys, time
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
held = "always" in sys.argv or "once" in sys.argv and "SLURM_RESTART_COUNT" not in os.environ
while optimizer.steps < {STEPS}:
    while held and optimizer.steps >= {STEPS // 4}:
        time.sleep(0.1)
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
        any(shutil.which(daemon) is None for daemon in (*DAEMONS, "ip", "nsenter")),
        reason="no Slurm: apt-get install slurmctld slurmd slurm-client munge iproute2",
    ),
    pytest.mark.skipif(os.getuid() != 0, reason="only root starts a Slurm"),
    pytest.mark.timeout(1800),
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


@dataclass
class Training:
    """A job of SCRIPT on both nodes, one worker each."""

    slurm: Slurm
    folder: Path
    job: str = ""
    held: str = "once"  # At a quarter: `once`, until Slurm starts the job again, or `always`.
    sbatch: Path = ROOT / "deploy" / "slurm" / "train.sbatch"
    output: Path = field(init=False)
    saved: Path = field(init=False)

    def __post_init__(self) -> None:
        self.output, self.saved = self.folder / "out", self.folder / "model.pt"

    def submit(self, *options: str, **variables: str) -> None:
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        exported = ",".join(f"{name}={value}" for name, value in variables.items())
        words = ["sbatch", "--parsable", "--nodes=2", f"--ntasks={WORKERS}", *options]
        words += [f"--output={self.output}", f"--export=ALL,{exported}"]
        words += [str(self.sbatch), str(script), str(self.saved), self.held]
        self.job = self.slurm.call(*words, cwd=self.folder).strip()

    def wait(self, what: str, word: str, count: int = WORKERS) -> None:
        """Waits until the output has a word so often; or, without one, until the job has ended."""
        try:
            if word:
                self.slurm.wait(what, lambda: text(self.output).count(word) >= count)
            else:
                self.slurm.wait(what, lambda: self.slurm.state(self.job) == "COMPLETED")
        except BaseException as problem:
            paths = [self.output, *self.folder.glob("paceline-*/*.log")]
            logs = [f"{path}\n{text(path)[-3000:]}" for path in paths]
            shown = self.slurm.call("scontrol", "show", "job", self.job)
            raise AssertionError("\n---\n".join([*logs, shown])) from problem

    def call(self, event: str) -> None:
        """Runs the page's command for an event: the first one of its row that names the job."""
        (row,) = re.findall(rf"^\| {re.escape(event)} \|.*$", PAGE, re.MULTILINE)
        command = next(it for it in re.findall("`(.*?)`", row) if "JOBID" in it)
        self.slurm.call(*command.replace("JOBID", self.job).split())

    def hasten(self) -> None:
        """Starts a requeued job now: Slurm would leave two minutes between two starts."""
        self.slurm.wait("the requeue", lambda: self.slurm.state(self.job) == "PENDING")
        self.slurm.call("scontrol", "update", f"jobid={self.job}", "starttime=now")

    def check(self, num_starts: int = 2) -> None:
        """Checks that it continued at its step, ended like a plain run, and left no process."""
        later = [line for line in text(self.output).splitlines() if "begins at step" in line]
        assert len(later) == num_starts * WORKERS
        assert all(STEPS // 4 <= int(line.split()[-1]) < STEPS for line in later[WORKERS:])
        weights = torch.load(self.saved)
        for name, expected in plain().items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)
        self.slurm.wait("end of all processes", lambda: not left_over(self.folder))


def saved_step(training: Training) -> int:
    """Returns the step of the newest checkpoint; 0 before the first one."""
    files = training.folder.glob("paceline-*/shard-0/checkpoints/*/manifest.json")
    return max((json.loads(text(it))["tables"][0]["version"] for it in files), default=0)


def left_over(folder: Path) -> list[str]:
    lines = [" ".join(cmdline(each)) for each in psutil.process_iter()]
    return [line for line in lines if str(folder) in line and "psserver" in line]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with environment(), Slurm(tmp_path) as running:
        yield running


@contextmanager
def environment() -> Iterator[None]:
    """Finds python and psserver as a user's environment would."""
    former = os.environ["PATH"]
    os.environ["PATH"] = f"{ROOT / '.venv' / 'bin'}:{former}"
    try:
        yield
    finally:
        os.environ["PATH"] = former


@pytest.fixture
def training(slurm: Slurm, tmp_path: Path) -> Training:
    return Training(slurm, tmp_path)


def test_a_job_is_requeued_in_the_middle_and_ends_like_a_plain_run(training: Training) -> None:
    """Without journals, as on other nodes after the requeue: only the checkpoint is left."""
    training.submit(PACELINE_DURABILITY="memory")
    training.wait("a quarter", "a quarter is done")
    training.call("the same by hand")
    training.hasten()
    training.wait("end", "")
    training.check()


def test_a_job_whose_node_crashes_continues_when_slurm_starts_it_again(
    training: Training,
) -> None:
    """The shard of that node has only the newest checkpoint, the other one its journal too."""
    slurm = training.slurm
    training.submit(CHECKPOINT_S="2")
    training.wait("a quarter", "a quarter is done")
    slurm.wait("a checkpoint", lambda: saved_step(training) >= STEPS // 4)
    slurm.lose("node2")
    slurm.wait("the requeue", lambda: slurm.state(training.job) == "PENDING")
    slurm.start("node2")
    training.hasten()
    training.wait("end", "")
    (log,) = training.folder.glob("paceline-*/shard-0.log")
    assert text(log).count("all go back to its newest checkpoint") <= 1
    training.check()


def test_a_job_that_is_preempted_with_notice_continues(training: Training) -> None:
    training.submit("--exclusive", "--time=30")
    training.wait("a quarter", "a quarter is done")
    words = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    other = training.slurm.call("sbatch", "--parsable", *words, "--wrap=sleep 1").strip()
    training.slurm.wait("the urgent job", lambda: training.slurm.state(other) == "COMPLETED")
    training.hasten()
    training.wait("end", "")
    assert "preempted at" in text(training.output)
    training.check()


def test_a_step_on_a_part_of_the_nodes_whose_cancellation_fails(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm 22.05 answers 225 for such a step, although the signal arrives."""
    programs = training.folder / "bin"
    programs.mkdir()
    wrapper, said = programs / "scancel", training.folder / "said"
    wrapper.write_text(
        f'#!/bin/sh\n{shutil.which("scancel")} "$@"\nstatus=$?\n'
        f'case "$*" in *TERM*.*) echo "$* $status" >> {said}; exit 225;; esac\nexit $status\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    text_of = training.sbatch.read_text()
    assert text_of.count("WORKERS=${SLURM_NTASKS") == 1
    training.sbatch = training.folder / "train.sbatch"
    training.sbatch.write_text(re.sub(r"^WORKERS=.*$", "WORKERS=1", text_of, flags=re.MULTILINE))
    training.submit(PACELINE_DURABILITY="memory")
    training.wait("a quarter", "a quarter is done", 1)
    training.call("the same by hand")
    training.hasten()
    training.wait("end", "")
    assert len(text(said).splitlines()) == 1
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", text(training.output))]
    assert len(begun) == 2
    assert begun[1] >= STEPS // 4


def test_a_job_of_one_worker_continues_from_its_checkpoint(training: Training) -> None:
    training.submit("--nodes=1", "--ntasks=1", SHARDS="3", PACELINE_DURABILITY="memory")
    training.wait("a quarter", "a quarter is done", 1)
    training.call("the same by hand")
    training.hasten()
    training.wait("end", "")
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", text(training.output))]
    assert len(begun) == 2
    assert begun[1] >= STEPS // 4


def test_a_job_that_is_cancelled_continues_in_another_one_on_three_shards(
    training: Training,
) -> None:
    """From the last checkpoint: the job is younger than the time to the first scheduled one."""
    training.held = "always"
    training.submit()
    training.wait("a quarter", "a quarter is done")
    former = training.job
    folder = training.folder / f"paceline-{former}"
    refused = Training(training.slurm, training.folder)
    refused.output = training.folder / "refused"
    token = (folder / "certs" / "token").read_text()
    refused.submit(PACELINE_FOLDER=str(folder))
    training.slurm.wait("the refusal", lambda: training.slurm.state(refused.job) == "FAILED")
    assert text(refused.output).startswith(f"job {former} uses {folder}: end it (scancel {former})")
    assert (folder / "certs" / "token").read_text() == token
    training.call("stop")
    training.slurm.wait("end of all processes", lambda: not left_over(training.folder))
    training.held = "never"
    training.submit(SHARDS="3", PACELINE_FOLDER=str(folder), PACELINE_JOB=f"slurm-{former}")
    training.wait("end", "")
    training.check()


def test_tasks_of_an_array_share_a_node(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ("--array=0-1", "--nodes=1", "--ntasks=1", "--nodelist=node1")
    file = str(ROOT / "deploy/slurm/train.sbatch")
    job = slurm.call(
        *("sbatch", "--parsable", *words, f"--output={tmp_path}/out-%a", file),
        *(str(script), str(tmp_path / "model.pt")),
        cwd=tmp_path,
    ).strip()
    slurm.wait("end", lambda: slurm.call("squeue", "-h", "-j", job).strip() == "")
    outputs = [text(tmp_path / f"out-{index}") for index in range(2)]
    assert all(f"ends at step {STEPS}" in output for output in outputs), "\n".join(outputs)
    used = [re.findall(r"node1:(\d+)", output) for output in outputs]
    assert len({port for ports in used for port in ports}) == 4


def test_the_commands_of_the_page(slurm: Slurm, tmp_path: Path) -> None:
    """`sbatch` with eight workers on two nodes, and status on a login node."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("sys.argv[1]", "'model.pt'"))
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    submit, login = commands("slurm.md")
    said = slurm.call("bash", "-euc", submit.replace("tail -f", "#"), cwd=tmp_path)
    job = re.findall(r"Submitted batch job (\d+)", said)[0]
    output = tmp_path / f"slurm-{job}.out"
    slurm.wait("a quarter", lambda: text(output).count("a quarter is done") == 8)
    ready = login.replace("JOBID", job).replace("psserver dashboard", "psserver status")
    assert f"slurm-{job}" in slurm.call("bash", "-euc", ready, cwd=tmp_path)
    slurm.wait("end", lambda: slurm.state(job) == "COMPLETED")


def test_a_shard_moves_to_its_standby_at_a_signal(slurm: Slurm, tmp_path: Path) -> None:
    """The page's lines in two jobs, one of each place; a third one trains meanwhile."""
    starts = commands("standby.md", "Two places")[0].splitlines()
    (trap,) = re.findall(r"^\| Slurm: .*\| `(trap .*)` \|$", STANDBY_PAGE, re.MULTILINE)
    (tmp_path / "register").mkdir()
    jobs = []
    for node, start in zip(("node1", "node2"), starts, strict=False):
        known = "--shards 1 --shard-index 0 --cluster night --host 0.0.0.0 --insecure"
        lines = f"#!/bin/bash\n{start.partition('#')[0].rstrip()} &\n{trap}\nwait\nwait\n"
        for name, meant in (
            ("...", f"{known} --state-dir {node}"),
            ("hostB", "node1"),
            ("hostC", "node2"),
        ):
            lines = lines.replace(name, meant)
        script = tmp_path / f"{node}.sbatch"
        script.write_text(lines.replace("/shared/night", f"{tmp_path}/register"))
        words = ("sbatch", "--parsable", f"--nodelist={node}", f"--output={tmp_path}/{node}.out")
        jobs.append(slurm.call(*words, str(script), cwd=tmp_path).strip())
    slurm.wait("a standby", lambda: "has a standby" in text(tmp_path / "node1.out"))
    train = SCRIPT.replace("while held and", "while not os.path.exists('go') and")
    (tmp_path / "train.py").write_text(train)
    exported = "--export=ALL,PACELINE_SERVERS=node1:7070,RANK=0,WORLD_SIZE=1"
    words = ("sbatch", exported, "--nodelist=node2", f"--output={tmp_path}/out")
    slurm.call(*words, "--wrap=python train.py model.pt never", cwd=tmp_path)
    slurm.wait("a quarter", lambda: "a quarter is done" in text(tmp_path / "out"))
    slurm.call("scancel", "--batch", "--signal=USR1", jobs[0])
    slurm.wait("the end of the first place", lambda: slurm.state(jobs[0]) == "COMPLETED")
    assert "shard moved to node2:7070" in text(tmp_path / "node1.out")
    (tmp_path / "go").touch()
    slurm.wait("the last step", lambda: f"ends at step {STEPS}" in text(tmp_path / "out"))


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
