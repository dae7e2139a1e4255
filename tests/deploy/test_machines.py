"""The commands of docs/machines.md and docs/running.md as printed, in network namespaces."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.printed import commands
from tests.deploy.shells import FIRST, HOSTS, SECOND, Shell, two_hosts
from tests.house.source import ROOT

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="only root makes a network namespace"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2"),
]
PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
SCRIPT = """
import os, sys, torch, psworker

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
)
first = optimizer.steps
while optimizer.steps < int(os.environ.get("STEPS", "20")):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)) ** 2).mean().backward()
    optimizer.step()
local = os.environ.get("LOCAL_RANK", "none")
rank, size = psworker.rank(), psworker.size()
# In one piece: torchrun's workers have no buffer.
sys.stdout.write(f"rank {rank} of {size} local {local} from {first}\\n")
"""


def blocks() -> list[tuple[list[str], str]]:
    """Returns the page's commands, with the hosts that each block is for."""
    found = re.findall(r"^```bash\n# on (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == len(re.findall("^```bash$", PAGE, re.MULTILINE))  # Each names its host.
    return [(list(HOSTS) if where == "each" else [where], commands) for where, commands in found]


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[dict[str, Shell]]:
    with two_hosts(tmp_path) as made:
        for shell in made.values():
            (shell.folder / "train.py").write_text(SCRIPT)
        yield made


def test_the_commands_of_the_page_train_on_both_hosts(shells: dict[str, Shell]) -> None:
    said: dict[str, str] = {}
    pending: list[tuple[str, subprocess.Popen[str]]] = []

    def finish() -> None:
        while pending:
            host, running = pending.pop(0)
            text = running.communicate()[0]
            said[host] = said.get(host, "") + text
            assert running.returncode == 0, text

    for hosts, lines in blocks():
        if "psworker run" not in lines:
            finish()  # Both hosts train at the same time.
        if "psserver stop" in lines:
            differ, come_and_go = re.findall("`([^`]*psworker run [^`]* train.py)`", PAGE)
            check_machines_that_differ(shells, differ)
            check_machines_that_come_and_go(shells, come_and_go)
        pending += [(host, shells[host].start(lines)) for host in hosts]
        if "psworker run" not in lines:
            finish()
        if "psserver certs" in lines:  # As the page says, with its modes.
            copied = shells[SECOND].folder / "secrets"
            shutil.copytree(shells[FIRST].folder / "secrets", copied)
    finish()
    for number, host in enumerate(HOSTS):
        for local in range(2):
            assert f"rank {2 * number + local} of 4 local {local}" in said[host]
    assert f"stopped {FIRST}:7070, {SECOND}:7070" in said[FIRST]
    # The job `night` was interrupted; the stop took a last checkpoint of it.
    saved = shells[FIRST].folder / "state" / "checkpoints"
    assert list(saved.glob("night-*/manifest.json"))
    done = shells[FIRST].run("psserver status")
    assert "nothing answers" in done[1]


def test_a_lost_machine_without_its_folder(shells: dict[str, Shell]) -> None:
    """By the row of the page, with a machine in place of the lost one."""
    (row,) = re.findall(r"^\| a machine is lost .*", PAGE, re.MULTILINE)
    (stop,) = re.findall("`(psserver stop .*?)`", row)
    (option,) = re.findall("`(--state-dir .*?)`", row)
    (restore,) = re.findall("`(psserver restore .*?)`", row)
    (night,) = re.findall("`(psworker run --elastic [^`]* train.py)`", PAGE)
    first, second = shells[FIRST], shells[SECOND]
    for shell in (first, second):  # A model of which each shard has a part.
        (shell.folder / "train.py").write_text(SCRIPT.replace("Linear(4, 1)", "Linear(4, 8192)"))
    first.exports.append("export PACELINE_CHECKPOINT_S=1")
    start_shards(shells)
    training = first.start(f"PACELINE_TIMEOUT_S=2 STEPS=1000000 exec {night}")
    await_workers(first, "night", 2)
    saved = first.folder / "state" / "checkpoints"
    wait("a checkpoint of a step", lambda: any(map(version, saved.glob("night-*/manifest.json"))))
    pids = subprocess.check_output(["ip", "netns", "pids", second.inside[-1]], text=True).split()
    assert pids
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(second.folder / "state")
    said = training.communicate()[0]
    assert training.returncode != 0, said
    assert f"{SECOND}:7070" in said
    for command in (stop, restore):
        code, said = first.run(command)
        assert code == 0, said
        if command == stop:
            start_shards(shells, option)
    code, said = first.run("psserver status --json 2>/dev/null")
    (job,) = json.loads(said)["jobs"]
    assert job["step"] > 0
    code, said = second.run(f"STEPS={job['step'] + 50} {night}")
    assert code == 0, said
    begun = [int(step) for step in re.findall(r"from (\d+)", said)]
    assert len(begun) == 2
    assert min(begun) == job["step"]  # The other one may have joined some steps later.


def start_shards(shells: dict[str, Shell], option: str = "") -> None:
    """Runs the page's commands before those that train, again with another option for state."""
    for hosts, lines in blocks():
        if "psworker run" in lines:
            return
        if option and "psserver certs" in lines:
            continue
        again = lines.replace("--state-dir state", option or "--state-dir state")
        pending = [shells[host].start(again) for host in hosts]
        for each in pending:
            said = each.communicate()[0]
            assert each.returncode == 0, said
        if "psserver certs" in lines:  # As the page says, with its modes.
            copied = shells[SECOND].folder / "secrets"
            shutil.copytree(shells[FIRST].folder / "secrets", copied)


def check_machines_that_differ(shells: dict[str, Shell], command: str) -> None:
    """Two workers on the first host, and one on the second by the page's command."""
    first = command.replace("RANK=2", "RANK=0").replace("--workers 1", "--workers 2")
    assert first != command
    running = [shells[FIRST].start(first), shells[SECOND].start(command)]
    said = "".join(each.communicate()[0] for each in running)
    assert [each.returncode for each in running] == [0, 0], said
    assert sorted(re.findall(r"rank (\d) of 3", said)) == ["0", "1", "2"]


def check_machines_that_come_and_go(shells: dict[str, Shell], command: str) -> None:
    """The second host joins while the first trains, and trains on when that one has left."""
    shell = shells[SECOND]
    running = []
    for host, count in ((FIRST, 2), (SECOND, 4)):
        running.append(shells[host].start(f"STEPS=1000000 exec {command}"))
        await_workers(shell, "night", count)
    for process, count in zip(running, (2, 0), strict=True):
        process.terminate()
        process.communicate()
        await_workers(shell, "night", count)


def await_workers(shell: Shell, job: str, count: int) -> None:
    wait(f"{count} workers", lambda: live(shell, job) == count)


def version(manifest: Path) -> int:
    """Returns the step of a checkpoint; the first one may have the weights before any step."""
    return int(json.loads(manifest.read_text())["tables"][0]["version"])


def live(shell: Shell, job: str) -> int:
    """Returns the number of a job's workers, or of all, that have made a step and not left."""
    only = f"--job {job}" if job else ""
    code, said = shell.run(f"psserver status --json {only} 2>/dev/null")
    jobs = json.loads(said)["jobs"] if code == 0 else []
    return sum(it["state"] == "live" and it["step"] > 0 for each in jobs for it in each["workers"])


def wait(what: str, is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + 300  # Against a hang.
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.3)


def test_the_commands_of_one_machine(shells: dict[str, Shell]) -> None:
    """Those of docs/running.md; the shards are stopped after the checkpoint, not before it."""
    shell = shells[FIRST]
    train, start = commands("running.md", "Start")
    status, dashboard, top, stop = commands("running.md", "Watch and stop")[0].splitlines()
    (keep,) = commands("running.md", "Checkpoints")
    code, said = shell.run(train)
    assert code == 0, said
    ranks = sorted(re.findall(r"rank (\d of \d)", said))
    assert ranks == ["0 of 1", "0 of 2", "0 of 2", "1 of 2", "1 of 2"]
    code, said = shell.run(start)
    assert code == 0, said
    shell.exports.append("export " + re.findall(r"PACELINE_SERVERS=\S+", start)[0])
    assert shell.exports[-1].split()[1] in said
    running = [shell.start("STEPS=1000000 exec psworker run --workers 2 -- train.py")]
    await_workers(shell, "", 2)
    code, said = shell.run(keep + status)
    assert code == 0, said
    assert "again" in said
    top = f"script --quiet --command '{top}' /dev/null"  # It needs a terminal.
    for page, word in ((dashboard, "8090"), (top, "run-")):
        running.append(shell.start(f"TERM=xterm COLUMNS=100 LINES=40 exec {page}"))
        assert running[-1].stdout is not None
        shown = ""
        while word not in shown:
            shown += (line := running[-1].stdout.readline())
            assert line, (page, shown)
    assert shell.run(
        "python -c 'import urllib.request as r; r.urlopen(\"http://127.0.0.1:8090\")'"
    ) == (0, "")
    for process in running:
        process.terminate()
        process.communicate()
    code, said = shell.run("psworker run --workers 2 --job again -- train.py")
    assert code == 0, said
    assert {int(step) > 0 for step in re.findall(r"from (\d+)", said)} == {True}
    load = "import safetensors.torch as it; print(it.load_file('model.safetensors').keys())"
    code, said = shell.run(f'python -c "{load}"')
    assert "weight" in said, said
    code, said = shell.run(stop)
    assert code == 0, said


def test_a_shard_that_listens_on_loopback_says_so_where_it_cannot_be_reached(
    shells: dict[str, Shell],
) -> None:
    code, said = shells[FIRST].run("psserver start --detach")
    assert code == 0, said
    assert "only this machine reaches the shards; for others: --host ADDRESS" in said
    here, there = shells[FIRST], shells[SECOND]
    known = "the server on port 7070 of this machine listens on loopback only"
    guessed = "no shard runs there, or it listens on loopback only"
    address = f"PACELINE_SERVERS={FIRST}:7070"
    worker = f"{address} PACELINE_TIMEOUT_S=1 psworker run --nnodes 2 --node-rank"
    for shell, number, text in ((here, 0, known), (there, 1, guessed)):
        for command in (
            f"{address} psserver status",
            f"{address} psworker doctor",
            f"{worker} {number} --workers 1 -- train.py",
        ):
            code, said = shell.run(f"COLUMNS=300 {command}")
            assert code != 0
            assert text in said, (command, said)
            assert f"psserver start --host {FIRST}" in said
    code, said = here.run("COLUMNS=300 psserver doctor")
    assert code == 0, said
    assert "on loopback only: for workers on other machines start it with --host" in said


def test_a_worker_never_trains_alone_by_accident(shells: dict[str, Shell]) -> None:
    """The commands of the second host, with the mistakes that users make."""
    shell = shells[SECOND]
    variables = "PACELINE_NUM_WORKERS=2 PACELINE_RANK=1"
    hasty = "PACELINE_TIMEOUT_S=1 python train.py"
    for command, message in (
        (f"{variables} psworker run --workers 1 -- train.py", "no server address is given"),
        ("WORLD_SIZE=2 RANK=1 psworker run -- train.py", "--nnodes 2 --node-rank 1"),
        ("PACELINE_NUM_WORKERS=2 psworker run -- train.py", "would start here"),
        ("PACELINE_SERVERS=http://10.0.0.1:7070 psworker run -- train.py", "leave out 'http://'"),
        ("PACELINE_SERVERS='a:1;b:1' psserver status", "separate addresses with commas"),
        ("PACELINE_SERVERS=10.0.0.1 python train.py", "the port is missing"),
        ("PACELINE_SERVERS=10.0.0.1:70700 psworker doctor", "ports are 1 to 65535"),
        (f"PACELINE_SERVERS=10.0.0.9:7070 {hasty}", "does not answer there, not even to refuse"),
        (f"PACELINE_SERVERS=nowhere:7070 {hasty}", "'nowhere' is not the name of a known host"),
    ):
        code, said = shell.run(f"COLUMNS=300 {command}")
        assert code != 0, command
        assert message in said, (command, said)
        assert "rank 0 of 1" not in said
