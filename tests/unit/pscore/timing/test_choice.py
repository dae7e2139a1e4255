"""The choice among ways to train: by time, and by the accuracy that a risk allows."""

from dataclasses import replace

import pytest

from pscore.timing.choice import CANDIDATES, AdviceRow, choose, row_of
from pscore.timing.closed import StepTime
from pscore.timing.deployment import Deployment, cut_slices
from pscore.timing.evidence import DDP, EVIDENCE


def row(mode: str, evidence: str, step_s: float) -> AdviceRow:
    return AdviceRow(
        mode=mode,
        compression="none",
        grouped=False,
        time=StepTime(parts_s={"computing": step_s}, pushed_nbytes=0.0, pulled_nbytes=0.0),
        evidence=EVIDENCE[evidence],
        num_shards=1,
    )


ROWS = [row("ssgd", "ssgd", 1.0), row("ssd(steps=5)", "ssd k=5", 0.5), row("od", "od", 0.3)]


@pytest.mark.parametrize(
    ("risk", "mode"), [("none", "ssgd"), ("low", "ssd(steps=5)"), ("any", "od")]
)
def test_a_risk_bounds_what_was_lost(risk: str, mode: str) -> None:
    assert choose(ROWS, risk).mode == mode


def test_a_tenth_is_not_worth_another_update() -> None:
    nearly = [ROWS[0], row("od", "od", 0.92)]
    assert choose(nearly, "any").mode == "ssgd"
    assert choose([ROWS[0], row("od", "od", 0.89)], "any").mode == "od"


def test_among_equals_all_reduce_needs_no_shards() -> None:
    assert choose([ROWS[0], row(DDP, DDP, 1.04)], "none").mode == DDP


def test_a_mode_that_does_not_fit_has_no_row() -> None:
    two = Deployment(
        worker_hosts=(0, 1), shard_hosts=(0,), slices=cut_slices(1000, 1), link=1e8, compute_s=0.1
    )
    assert row_of(two, replace(CANDIDATES[0], mode="ssgd(backup=2)")) is None
    found = row_of(two, CANDIDATES[0])
    assert found is not None
    assert found.time.step_s >= 0.1
