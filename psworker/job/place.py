"""The place of one `psworker run` in its job: which of the job's workers it starts.

The flags decide, then the variables of this process. A variable that says something else than the
flags is refused: ignored, it would leave a worker training alone, and the others waiting for it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pscore.errors import ConfigError
from pscore.text import printable
from pscore.variables import whole_number

WORKERS_MAX = 1024
DEFAULT_JOB = "default"  # The job's name where the environment has none.
CUDA = "libcuda.so.1"  # The driver's library, which container engines hand out with the GPUs.
# By launcher: the variable with the number of its processes, and the one with the own number.
LAUNCHERS = {
    "WORLD_SIZE": "RANK",
    "DMLC_NUM_WORKER": "DMLC_WORKER_ID",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlace:
    """The workers that one launch starts."""

    num_workers: int  # Workers to start here.
    first_rank: int = 0  # Rank of the first of them; the ranks of the others follow.
    job_workers: int  # Workers of the job on all machines.
    # Minimum and maximum of an elastic job, whose ranks come from the shards.
    elastic: tuple[int, int] | None = None
    has_others: bool = False  # Whether other launches start workers or groups of this job.

    @classmethod
    def alone(cls, num_workers: int) -> LaunchPlace:
        """Returns the place of a launch that starts all workers of its job."""
        return cls(num_workers=num_workers, job_workers=num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Flags of `psworker run` that place its workers; None: not given."""

    workers: int | None = None
    elastic: tuple[int, int] | None = None
    nnodes: int | None = None
    node_rank: int | None = None


def find_place(flags: Flags, variables: Mapping[str, str]) -> LaunchPlace:
    """Returns the place that flags and variables describe.

    Raises:
        ConfigError: They contradict each other, or one of them has no effect.
    """
    for name in ("PACELINE_LOCAL_RANK", "PACELINE_LOCAL_WORKERS"):
        if variables.get(name):
            raise ConfigError(
                f"{name} is set, and psworker run itself numbers the workers of this machine: "
                "unset it"
            )
    bounds = flags.elastic or _elastic(variables)
    if bounds is not None:
        return _elastic_place(flags, bounds, variables)
    workers = 1 if flags.workers is None else flags.workers
    if not 1 <= workers <= WORKERS_MAX:
        raise ConfigError(f"--workers is {workers}, must be in 1..{WORKERS_MAX}")
    if flags.nnodes is not None or flags.node_rank is not None:
        place = _by_nodes(workers, flags.nnodes, flags.node_rank)
        _require_same(place, variables)
        return place
    if variables.get("PACELINE_NUM_WORKERS") or variables.get("PACELINE_RANK"):
        return _by_variables(workers, variables)
    _refuse_launchers(variables)
    has_others = whole_number(variables, "PACELINE_NUM_GROUPS", 1, 1) > 1
    return replace(LaunchPlace.alone(workers), has_others=has_others)


