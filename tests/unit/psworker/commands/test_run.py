"""The environment that a launcher gives its workers, and its copy of their output."""

import io
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from psworker.commands import run
from psworker.commands.output import Prefixed, plain
from psworker.commands.run import Launch, LaunchPlan, worker_command, worker_environment
from psworker.exits import Exit
from psworker.job.place import LaunchPlace


def plan(num_workers: int = 2) -> LaunchPlan:
    return LaunchPlan(command=("true",), place=LaunchPlace.alone(num_workers), job="run-1")


def ended(command: tuple[str, ...], *servers: str) -> tuple[int, list[str]]:
    """Runs one worker to its end; returns the exit code of the job and its messages."""
    told: list[str] = []
    job = LaunchPlan(command=command, place=LaunchPlace.alone(1), servers=servers, job="run-1")
    code = Launch(job, write=plain, tell=told.append, is_quiet=True).run()
    return code, told


@pytest.mark.parametrize(
    ("status", "is_there", "code"),
    [(1, False, Exit.NO_SHARDS), (1, True, Exit.FAILED), (3, False, 3), (0, False, Exit.OK)],
)
def test_a_worker_that_fails_without_a_shard_has_a_code_of_its_own(
    status: int, is_there: bool, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if not is_there:
            listener.close()
        found, told = ended(("sh", "-c", f"exit {status}"), address)
    assert found == code
    assert any(f"no shard listens at {address}" in line for line in told) == (
        code == Exit.NO_SHARDS
    )


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_by_its_signal() -> None:
    assert ended(("sh", "-c", "kill -9 $$"))[0] == 128 + 9


def test_a_script_runs_with_this_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert worker_command([str(script), "--lr", "3"]) == (sys.executable, str(script), "--lr", "3")


def test_a_module_runs_with_this_interpreter() -> None:
    assert worker_command(["-m", "a.b", "-x"]) == (sys.executable, "-m", "a.b", "-x")


def test_anything_else_is_a_program() -> None:
    assert worker_command(["env", "-i"]) == ("env", "-i")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command"),
        (["-m"], "-m needs the name of a module"),
        (["nonesuch.py"], "no script 'nonesuch.py' in "),
        (["nonesuch"], "no program 'nonesuch'; a script's name ends in .py"),
    ],
)
def test_a_command_that_cannot_be_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker_command(words)


def test_a_worker_gets_its_place_under_torchruns_names() -> None:
    given = worker_environment(plan(), 1, ["a:1", "b:2"], {"HOME": "/h"})
    place = {name: given[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert place == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert (given["PACELINE_JOB"], given["PACELINE_SERVERS"]) == ("run-1", "a:1,b:2")
    assert given["HOME"] == "/h"


def test_nothing_around_tells_a_worker_another_place() -> None:
    around = dict.fromkeys(run.REPLACED_VARIABLES, "7") | {"RANK": "7", "PACELINE_JOB": "x"}
    given = worker_environment(plan(), 0, [], around)
    assert not set(run.REPLACED_VARIABLES) & given.keys()
    assert (given["RANK"], given["PACELINE_JOB"]) == ("0", "run-1")


def test_the_shards_give_the_ranks_of_an_elastic_job() -> None:
    elastic = replace(plan(), place=LaunchPlace(num_workers=2, job_workers=8, elastic=(2, 8)))
    given = worker_environment(elastic, 1, ["a:1"], {})
    assert (given["PACELINE_MIN_WORKERS"], given["PACELINE_MAX_WORKERS"]) == ("2", "8")
    assert (given["LOCAL_RANK"], given["LOCAL_WORLD_SIZE"]) == ("1", "2")
    around = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    assert not around.keys() & worker_environment(elastic, 1, ["a:1"], around).keys()


@pytest.mark.parametrize(
    "text", ["", "3", "0:3", "3:2", "a:b", "1:2:3", ":4", "-1:3", "1:" + "9" * 5000]
)
def test_wrong_bounds_of_elastic_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--elastic is .* must look like MIN:MAX"):
        run.parse_elastic(text)


def test_least_and_most_may_be_equal() -> None:
    assert run.parse_elastic("2:2") == (2, 2)


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, 4), (2, 2, 1), (2, 5, 1)])
def test_workers_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, threads: int
) -> None:
    monkeypatch.setattr(run, "num_cores", lambda: cores)
    assert worker_environment(plan(workers), 0, [], {})["OMP_NUM_THREADS"] == str(threads)


def test_threads_that_are_set_stay() -> None:
    assert worker_environment(plan(), 0, [], {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_the_workers_of_a_host_have_their_ranks_in_the_job_and_their_places_on_it() -> None:
    second = LaunchPlace(num_workers=2, first_rank=2, job_workers=4, has_others=True)
    several = replace(plan(), place=second, servers=("a:1",))
    around = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}
    given = worker_environment(several, 3, ["a:1"], around)
    place = {name: given[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert place == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("host0", "29500")
    assert "MASTER_ADDR" not in worker_environment(several, 3, ["a:1"], {})
    assert run.describe(second) == "2 workers of 4 (ranks 2 to 3)"


def test_a_job_on_several_machines_needs_shards_that_all_of_them_reach() -> None:
    second = LaunchPlace(num_workers=1, first_rank=1, job_workers=2, has_others=True)
    with pytest.raises(ConfigError, match="workers on other machines, and no server address"):
        replace(plan(), place=second)


def test_each_launch_has_a_job_of_its_own() -> None:
    assert run.new_job() != run.new_job()
    assert run.new_job("demo").startswith("demo-")


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("text\n", "[1] text\n"),
        ("no end", "[1] no end\n"),
        (" 10%\r 20%\r 30%\n", "[1]  30%\n"),
        (" 10%\r 20%\r\n", "[1]  20%\n"),
        ("\n", "[1] \n"),
    ],
)
def test_a_line_has_its_rank_in_front(line: str, written: str) -> None:
    target = io.StringIO()
    Prefixed()(1, line, target)
    assert target.getvalue() == written


def test_signals_have_names() -> None:
    assert run.name_of(11) == "SIGSEGV"
    assert run.name_of(1000) == "signal 1000"
