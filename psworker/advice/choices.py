"""The rows of advice: each mode's time, limit and evidence, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pscore.compressors import parse_compressor
from pscore.errors import ConfigError
from pscore.net.wire import FLOAT_NBYTES
from pscore.rules import parse_mode
from pscore.timing.closed import SHARD_CPU, StepTime, closed_form, ring_form
from pscore.timing.deployment import Deployment
from pscore.timing.memory import num_arrays
from psworker.advice.evidence import DDP, EVIDENCE, LOW_POINTS, Evidence
from psworker.advice.situation import Situation
from psworker.advice.sizes import is_too_large

RISKS = ("none", "low", "any")
NEARLY = 1.05  # Modes within 5 % are equal: the one that changes nothing else is advised.
WORTH = 1.1  # A mode has to be so much faster than one with the same updates to be advised.
MUCH = 1.5  # As much faster is worth a sentence, at any risk.
SHARDS_PER_HOST = (1, 2, 4, 8, 16, 32, 64)
SHARDS_MAX = 4096
# The worst error of runs that were predicted first, docs/results/predictions.json, and the range of
# those and of the runs in hosts.json and step_hosts.json.
ERROR = 0.23
MEASURED_MODES = ("ssgd", "od", "ssd", "cd", DDP)
TRIP_MAX_S = 21e-3  # Longest round trip of these runs.
MEASURED = {"workers": (1, 4), "Gbit/s": (0.1, 1.0), "parameters": (1.6e6, 25.6e6)}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode that advice considers.

    Attributes:
        mode: The argument `mode=`.
        evidence: Its key in `EVIDENCE`.
        compression: The argument `compression=`.
        least: Workers that it needs.
    """

    mode: str
    evidence: str
    compression: str = "none"
    least: int = 1