def _elastic(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns the bounds of the variables, as a worker reads them."""
    if not variables.get("PACELINE_MAX_WORKERS"):
        if variables.get("PACELINE_MIN_WORKERS"):
            raise ConfigError(
                "PACELINE_MIN_WORKERS is set, and PACELINE_MAX_WORKERS is not: set both, give "
                "--elastic MIN:MAX, or unset it"
            )
        return None
    most = whole_number(variables, "PACELINE_MAX_WORKERS", 1, 1)
    least = whole_number(variables, "PACELINE_MIN_WORKERS", 1, 1)
    if least > most:
        raise ConfigError(
            f"PACELINE_MIN_WORKERS is {least} and PACELINE_MAX_WORKERS {most}: the minimum must be "
            f"in 1..{most}"
        )
    return least, most


def _elastic_place(
    flags: Flags, bounds: tuple[int, int], variables: Mapping[str, str]
) -> LaunchPlace:
    given = {
        "--nnodes": flags.nnodes,
        "--node-rank": flags.node_rank,
        "PACELINE_NUM_WORKERS": variables.get("PACELINE_NUM_WORKERS") or None,
        "PACELINE_RANK": variables.get("PACELINE_RANK") or None,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value}, and the job is elastic, {bounds[0]} to {bounds[1]} workers: "
                f"its shards assign the ranks, and hosts join at any time; leave out {name}"
            )
    workers = bounds[0] if flags.workers is None else flags.workers
    if not 1 <= workers <= min(bounds[1], WORKERS_MAX):
        raise ConfigError(
            f"--workers is {workers}, must be in 1..{bounds[1]}, the most that --elastic allows"
        )
    return LaunchPlace(num_workers=workers, job_workers=bounds[1], elastic=bounds)


def _by_nodes(workers: int, nnodes: int | None, node_rank: int | None) -> LaunchPlace:
    if nnodes is None or node_rank is None:
        missing = "--nnodes" if nnodes is None else "--node-rank"
        raise ConfigError(
            f"{missing} is missing: on each of N hosts give --nnodes N, and --node-rank from 0 to "
            "N - 1"
        )
    if not 0 <= node_rank < nnodes:
        raise ConfigError(
            f"--node-rank is {node_rank} of {nnodes} hosts, must be in 0..{nnodes - 1}"
        )
    return LaunchPlace(
        num_workers=workers,
        first_rank=workers * node_rank,
        job_workers=workers * nnodes,
        has_others=nnodes > 1,
    )


def _require_same(place: LaunchPlace, variables: Mapping[str, str]) -> None:
    """Raises a `ConfigError` if a variable contradicts `--nnodes` and `--node-rank`."""
    wanted = {"PACELINE_NUM_WORKERS": place.job_workers, "PACELINE_RANK": place.first_rank}
    for name, value in wanted.items():
        if (other := whole_number(variables, name, value)) != value:
            raise ConfigError(
                f"{name} is {other}, and --nnodes, --node-rank and --workers make it {value}: "
                "unset the variable, or leave out the flags"
            )


def _by_variables(workers: int, variables: Mapping[str, str]) -> LaunchPlace:
    number = whole_number(variables, "PACELINE_NUM_WORKERS", 0, 1)
    rank = whole_number(variables, "PACELINE_RANK", -1, -1)
    if not variables.get("PACELINE_NUM_WORKERS"):
        raise ConfigError(
            f"PACELINE_RANK is {rank}, and PACELINE_NUM_WORKERS is not set: set both, or give "
            "--nnodes and --node-rank, or unset PACELINE_RANK"
        )
    if rank < 0 and workers != number:
        raise ConfigError(
            f"PACELINE_NUM_WORKERS is {number}, and {workers} of these workers would start here: "
            "give --nnodes and --node-rank on each host, or set PACELINE_RANK to the rank of the "
            f"first worker here, or --workers {number} to start all of them here"
        )
    first = max(rank, 0)
    if first + workers > number:
        raise ConfigError(
            f"the {workers} workers here would have the ranks {first} to {first + workers - 1}, "
            f"and PACELINE_NUM_WORKERS is {number}: their last rank can be {number - 1}"
        )
    return LaunchPlace(
        num_workers=workers, first_rank=first, job_workers=number, has_others=workers < number
    )


def _refuse_launchers(variables: Mapping[str, str]) -> None:
    """Raises a `ConfigError` if another launcher has started several of this command."""
    for name, own in LAUNCHERS.items():
        if (number := whole_number(variables, name, 1)) > 1:
            raise ConfigError(
                f"{name} is {number}: another launcher has started this command {number} times, "
                "and each of them would train a job of its own; give --nnodes "
                f"{number} --node-rank {variables.get(own) or f'${own}'}, or unset {name}"
            )


def parse_workers(text: str) -> int:
    """Returns the number of workers from `4`, or from `gpu`: one for each GPU.

    Raises:
        ConfigError: It is neither, or there is no GPU.
    """
    if text == "gpu":
        return count_gpus()
    if not re.fullmatch("-?[0-9]{1,10}", text):
        raise ConfigError(f"--workers is {printable(text, 40)!r}, must be a number or gpu")
    return int(text)


def parse_nnodes(text: str) -> int:
    """Returns the number of hosts; a range, as torchrun takes it, is refused.

    Raises:
        ConfigError: It is no number of hosts.
    """
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) < 1:
        raise ConfigError(
            f"--nnodes is {printable(text, 40)!r}, must be the number of hosts, 1 or more; where "
            "hosts come and go, give --elastic MIN:MAX instead, in workers"
        )
    return int(text)


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use (CUDA_VISIBLE_DEVICES).

    It asks the driver, as torch does, and makes no context on a GPU.

    Raises:
        ConfigError: There is none; says whether the driver is missing.
    """
    count = ctypes.c_int()
    remedy = "start the container with GPUs (docs/deploy.md), or give a number of workers"
    try:
        driver = ctypes.CDLL(CUDA)
    except OSError:
        raise ConfigError(
            f"--workers gpu finds no GPU: {CUDA} of NVIDIA's driver is missing here; {remedy}"
        ) from None
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        why = f"the driver's answer is error {code}" if code else "the driver shows none"
        raise ConfigError(f"--workers gpu finds no GPU: {why} (CUDA_VISIBLE_DEVICES?); {remedy}")
    return count.value
