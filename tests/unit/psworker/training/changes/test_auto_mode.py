"""The mode that a worker declares in a job that may have changed it."""

from types import SimpleNamespace
from typing import Any

import pytest

from psworker.connection.membership.joining import Known
from psworker.training.changes.auto_mode import ModeWish


@pytest.mark.parametrize(
    ("now", "before", "named", "declared"),
    [
        ("asgd", "ssgd(backup=0)", "ssgd", "asgd"),
        ("asgd", "ssgd(backup=0)", "asgd", "asgd"),
        ("asgd", "ssgd(backup=0)", "ssgd(backup=1)", "ssgd(backup=1)"),  # The shards refuse it.
        ("asgd", "", "ssgd", "ssgd(backup=0)"),
        ("", "", "ssgd", "ssgd(backup=0)"),
    ],
    ids=["the one before", "the new one", "another", "no change", "no table"],
)
def test_a_worker_declares_the_jobs_mode_if_its_script_names_the_one_before(
    now: str, before: str, named: str, declared: str
) -> None:
    session: Any = SimpleNamespace(
        known=Known(
            progress={"model": 3} if now else {},
            modes={"model": now} if now else {},
            former_modes={"model": before} if before else {},
        ),
        group=SimpleNamespace(is_leader=True),
        rank=1,
    )
    assert str(ModeWish(named).join(session, "model")) == declared