CANDIDATES = (
    Candidate("ssgd", "ssgd"),
    Candidate("od", "od"),
    Candidate("ssd(steps=1, mirror=kept)", "ssd k=1 kept"),
    Candidate("ssd(steps=5)", "ssd k=5"),
    Candidate("ssd(steps=5, mirror=kept)", "ssd k=5 kept"),
    Candidate("cd", "cd", "2bit"),
    Candidate("local(steps=8)", "local H=8"),
    Candidate("diloco(steps=100)", "diloco"),
    Candidate("asgd", "asgd"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRow:
    """One way to train: its time, limit and evidence.

    Attributes:
        mode: The argument `mode=`, or `ddp`.
        compression: The argument `compression=`.
        grouped: Whether the processes of a host are one worker.
        time: Its time in closed form.
        evidence: Its effect on accuracy where that was measured.
        num_shards: Its shards; 0: none.
    """

    mode: str
    compression: str
    grouped: bool
    time: StepTime
    evidence: Evidence
    num_shards: int

    @property
    def is_measured(self) -> bool:
        """Whether committed runs on shaped links had its mode."""
        return self.mode.partition("(")[0] in MEASURED_MODES

    @property
    def name(self) -> str:
        """Its name in tables."""
        packed = "" if self.compression == "none" else f" + {self.compression}"
        return f"{self.mode}{packed}" + (", a host is a worker" if self.grouped else "")

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON can hold it."""
        return {
            "mode": self.mode,
            "compression": self.compression,
            "host_is_a_worker": self.grouped,
            "step_ms": round(1e3 * self.time.step_s, 1),
            "limit": self.time.limit,
            "waited": round(self.time.waited, 3),
            "parts_ms": {name: round(1e3 * s, 2) for name, s in self.time.parts_s.items()},
            "pushed_nbytes": round(self.time.pushed_nbytes),
            "pulled_nbytes": round(self.time.pulled_nbytes),
            "accuracy": self.evidence.as_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlaces:
    """Shards, their places, and the memory of each.

    Attributes:
        hosts: The host, or site, of each shard.
        nbytes: Memory of a shard in `ssgd`, with a journal as by default.
        cpu_share: Share of an `ssgd` step in which a shard's threads are busy.
    """

    hosts: tuple[int, ...]
    nbytes: float
    cpu_share: float


def plan_shards(situation: Situation) -> ShardPlaces:
    """Returns the fewest shards whose threads limit no step, on the hosts where they cost least."""
    grouped = is_grouped(situation)
    rule = parse_mode("ssgd")
    best: tuple[float, tuple[int, ...]] | None = None
    for hosts in _placements(situation):
        found = closed_form(situation.deployment(hosts, grouped=grouped), rule)
        if best is None or found.step_s * WORTH < best[0]:
            best = found.step_s, hosts
        if found.limit != SHARD_CPU and not situation.has_sites:
            break
    assert best is not None
    hosts = best[1]
    deployment = situation.deployment(hosts, grouped=grouped)
    arrays = num_arrays(rule, situation.num_state, is_kept=True, is_estimated=False)
    found = closed_form(deployment, rule)
    return ShardPlaces(
        hosts=hosts,
        nbytes=FLOAT_NBYTES * situation.numel * arrays * max(deployment.shares()),
        cpu_share=found.parts_s.get(SHARD_CPU, 0.0) / found.step_s,
    )


def is_grouped(situation: Situation) -> bool:
    """Returns whether several processes of a host can be one worker."""
    return max(situation.groups) > 1 and not situation.has_sites


def _placements(situation: Situation) -> Iterator[tuple[int, ...]]:
    """Yields the hosts of shards that are worth considering, the fewest shards first."""
    groups = range(len(situation.groups))
    if situation.has_sites:
        for site in sorted(groups, key=lambda group: -situation.groups[group]):
            yield (site,)
        yield tuple(groups)
        return
    for number in SHARDS_PER_HOST:
        if number * len(groups) <= SHARDS_MAX:
            yield tuple(host for host in groups for _ in range(number))


def rows_of(situation: Situation, shards: ShardPlaces) -> list[AdviceRow]:
    """Returns a row for each way to train that fits, in the order of the table."""
    return [*_ddp_rows(situation), *_shard_rows(situation, shards.hosts)]


def _ddp_rows(situation: Situation) -> Iterator[AdviceRow]:
    if situation.num_workers > 1:
        yield AdviceRow(
            mode=DDP,
            compression="none",
            grouped=False,
            time=ring_form(situation.deployment((0,))),
            evidence=EVIDENCE[DDP],
            num_shards=0,
        )


def _shard_rows(situation: Situation, hosts: Sequence[int]) -> Iterator[AdviceRow]:
    grouped = is_grouped(situation)
    for candidate in candidates_of(situation):
        ways = (False, True) if grouped and candidate.mode == "ssgd" else (grouped,)
        for is_one in ways:
            deployment = situation.deployment(hosts, grouped=is_one)
            if row := _row(deployment, candidate, is_one):
                yield row


def candidates_of(situation: Situation) -> tuple[Candidate, ...]:
    """Returns the modes that fit: with unequal workers also backup workers."""
    few = max(1, situation.num_workers // 8)
    backup = Candidate(f"ssgd(backup={few})", "ssgd backup", least=few + 1)
    is_unequal = bool(situation.slow) or situation.deviation > 0
    return (*CANDIDATES, backup) if is_unequal else CANDIDATES


def _row(deployment: Deployment, candidate: Candidate, grouped: bool) -> AdviceRow | None:
    try:
        rule, compressor = parse_mode(candidate.mode), parse_compressor(candidate.compression)
        time = closed_form(deployment, rule, compressor)
    except ConfigError:  # The mode does not fit the number of workers.
        return None
    return AdviceRow(
        mode=candidate.mode,
        compression=candidate.compression,
        grouped=grouped,
        time=time,
        evidence=EVIDENCE[candidate.evidence],
        num_shards=deployment.num_shards,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceVerdict:
    """The way to train that is advised, and the reason.

    Attributes:
        row: The way to train.
        text: The advice as one sentence.
        also: A clearly faster way at a higher risk, as a sentence; empty: none.
    """

    row: AdviceRow
    text: str
    also: str = ""


def choose_row(rows: Sequence[AdviceRow], risk: str) -> AdviceVerdict:
    """Returns what to use at a risk.

    Args:
        rows: All ways to train.
        risk: One of `RISKS`: `none` changes no update, `low` allows what lost at most half a point
            where that was measured, `any` everything.

    Raises:
        ConfigError: There is no such risk.
    """
    if risk not in RISKS:
        raise ConfigError(f"--risk is {risk!r}, must be one of {', '.join(RISKS)}")
    best = _choose(rows, risk)
    any_way = _choose(rows, "any")
    also = ""
    if any_way.time.step_s * MUCH < best.time.step_s:
        also = (
            f"{any_way.name} would take {_ms(any_way)} instead of {_ms(best)}: "
            f"{any_way.evidence.text}. Try it on your task"
        )
    first = _choose(rows, "none")
    if best.mode == DDP:
        text = (
            "use DDP: no way with shards is clearly faster at this risk. Shards are worth it if "
            "workers come and go, die, or differ in speed"
        )
    elif best is first:
        text = f"use {_use(best)}: {_ms(best)} a step, {best.evidence.text}"
    else:
        text = f"use {_use(best)}: {_ms(best)} a step instead of {_ms(first)} of {first.name}; "
        text += best.evidence.text
    return AdviceVerdict(row=best, text=text, also=also)


def _choose(rows: Sequence[AdviceRow], risk: str) -> AdviceRow:
    """Returns the row to use: the one that changes least among those that are about as fast."""
    allowed = [row for row in rows if _is_allowed(row, risk)]
    fastest = min(allowed, key=lambda row: row.time.step_s)
    same = [row for row in allowed if row.evidence.points == 0]
    first = min(same, key=lambda row: row.time.step_s)
    if first.time.step_s <= WORTH * fastest.time.step_s:
        nearly = [row for row in same if row.time.step_s <= NEARLY * first.time.step_s]
        return next((row for row in nearly if row.mode == DDP), first)
    nearly = [row for row in allowed if row.time.step_s <= NEARLY * fastest.time.step_s]
    return max(nearly, key=lambda row: row.evidence.points or 0.0)


def _use(row: AdviceRow) -> str:
    packed = "" if row.compression == "none" else f", compression={row.compression!r}"
    return f"mode={row.mode!r}{packed}" + (', local_group="host"' if row.grouped else "")


def _ms(row: AdviceRow) -> str:
    return f"{1e3 * row.time.step_s:,.0f} ms"


def _is_allowed(row: AdviceRow, risk: str) -> bool:
    points = row.evidence.points
    if risk == "any":
        return True
    return points is not None and -points <= (LOW_POINTS if risk == "low" else 0.0)


def beyond_measured(situation: Situation) -> list[str]:
    """Returns how far the situation lies from every run that was measured, as text."""
    found = []
    values = {
        "workers": float(situation.num_workers),
        "Gbit/s": situation.link / 125e6,
        "parameters": float(situation.numel),
    }
    for name, value in values.items():
        least, most = MEASURED[name]
        if value > 1.01 * most:
            found.append(f"{value / most:.3g}x more {name} than any run")
        elif value < 0.99 * least:
            found.append(f"{least / value:.3g}x fewer {name} than any run")
    if situation.round_trip_s > TRIP_MAX_S:
        found.append(f"a round trip of {1e3 * situation.round_trip_s:g} ms")
    if is_too_large(situation.numel):
        found.append("more parameters than one job accepts (2^36)")
    return found
