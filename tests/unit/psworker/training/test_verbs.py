"""The place of a process in its job and on its host."""

import pytest

import psworker
from psworker.job.environment import RANKS


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 1),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2"}, 2),
        ({}, 0),
    ],
    ids=["torchrun", "slurm", "alone"],
)
def test_the_local_rank_is_known_before_the_process_joins(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    for name in (*RANKS, "LOCAL_RANK", "PACELINE_LOCAL_RANK", "PACELINE_MAX_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert psworker.local_rank() == expected
