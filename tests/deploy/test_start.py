"""The commands of docs/start.md, one after the other in one shell, in a network of their own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="only root makes a network namespace"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare"),
]
PID = "24167"  # On the page, of shard 1.
FIND = (
    "$(psserver status --json | "
    'python -c \'import json, sys; print(json.load(sys.stdin)["shards"][1]["pid"])\')'
)
# For the pause of the page, which is short on a machine at its limit.
AWAIT = """until psserver status --job second --json | grep -E '"step": *[1-9]'; do sleep 1; done"""


def test_every_command_works_and_training_continues_after_the_kill(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    install, *blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert install.startswith("make setup")
    assert f"kill -9 {PID}" in "".join(blocks)
    assert "\nsleep 8\n" in "".join(blocks)
    printed = "".join(blocks).replace(PID, FIND).replace("sleep 8", AWAIT)
    script = f"set -e\nip link set lo up\n{printed}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(tmp_path),
        "PACELINE_TIMEOUT_S": "600",  # At a load of 10 a shard is not back within 30 s.
    }
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", script],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    accuracies = re.findall(r"test: accuracy ([\d.]+)", done.stdout)
    assert len(accuracies) == 2 * (2 + 20), done.stdout[-3000:] + done.stderr[-3000:]
    assert min(map(float, accuracies[-2:])) > 0.8
    for line in ("shard died; it is started again", "job continues where it was job=second"):
        assert line in done.stdout, done.stdout[-4000:]
    assert "stopped 127.0.0.1:7070, 127.0.0.1:7071" in done.stdout
