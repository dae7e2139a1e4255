"""Reported values and the pace, as scalars."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pscore.errors import ConfigError
from psworker.connection.accounts.pace import Pace
from psworker.connection.accounts.reports import Reports
from psworker.connection.accounts.traffic import Traffic
from psworker.training.scalars import Scalars


class Writer:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.rows.append((tag, scalar_value, global_step))


def test_a_report_writes_its_values_and_the_pace_since_the_last_one() -> None:
    now_s = 0.0
    pace, writer = Pace(lambda: now_s), Writer()
    reports = Reports(lambda: now_s)
    session: Any = SimpleNamespace(pace=pace, heartbeats=SimpleNamespace(reports=reports))
    scalars = Scalars(writer, session)
    for loss in (0.5, 0.25):
        pace.end_step()
        pace.follow(push := Future[int]())
        now_s += 2.0
        push.set_result(0)
        pace.waited(1.0)
        pace.end_step()
        reports.put({"loss": loss, "tokens": 10})
        scalars.write(("loss", "tokens"), 7, Traffic(pushed_nbytes=100, pulled_nbytes=50))
    assert writer.rows == [
        ("loss", 0.5, 7),
        ("tokens", 10.0, 7),
        ("paceline/step_seconds", 2.0, 7),
        ("paceline/wait_seconds", 1.0, 7),
        ("paceline/pushed_bytes", 100, 7),
        ("paceline/pulled_bytes", 50, 7),
        ("loss", 0.25, 7),
        ("tokens", 20.0, 7),
        ("tokens_per_s", 5.0, 7),
        ("paceline/step_seconds", 1.0, 7),
        ("paceline/wait_seconds", 0.5, 7),
        ("paceline/pushed_bytes", 100, 7),
        ("paceline/pulled_bytes", 50, 7),
    ]


def test_a_writer_that_cannot_write_is_refused() -> None:
    session: Any = SimpleNamespace(pace=Pace())
    with pytest.raises(ConfigError, match="got a str, must be a SummaryWriter"):
        Scalars("runs", session)  # type: ignore[arg-type]
