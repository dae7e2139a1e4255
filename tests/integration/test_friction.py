"""The commands and scripts as a person meets them in a terminal: ends, sentences, closed pipes."""

import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from psserver.exits import Exit
from tests.integration import warm
from tests.integration.command import Command, eventually, gone, live_shards

KEPT = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "MASTER_"))}
NO_SHARD = {"PACELINE_SERVERS": "127.0.0.1:1", "PACELINE_TIMEOUT_S": "0"}
WAIT_S = 200.0

GROUP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1) * dist.get_rank()
dist.all_reduce(value)
print("sum", value.item())
dist.destroy_process_group()
"""
MUCH = """
import os, sys
for number in range(20_000):
    print("line", number)
open(sys.argv[1] + os.environ["RANK"], "w").close()
"""
TRAIN = """
import torch
import psworker
psworker.print_short_errors()
model = torch.nn.Linear(3, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = psworker.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
print("ready", flush=True)
while True:
    optimizer.step()
"""
FORK = """
import os, sys
import torch
import psworker

model = torch.nn.Linear(3, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = psworker.DistributedOptimizer(sgd, named_parameters=model.named_parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

for _ in range(4):
    step()
if os.fork() == 0:
    for call in (step, psworker.barrier, psworker.init):
        try:
            call()
            os._exit(5)
        except psworker.ConfigError as problem:
            print(problem, flush=True)
    os._exit(0)
_, status = os.wait()
step()
sys.exit(os.waitstatus_to_exitcode(status))
"""
REPORTS = """
import torch
import psworker
psworker.init(job="caf\\u00e9")
model = torch.nn.Linear(3, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = psworker.DistributedOptimizer(sgd, model.named_parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
"""


def psworker(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "psworker", *map(str, arguments)]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=KEPT | environment, capture_output=True, text=True, timeout=WAIT_S
    )


def test_a_script_makes_a_process_group_of_torch(tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    command = ["-m", "psworker", "run", "-n", 2, "--servers", "127.0.0.1:1", "--", script]
    # The variables of a surrounding launch name another group.
    foreign = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    done = warm.run(command, env=KEPT | foreign, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] sum 1.0", "[1] sum 1.0"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["broken", "closed"])
def test_workers_continue_when_nobody_reads_what_they_print(tmp_path: Path, how: str) -> None:
    script = tmp_path / "much.py"
    script.write_text(MUCH)
    words = psworker("run", "-n", 2, "--servers", "127.0.0.1:1", "--", script, tmp_path / "end")
    shell = {"broken": '"$@" | head -n 1', "closed": '"$@" >&-'}[how]
    done = run(["bash", "-c", f"set -o pipefail; {shell}", "bash", *words])
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("end*")} == {"end0", "end1"}
    assert "Traceback" not in done.stderr
    told = "standard output accepts no more output"
    assert done.stderr.count(told) == (how == "broken")


def test_a_script_without_a_shard_ends_with_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = warm.run([script], env=KEPT | NO_SHARD, timeout=WAIT_S)
    assert done.returncode == 1
    waits, line = done.stderr.splitlines()
    assert "nothing listens on 127.0.0.1:1; this side waits" in waits
    assert line.startswith("psworker: no shard answers at 127.0.0.1:1")
    assert line.endswith(f"({script}, line 7; PACELINE_DEBUG=1 shows the traceback)")


@pytest.mark.slow
def test_ctrl_c_ends_a_script_with_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with warm.Popen(
        [script], env=KEPT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGINT
    assert f"psworker: interrupted by Ctrl-C ({script}, line " in told
    assert "Traceback" not in told


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException as problem:
    raise ImportError("a part is missing") from problem
"""


SLOW_IMPORT = """
import sys, time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException as problem:
    raise ImportError("a part is missing") from problem
"""


def test_ctrl_c_while_workers_import_torch_gives_a_sentence_each(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "torch"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text(SLOW_IMPORT)
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    with subprocess.Popen(
        psworker("run", "-n", 2, "--servers", "127.0.0.1:1", "--", script),
        env=KEPT | {"PYTHONPATH": str(installed.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {f"[{i}] importing\n" for i in "01"}
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    for rank in range(2):
        assert f"[{rank}] psworker: interrupted by Ctrl-C ({script}, line 1; " in told
    assert "Traceback" not in told
    assert "Error" not in told


def test_ctrl_c_ends_a_command_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(SWALLOWS)
    done = run(psworker("modes"), PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "psworker: interrupted by Ctrl-C\n")
    assert not done.stdout


@pytest.mark.slow
def test_a_forked_child_is_told_that_it_takes_no_part(tmp_path: Path) -> None:
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    done = warm.run([script], env=KEPT, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(" was forked from worker 0 of job 'default' (process " in line for line in lines)


@pytest.mark.slow
def test_the_commands_that_start_prints_work_as_they_stand(tmp_path: Path) -> None:
    psserver = Command(tmp_path)
    words = ("start", "--port", 0, "--detach", "--state-dir", tmp_path / "my state")
    told = psserver.run(*words).stderr
    hints = [
        line.partition(": psserver ")[2] for line in told.splitlines() if ": psserver " in line
    ]
    verbs = [shlex.split(hint) for hint in hints]
    assert sorted(verb[0] for verb in verbs) == ["logs", "status", "stop"]
    for verb in sorted(verbs):  # `stop` comes last.
        shown = psserver.run(*verb).stdout
        assert "ready" in shown or verb[0] != "logs"


@pytest.mark.parametrize("words", ["psserver rules", "psworker modes", "psserver shard -"])
def test_a_deleted_working_directory_is_a_sentence_and_stops_no_shard(
    words: str, tmp_path: Path
) -> None:
    """A shard is started again, or compiles a loop, in the folder of its start."""
    folder = tmp_path / "gone"
    folder.mkdir()
    line = shlex.join([sys.executable, "-P", "-m", *words.split()])
    line = f"cd {shlex.quote(str(folder))} && rmdir ../gone && {line} < /dev/null"
    done = run(["bash", "-c", line])
    if words.endswith("-"):
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == Exit.USAGE
        assert "the working directory was deleted: change to another one" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_file_that_is_no_certificate_is_one_sentence(tmp_path: Path) -> None:
    """gRPC's own lines came first."""
    (tmp_path / "ca.pem").write_text("no certificate")
    done = run(
        [sys.executable, "-m", "psserver", "status", "--servers", "127.0.0.1:1"],
        PACELINE_TLS_CA=str(tmp_path / "ca.pem"),
    )
    assert done.returncode == Exit.USAGE
    assert done.stderr.startswith(f"psserver: {tmp_path}/ca.pem holds no certificate of a CA")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_shards_go_on_where_their_working_directory_was_deleted(tmp_path: Path) -> None:
    psserver = Command(tmp_path, fresh=True)
    folder, script = tmp_path / "gone", tmp_path / "train.py"
    folder.mkdir()
    script.write_text(REPORTS)
    line = shlex.join(
        [sys.executable, "-P", "-m", "psserver", "start", "--port", "0", "--metrics-port", "0"]
    )
    own = psserver.environment | {"NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    run(["bash", "-c", f"cd {shlex.quote(str(folder))} && {line} --detach"], **own)
    try:
        started = psserver.run_file()
        folder.rmdir()
        for _ in range(2):
            psserver.run("health")
            variables = KEPT | {"PACELINE_SERVERS": ",".join(started["addresses"])}
            trained = warm.run([script], env=variables, timeout=WAIT_S)
            assert trained.returncode == 0, trained.stderr
            (pid,) = live_shards(tmp_path)
            os.kill(pid, signal.SIGKILL)
            eventually(partial(gone, pid))
    finally:
        psserver.run("stop")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("psserver", "rules"), ("psworker", "modes")], ids=" ".join)
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_disk_at_standard_output_is_a_sentence(
    words: tuple[str, str], buffered: str
) -> None:
    line = shlex.join([sys.executable, "-m", *words]) + " > /dev/full"
    done = run(["bash", "-c", line], PYTHONUNBUFFERED=buffered)
    program = words[0]
    assert done.stderr == f"{program}: cannot write standard output: No space left on device\n"
    assert done.returncode == Exit.OUTPUT


@pytest.mark.slow
def test_detached_shards_whose_address_cannot_be_printed_end(tmp_path: Path) -> None:
    psserver = Command(tmp_path, fresh=True)
    line = shlex.join(psserver.line("start", "--port", 0, "--detach")) + " > /dev/full"
    done = run(["bash", "-c", line], **psserver.environment)
    assert done.stderr == "psserver: cannot write standard output: No space left on device\n"
    assert done.returncode == Exit.OUTPUT
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.slow
def test_a_reader_that_leaves_early_ends_a_command_without_a_word() -> None:
    line = shlex.join([sys.executable, "-m", "psserver", "rules"]) + " | :; exit ${PIPESTATUS[0]}"
    done = run(["bash", "-c", line], PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_status_and_top_work_where_text_is_ascii_or_the_disk_is_full(tmp_path: Path) -> None:
    psserver = Command(tmp_path, fresh=True)
    with psserver.detached() as shards:
        servers = ",".join(shards["addresses"])
        script = tmp_path / "train.py"
        script.write_text(REPORTS)
        trained = warm.run([script], env=KEPT | {"PACELINE_SERVERS": servers}, timeout=WAIT_S)
        assert trained.returncode == 0, trained.stderr
        shown = psserver.run("top", "--once", PYTHONIOENCODING="ascii:strict").stdout
        assert "job caf\\xe9" in shown
        assert shown.isascii()
        assert "job caf" in psserver.run("top").stdout  # There is no terminal to draw in.
        for verb in ("status", "top"):
            line = shlex.join(psserver.line(verb)) + " > /dev/full"
            full = run(["bash", "-c", line], **psserver.environment)
            assert full.stderr.endswith("cannot write standard output: No space left on device\n")


@pytest.mark.slow
def test_both_commands_have_a_version_and_say_where_they_are_wrong(tmp_path: Path) -> None:
    psserver = Command(tmp_path, fresh=True)
    assert psserver.run("--version").stdout.startswith("paceline ")
    assert psserver.run("status", "-h").stdout == psserver.run("status", "--help").stdout
    assert "_PSSERVER_COMPLETE" in psserver.run(_PSSERVER_COMPLETE="source_bash").stdout
    silent = psserver.run("status", "--servers", "127.0.0.1:1", code=6).stderr
    assert silent.startswith("psserver: nothing answers at 127.0.0.1:1")
    assert "Traceback" not in silent
    debugged = psserver.run("--debug", "status", "--servers", "127.0.0.1:1", code=6).stderr
    assert "Traceback" in debugged
    assert debugged.endswith(silent.partition("(waited")[2][-40:])
