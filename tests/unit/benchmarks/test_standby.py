"""The longest time without a finished step after each loss is found."""

import pytest

from benchmarks.standby import Job, extra_s, outages
from benchmarks.survival.momentum_proof import ledger_numel


def test_the_longest_time_without_a_step_is_found_for_each_loss() -> None:
    ends = [[0.0, 1.0, 2.0, 5.5, 6.0, 9.0], [0.5, 1.5, 4.0, 6.5, 8.5]]
    assert outages([(2.5, 6.1), (6.2, 9.0)], ends) == [3.0, 2.8]
    assert outages([(2.5, 4.5)], ends) == [1.5]
    with pytest.raises(SystemExit, match="over before a loss"):
        outages([(10.0, 11.0)], ends)


def test_only_a_run_of_the_same_job_is_compared_with() -> None:
    job = Job(numel=100, steps=10, moves=3)
    ledger = ledger_numel(2, 10)
    assert job.is_that_of({"numel": 100, "steps": 10, "moves": 1, "ledger": ledger})
    assert not job.is_that_of({"numel": 100, "steps": 11, "ledger": ledger})
    assert not job.is_that_of({"numel": 100, "steps": 10})  # Without tickets.
    assert not job.is_that_of({})


def test_moves_cost_what_their_steps_took_longer_than_others() -> None:
    ends = [0.0, 1.0, 2.0, 5.0, 7.0, 8.0, 9.0]
    assert extra_s(ends, 2.0, 7.5) == 3.0
    with pytest.raises(SystemExit, match="over before the moves"):
        extra_s(ends, 2.0, 9.0)
