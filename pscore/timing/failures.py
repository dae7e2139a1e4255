"""The time that a job loses when processes die: the waits of the others, and the lost work.

    a worker    the others wait  d - (p / 2 + k) T  on average, in a mode with rounds p / 2 T more
                for another one in its place, and until that is there its share 1 / N is missing
    a shard     all wait until it has continued from its journal, and each worker has pulled again

d is the time until the shards no longer wait for a worker (0.4 of a lease once its connection has
broken), T a step, p the steps from one pull to the next, or of a round, and k 1 where pulls land a
step later, else 0; no wait is below 0. In modes that wait for no single worker only work is lost.
tests/unit/pssim/timing/kills.py kills processes in a simulation of every message, and agrees.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.rules.base import Rule
from pscore.timing.deployment import Deployment
from pscore.timing.plans import period

HOUR_S = 3600.0
NOTICED_S = 4.0  # Two heartbeats of the default lease of 10 s.
WORKER_BACK_S = 9.55
SHARD_BACK_S = 2.2
BACK_SOURCE = "docs/results/recovery.json: recovery_s of a worker and of a shard, medians"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """The cost of one killed process, in seconds of the whole job."""

    worker_s: float  # Seconds that a worker costs.
    shard_s: float  # Seconds that a shard costs.

    def lost_share(self, workers: int, shards: int, hours: float) -> float:
        """Returns the share of time that is lost, 0 to 1.

        Args:
            hours: Mean hours from one death of a process to its next.
        """
        each_s = hours * HOUR_S
        lost = (workers * self.worker_s + shards * self.shard_s) / each_s
        return lost / (1 + lost)


def failure_cost(deployment: Deployment, rule: Rule, step_s: float) -> FailureCost:
    """Returns the cost of killed processes in a mode."""
    stall = stall_s(deployment.num_workers, rule, step_s)
    missing_s = (WORKER_BACK_S - min(stall, WORKER_BACK_S)) / deployment.num_workers
    return FailureCost(worker_s=stall + missing_s, shard_s=SHARD_BACK_S + _pull_s(deployment))


def stall_s(num_workers: int, rule: Rule, step_s: float) -> float:
    """Returns the seconds that the others wait for a killed worker, as a mean over its moment."""
    waits = rule.by_step and rule.fan_in(num_workers, num_workers) == num_workers
    if not waits or num_workers == 1:
        return 0.0
    steps = period(rule)
    blocks = all(plan.block for plan in map(rule.plan, steps) if plan.pull)
    spread_s = len(steps) * step_s
    most_s = NOTICED_S if blocks else max(0.0, NOTICED_S - step_s)  # If it dies before a pull.
    # The mean of max(0, most - u) over u, uniform in 0 to the spread.
    wait_s = most_s - spread_s / 2 if most_s > spread_s else most_s**2 / (2 * spread_s)
    late_s = spread_s / 2 if rule.outer_optimizer else 0.0  # The successor, in its first round.
    return wait_s + late_s


def _pull_s(deployment: Deployment) -> float:
    """Returns the seconds in which each worker pulls the whole model."""
    shares = deployment.shares()
    seconds = 0.0
    for host in set(deployment.shard_hosts):
        share = sum(
            part
            for part, place in zip(shares, deployment.shard_hosts, strict=True)
            if place == host
        )
        far = sum(worker != host for worker in deployment.worker_hosts)
        seconds = max(seconds, far * share * deployment.nbytes / deployment.payload_rate(host))
    return seconds
