"""The place of one launch in its job: flags and variables, and those that contradict each other."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from psworker.job.place import Flags, LaunchPlace, find_place, parse_nnodes, parse_workers


def placed(workers: int, first: int, number: int) -> LaunchPlace:
    return LaunchPlace(
        num_workers=workers, first_rank=first, job_workers=number, has_others=workers < number
    )


@pytest.mark.parametrize(
    ("flags", "variables", "place"),
    [
        (Flags(), {}, LaunchPlace.alone(1)),
        (Flags(workers=4), {"PACELINE_RANK": "", "WORLD_SIZE": "1"}, LaunchPlace.alone(4)),
        (Flags(workers=2, nnodes=3, node_rank=1), {}, placed(2, 2, 6)),
        (Flags(workers=2, nnodes=1, node_rank=0), {}, LaunchPlace.alone(2)),
        (Flags(workers=1), {"PACELINE_NUM_WORKERS": "2", "PACELINE_RANK": "1"}, placed(1, 1, 2)),
        (Flags(workers=3), {"PACELINE_NUM_WORKERS": "8", "PACELINE_RANK": "5"}, placed(3, 5, 8)),
        (Flags(), {"PACELINE_NUM_WORKERS": "2", "PACELINE_RANK": "0"}, placed(1, 0, 2)),
        (Flags(workers=2), {"PACELINE_NUM_WORKERS": "2"}, LaunchPlace.alone(2)),
        (
            Flags(workers=2, nnodes=2, node_rank=1),
            {"PACELINE_NUM_WORKERS": "4", "PACELINE_RANK": "2"},
            placed(2, 2, 4),
        ),
        (
            Flags(workers=2, elastic=(1, 8)),
            {"PACELINE_MAX_WORKERS": "4"},
            LaunchPlace(num_workers=2, job_workers=8, elastic=(1, 8)),
        ),
        (
            Flags(),
            {"PACELINE_MIN_WORKERS": "2", "PACELINE_MAX_WORKERS": "4"},
            LaunchPlace(num_workers=2, job_workers=4, elastic=(2, 4)),
        ),
        (
            Flags(workers=8, elastic=(2, 8)),
            {"WORLD_SIZE": "4", "RANK": "1"},
            LaunchPlace(num_workers=8, job_workers=8, elastic=(2, 8)),
        ),
        (
            Flags(workers=2),
            {"PACELINE_NUM_GROUPS": "2", "PACELINE_GROUP": "1"},
            LaunchPlace(num_workers=2, job_workers=2, has_others=True),
        ),
    ],
)  # fmt: skip
def test_flags_and_variables_place_the_workers(
    flags: Flags, variables: dict[str, str], place: LaunchPlace
) -> None:
    assert find_place(flags, variables) == place


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (Flags(nnodes=2), {}, "--node-rank is missing"),
        (Flags(node_rank=1), {}, "--nnodes is missing"),
        (Flags(nnodes=2, node_rank=2), {}, r"--node-rank is 2 of 2 hosts, must be in 0\.\.1"),
        (Flags(workers=0), {}, r"--workers is 0, must be in 1\.\.1024"),
        (Flags(workers=1025), {}, r"--workers is 1025, must be in 1\.\.1024"),
        (Flags(workers=9, elastic=(2, 8)), {}, r"--workers is 9, must be in 1\.\.8, the most that"),
        (Flags(), {"PACELINE_NUM_WORKERS": "2"}, "is 2, and 1 of these workers would start here"),
        (Flags(), {"PACELINE_RANK": "1"}, "PACELINE_RANK is 1, and PACELINE_NUM_WORKERS is not"),
        (Flags(), {"PACELINE_NUM_WORKERS": "two"}, "PACELINE_NUM_WORKERS is 'two'"),
        (
            Flags(workers=2),
            {"PACELINE_NUM_WORKERS": "2", "PACELINE_RANK": "1"},
            "would have the ranks 1 to 2, and PACELINE_NUM_WORKERS is 2",
        ),
        (
            Flags(workers=2, nnodes=2, node_rank=1),
            {"PACELINE_RANK": "1"},
            "PACELINE_RANK is 1, and --nnodes, --node-rank and --workers make it 2",
        ),
        (
            Flags(elastic=(1, 2)),
            {"PACELINE_NUM_WORKERS": "2"},
            "PACELINE_NUM_WORKERS is 2, and the job is elastic, 1 to 2 workers",
        ),
        (Flags(elastic=(1, 2), nnodes=2, node_rank=0), {}, "--nnodes is 2, and the job is elastic"),
        (Flags(), {"PACELINE_LOCAL_RANK": "1"}, "PACELINE_LOCAL_RANK is set"),
        (
            Flags(),
            {"PACELINE_MIN_WORKERS": "3", "PACELINE_MAX_WORKERS": "2"},
            "PACELINE_MIN_WORKERS is 3 and PACELINE_MAX_WORKERS 2",
        ),
        (Flags(), {"PACELINE_MIN_WORKERS": "3"}, "PACELINE_MIN_WORKERS is set, and PACELINE_MAX"),
        (Flags(), {"WORLD_SIZE": "2", "RANK": "1"}, "give --nnodes 2 --node-rank 1, or unset"),
        (
            Flags(workers=2),
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
            "another launcher has started this command 2 times",
        ),
        (Flags(), {"PACELINE_NUM_WORKERS": "0"}, r"PACELINE_NUM_WORKERS is '0', must be"),
        (Flags(), {"PACELINE_MAX_WORKERS": " "}, "PACELINE_MAX_WORKERS is ' ', must be"),
        (Flags(), {"PACELINE_NUM_GROUPS": "-1"}, "PACELINE_NUM_GROUPS is '-1', must be"),
        (Flags(), {"DMLC_NUM_WORKER": "2"}, r"--node-rank \$DMLC_WORKER_ID"),
    ],
)  # fmt: skip
def test_a_place_that_contradicts_itself_is_refused(
    flags: Flags, variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place(flags, variables)


# ----- one worker for each GPU

DRIVER = """
#include <stdlib.h>
int cuInit(unsigned flags) { const char *text = getenv("ERROR"); return text ? atoi(text) : 0; }
int cuDeviceGetCount(int *count) { *count = atoi(getenv("GPUS")); return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a library that answers like NVIDIA's driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    words = (compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c")
    subprocess.run(words, check=True)
    return folder


def counted(**variables: str) -> str:
    """Returns what a new process finds: the loader reads LD_LIBRARY_PATH only at its start."""
    program = (
        "from pscore.errors import ConfigError; from psworker.job.place import parse_workers\n"
        "try: print(parse_workers('gpu'))\n"
        "except ConfigError as problem: print(problem)"
    )
    words = (sys.executable, "-c", program)
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("count", ["1", "8"])
def test_one_worker_starts_for_each_gpu_that_the_driver_shows(driver: Path, count: str) -> None:
    assert counted(LD_LIBRARY_PATH=str(driver), GPUS=count) == count


def test_no_gpu_is_one_sentence_that_names_the_cause(driver: Path) -> None:
    shown = counted(LD_LIBRARY_PATH=str(driver), GPUS="0")
    assert "--workers gpu finds no GPU: the driver shows none" in shown
    failed = counted(LD_LIBRARY_PATH=str(driver), GPUS="1", ERROR="100")
    assert "--workers gpu finds no GPU: the driver's answer is error 100" in failed


def test_a_machine_without_the_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psworker.job.place.CUDA", "libnonesuch.so.1")
    with pytest.raises(ConfigError, match=r"libnonesuch.so.1 of NVIDIA's driver is missing"):
        parse_workers("gpu")


def test_a_number_of_workers_is_a_number_or_gpu() -> None:
    assert parse_workers("3") == 3
    for text in ("many", "9" * 5000):
        with pytest.raises(ConfigError, match=f"--workers is '{text[:40]}.*, must be a number or"):
            parse_workers(text)


def test_a_range_of_hosts_as_torchrun_takes_it_is_refused_with_what_to_give() -> None:
    assert parse_nnodes("2") == 2
    for text in ("1:4", "0", "-1", "two", "9" * 5000):
        with pytest.raises(ConfigError, match=r"--nnodes is .*; where hosts come and go, give --e"):
            parse_nnodes(text)
