"""The commands of docs/machines.md, as printed, on two hosts that are network namespaces."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.shells import FIRST, HOSTS, SECOND, Shell, two_hosts
from tests.house.source import ROOT

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="only root makes a network namespace"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2"),
]
PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
SCRIPT = """
import os, torch, psworker

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
)
while optimizer.steps < 20:
    optimizer.zero_grad()
    (model(torch.ones(2, 4)) ** 2).mean().backward()
    optimizer.step()
print("rank", psworker.rank(), "of", psworker.size(), "local", os.environ["LOCAL_RANK"], flush=True)
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

    for hosts, commands in blocks():
        if "psworker run" not in commands:
            finish()  # Both hosts train at the same time.
        pending += [(host, shells[host].start(commands)) for host in hosts]
        if "psworker run" not in commands:
            finish()
        if "psserver certs" in commands:  # As the page says, with its modes.
            copied = shells[SECOND].folder / "secrets"
            shutil.copytree(shells[FIRST].folder / "secrets", copied)
    finish()
    for number, host in enumerate(HOSTS):
        for local in range(2):
            assert f"rank {2 * number + local} of 4 local {local}" in said[host]
    assert f"stopped {FIRST}:7070, {SECOND}:7070" in said[FIRST]
    done = shells[FIRST].run("psserver status")
    assert "nothing answers" in done[1]


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
    for command, message in (
        (f"{variables} psworker run --workers 1 -- train.py", "no server address is given"),
        ("WORLD_SIZE=2 RANK=1 psworker run -- train.py", "--nnodes 2 --node-rank 1"),
        ("PACELINE_NUM_WORKERS=2 psworker run -- train.py", "would start here"),
        ("PACELINE_SERVERS=http://10.0.0.1:7070 psworker run -- train.py", "leave out 'http://'"),
        ("PACELINE_SERVERS='a:1;b:1' psserver status", "separate addresses with commas"),
        ("PACELINE_SERVERS=10.0.0.1 python train.py", "the port is missing"),
        ("PACELINE_SERVERS=10.0.0.1:70700 psworker doctor", "ports are 1 to 65535"),
    ):
        code, said = shell.run(f"COLUMNS=300 {command}")
        assert code != 0, command
        assert message in said, (command, said)
        assert "rank 0 of 1" not in said
