"""Advice names the part that limits a step: halving its cost in the simulation helps most."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pscore.compressors import parse_compressor
from pscore.rules import parse_mode
from pscore.timing.deployment import Deployment, MachineRates
from pscore.timing.evidence import DDP
from pssim.timing.run import run_in_time
from psworker.advice.report import advise
from psworker.advice.situation import read_situation

SHARD, WORKER = ("receive", "send", "update", "decode"), ("worker", "encode", "local")


@dataclass(frozen=True, kw_only=True)
class Constructed:
    """A situation in which one part takes much longer than all others, by its numbers."""

    limit: str
    mode: str
    model: str
    groups: tuple[int, ...] = (1,) * 4
    gbit: float
    compute_ms: float
    latency_ms: float | None = None
    between_gbit: float | None = None
    slow: dict[int, float] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)


FAST = Constructed(limit="computing", mode="ssgd", model="resnet50", gbit=100.0, compute_ms=500.0)
SLOW = Constructed(limit="links", mode="ssgd", model="100M", gbit=1.0, compute_ms=100.0)
SITES = replace(SLOW, limit="shards' links", groups=(6, 2), gbit=10.0, between_gbit=0.1)
FAR = replace(FAST, limit="round trips", model="1M", gbit=10.0, compute_ms=2.0, latency_ms=80.0)
BUSY = replace(FAST, model="16M", gbit=400.0, compute_ms=10.0)
BUSY_SHARDS = replace(
    BUSY, limit="shard CPU", rates={"receive": 2e7, "send": 4e7, "update": 2.5e7, "worker": 1e10}
)
BUSY_WORKERS = replace(BUSY, limit="worker CPU", rates={"worker": 2e7, "memory": 1e11})

CASES = (
    FAST,
    replace(FAST, mode="od"),
    replace(FAST, mode=DDP),
    replace(SLOW, limit="computing", mode="diloco(steps=100)", compute_ms=500.0),
    replace(FAST, limit="computing of worker 2", slow={2: 3.0}),
    replace(FAST, limit="computing of worker 1", mode="ssd(steps=5)", slow={1: 3.0}),
    replace(FAST, mode="ssgd(backup=1)", slow={2: 3.0}),
    SLOW,
    replace(SLOW, mode="od"),
    replace(SLOW, mode="ssd(steps=5)"),
    replace(SLOW, mode="local(steps=8)"),
    replace(SLOW, mode=DDP),
    replace(SLOW, groups=(4, 4)),
    SITES,
    replace(SITES, mode="od"),
    BUSY_SHARDS,
    replace(BUSY_SHARDS, mode="od"),
    BUSY_WORKERS,
    replace(BUSY_WORKERS, mode="cd", rates={"encode": 2e7}),
    FAR,
    replace(FAR, mode="od"),
    replace(FAR, mode="local(steps=8)"),
)


def relieved(of: Deployment) -> dict[str, Deployment]:
    """Returns the deployment with half the cost of one kind of part, by that kind."""
    rates = of.rates
    return {
        "computing": replace(of, compute_s=of.compute_s / 2),
        "links": replace(of, link=2 * of.link),
        "shard CPU": replace(of, rates=replace(twice(rates, SHARD), message_s=rates.message_s / 2)),
        "worker CPU": replace(of, rates=twice(rates, WORKER)),
        "round trips": replace(of, round_trip_s=of.round_trip_s / 2),
    }


def twice(rates: MachineRates, names: tuple[str, ...]) -> MachineRates:
    return replace(rates, **{name: 2 * getattr(rates, name) for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.limit}, {case.mode}")
def test_the_limit_is_the_part_whose_relief_helps_most(case: Constructed) -> None:
    given = read_situation(
        model=case.model,
        groups=case.groups,
        gbit=case.gbit,
        compute_ms=case.compute_ms,
        latency_ms=case.latency_ms,
        between_gbit=case.between_gbit,
    )
    situation = replace(given, slow=case.slow, rates=replace(given.rates, **case.rates))
    found = advise(situation, "any")
    row = next(row for row in reversed(found.rows) if row.mode == case.mode)
    assert row.time.limit == case.limit
    if row.mode == DDP:  # The simulation has shards.
        return
    of = situation.deployment(found.shards.hosts, grouped=row.grouped)
    rule, compressor = parse_mode(row.mode), parse_compressor(row.compression)
    times = {
        kind: run_in_time(each, rule, compressor, num_steps=3).step_s
        for kind, each in relieved(of).items()
    }
    fastest = min(times, key=lambda kind: times[kind])
    assert fastest in case.limit, times
