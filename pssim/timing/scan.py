"""Step times over numbers of workers and bandwidths, beside all-reduce.

Every point is a closed form; with `every_message` the real state machines run it too, with so few
slices that a step of all workers has at most `MESSAGES_MAX` pushes. Each point says how far it lies
from every run that was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pscore.timing.auto import parse_fixed_mode
from pscore.timing.closed import closed_form, ring_form
from pscore.timing.deployment import Deployment, cut_slices
from pscore.timing.failures import BACK_SOURCE, failure_cost
from pssim.timing.run import run_in_time
from psworker.advice.choices import beyond_measured, distance, plan_shards
from psworker.advice.situation import Situation, read_situation

MESSAGES_MAX = 8192  # Pushes of all workers in a simulated step.
SLICES_MAX = 8  # Slices of a shard in a simulated step.
GBIT_LEAST, GBIT_MOST = 0.01, 10_000.0  # Where a break-even with all-reduce is looked for.
HALVINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRequest:
    """The points of a scan."""

    model: str  # A known name, or a number of parameters.
    workers: Sequence[int]  # Numbers of workers.
    per_host: int  # Workers of a host, which are one worker of the shards.
    gbits: Sequence[float]  # Bandwidths of hosts, in 10^9 bit/s.
    modes: Sequence[str]  # Modes, as text.
    compute_ms: float  # Milliseconds of forward and backward.
    every_message: bool = False  # Whether each point is simulated too.
    # Mean hours from one death of a process to its next; None: none dies.
    failure_hours: float | None = None


def scan(request: ScanRequest) -> list[dict[str, Any]]:
    """Returns the points of a scan, as JSON can hold them.

    Raises:
        ConfigError: A number is out of its range, or a mode is unknown.
    """
    return list(_points(request))


def _points(request: ScanRequest) -> Iterator[dict[str, Any]]:
    for workers in request.workers:
        evens = {mode: break_even_gbit(request, workers, mode) for mode in request.modes}
        for gbit in request.gbits:
            situation = situation_of(request, workers, gbit)
            shards = plan_shards(situation)
            ring_s = ring_form(situation.deployment(shards.hosts)).step_s
            for mode in request.modes:
                deployment = situation.deployment(shards.hosts, grouped=request.per_host > 1)
                found = closed_form(deployment, parse_fixed_mode(mode))
                yield {
                    "workers": workers,
                    "gbit": gbit,
                    "mode": mode,
                    "step_ms": round(1e3 * found.step_s, 2),
                    **_simulated(request, situation, shards.hosts, mode),
                    "limit": found.limit,
                    **_losses(request, deployment, mode, found.step_s),
                    "shards": len(shards.hosts),
                    "shard_memory_nbytes": round(shards.nbytes),
                    "all_reduce_ms": round(1e3 * ring_s, 2),
                    "all_reduce_wins": ring_s <= found.step_s,
                    "break_even_gbit": evens[mode],
                    "distance": float(f"{distance(situation):.3g}"),
                    "beyond_measured": beyond_measured(situation),
                }


def situation_of(request: ScanRequest, workers: int, gbit: float) -> Situation:
    """Returns the situation of a point."""
    hosts = -(-workers // request.per_host)
    groups = [request.per_host] * (hosts - 1)
    return read_situation(
        model=request.model,
        groups=(*groups, workers - sum(groups)),
        gbit=gbit,
        compute_ms=request.compute_ms,
    )


def _losses(
    request: ScanRequest, deployment: Deployment, mode: str, step_s: float
) -> dict[str, Any]:
    """Returns the share of time that is lost by processes that die; nothing if none does."""
    if request.failure_hours is None:
        return {}
    cost = failure_cost(deployment, parse_fixed_mode(mode), step_s)
    share = cost.lost_share(deployment.num_workers, deployment.num_shards, request.failure_hours)
    return {
        "lost_share": round(share, 5),
        "lost_s_of_a_worker": round(cost.worker_s, 2),
        "lost_s_of_a_shard": round(cost.shard_s, 2),
        "restarts": BACK_SOURCE,
    }


def break_even_gbit(request: ScanRequest, workers: int, mode: str) -> float | None:
    """Returns the bandwidth from which on all-reduce is as fast; None: at all of them, or none."""
    rule = parse_fixed_mode(mode)

    def wins(gbit: float) -> bool:
        situation = situation_of(request, workers, gbit)
        hosts = plan_shards(situation).hosts
        grouped = request.per_host > 1
        time = closed_form(situation.deployment(hosts, grouped=grouped), rule)
        return ring_form(situation.deployment(hosts)).step_s <= time.step_s

    low, high = GBIT_LEAST, GBIT_MOST
    if wins(low) or not wins(high):
        return None
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if wins(middle) else (middle, high)
    return float(f"{high:.4g}")


def _simulated(
    request: ScanRequest, situation: Situation, hosts: Sequence[int], mode: str
) -> dict[str, Any]:
    """Returns the ms of a step in which every message is simulated; None: it was not wanted.

    With few slices of a shard a step takes longer than in a job, where pulls of some overlap with
    pushes of others; their number stands beside.
    """
    if not request.every_message:
        return {"simulated_ms": None}
    deployment = situation.deployment(hosts, grouped=request.per_host > 1)
    messages = deployment.num_workers * deployment.num_shards
    per_shard = min(SLICES_MAX, max(1, MESSAGES_MAX // messages))
    coarse = dataclasses.replace(
        deployment, slices=cut_slices(situation.numel, deployment.num_shards, per_shard)
    )
    run = run_in_time(coarse, parse_fixed_mode(mode), num_steps=2)
    return {
        "simulated_ms": round(1e3 * run.step_s, 2),
        "simulated_slices_per_shard": min(per_shard, len(coarse.slices) // deployment.num_shards),
    }
