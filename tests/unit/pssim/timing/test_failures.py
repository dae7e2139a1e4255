"""Killed processes in a job in time, beside the closed form of the time that they cost."""

import statistics

import pytest

from pscore.rules import parse_mode
from pscore.timing.closed import closed_form
from pscore.timing.deployment import GBIT, Deployment, cut_slices
from pscore.timing.failures import NOTICED_S, SHARD_BACK_S, WORKER_BACK_S, failure_cost, stall_s
from pscore.timing.plans import period, without_warmup
from tests.unit.pssim.timing.kills import TimedKill, lost_s

M = 1 << 20
OF = Deployment(
    worker_hosts=(0, 1, 2, 3),
    shard_hosts=(0, 1),
    slices=cut_slices(M // 2, 2),
    link=GBIT,
    compute_s=0.4,
)


MOMENTS = 4


def mean_lost_s(mode: str, *, is_shard: bool, back_s: float) -> float:
    """Returns the mean of kills at several moments of a period."""
    rule = parse_mode(mode)
    spread_s = len(period(without_warmup(rule))) * closed_form(OF, rule).step_s
    found = []
    for moment in range(MOMENTS):
        kill = TimedKill(
            is_shard=is_shard,
            index=1,
            at_s=4.0 + spread_s * (moment + 0.5) / MOMENTS,
            noticed_s=NOTICED_S,
            back_s=back_s,
        )
        found.append(lost_s(OF, rule, kill, steps=48))
    return statistics.mean(found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "od", "ssd(steps=5)", "local(steps=8)"])
def test_others_wait_for_a_killed_worker_as_the_closed_form_says(mode: str) -> None:
    rule = without_warmup(parse_mode(mode))
    step_s = closed_form(OF, rule).step_s
    wanted = stall_s(4, rule, step_s)
    assert mean_lost_s(mode, is_shard=False, back_s=WORKER_BACK_S) == pytest.approx(
        wanted, abs=max(0.75, 0.2 * len(period(rule))) * step_s
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asgd", "ssgd(backup=1)"])
def test_nobody_waits_where_no_single_worker_is_needed(mode: str) -> None:
    assert stall_s(4, parse_mode(mode), 0.4) == 0.0
    assert mean_lost_s(mode, is_shard=False, back_s=WORKER_BACK_S) <= 0.2 * 0.4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "od", "asgd"])
def test_all_wait_for_a_killed_shard(mode: str) -> None:
    lost = mean_lost_s(mode, is_shard=True, back_s=SHARD_BACK_S)
    assert SHARD_BACK_S - 2.5 * 0.4 <= lost <= SHARD_BACK_S + 0.4


def test_the_share_that_is_lost_grows_with_the_job_and_never_reaches_all() -> None:
    cost = failure_cost(OF, parse_mode("ssgd"), 0.4)
    assert cost.worker_s == pytest.approx(3.8 + (9.55 - 3.8) / 4)
    pulls_s = 4 * 0.5 * OF.nbytes / OF.payload_rate(0)
    assert SHARD_BACK_S < cost.shard_s <= SHARD_BACK_S + pulls_s
    shares = [cost.lost_share(workers, 8, 24.0) for workers in (8, 64, 1024, 10**9)]
    assert shares == sorted(shares)
    assert all(0 < share < 1 for share in shares)
    by_hand = (64 * cost.worker_s + 8 * cost.shard_s) / (24 * 3600)
    assert shares[1] == pytest.approx(by_hand / (1 + by_hand))
