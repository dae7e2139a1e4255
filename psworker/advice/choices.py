"""The rows of advice: each mode's time, limit and evidence, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.net.wire import FLOAT_NBYTES
from pscore.partition import SHARDS_MAX
from pscore.rules import parse_mode
from pscore.timing.choice import (
    CANDIDATES,
    RISKS,
    WORTH,
    AdviceRow,
    Candidate,
    backup_candidate,
    choose,
    row_of,
)
from pscore.timing.closed import SHARD_CPU, closed_form, ring_form, shard_cpu_s
from pscore.timing.evidence import ALONE, DDP, EVIDENCE
from pscore.timing.memory import num_arrays
from pscore.timing.shown import in_ms, three_figures
from psworker.advice.situation import Situation
from psworker.advice.sizes import is_too_large

MUCH = 1.5  # As much faster is worth a sentence, at any risk.
SHARDS_PER_HOST = (2, 4, 8, 16, 32, 64)  # Where one is too few.
# The worst error of runs that were predicted first, docs/results/predictions.json, and the range of
# those and of the runs in hosts.json and step_hosts.json.
ERROR = 0.18
TRIP_MAX_S = 21e-3  # Longest round trip of these runs.
MEASURED = {"workers": (1, 4), "Gbit/s": (0.1, 1.0), "parameters": (1.6e6, 25.6e6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlaces:
    """Shards, their places, and the memory of each."""

    hosts: tuple[int, ...]  # The host, or site, of each shard.
    nbytes: float  # Memory of a shard in `ssgd`, with a journal as by default.
    cpu_share: float  # Share of an `ssgd` step in which a shard's threads are busy.


def plan_shards(situation: Situation) -> ShardPlaces:
    """Returns the fewest shards whose threads limit no step, on the hosts where they cost least."""
    grouped = is_grouped(situation)
    rule = parse_mode("ssgd")
    best: tuple[float, tuple[int, ...]] | None = None
    for hosts in _placements(situation):
        deployment = situation.deployment(hosts, grouped=grouped)
        if best is not None and len(hosts) > len(deployment.slices):
            break  # Some of them would have nothing.
        found = closed_form(deployment, rule)
        if best is None or found.step_s * WORTH < best[0]:
            best = found.step_s, hosts
        if found.limit != SHARD_CPU and not situation.has_sites:
            break
    assert best is not None
    hosts = best[1]
    deployment = situation.deployment(hosts, grouped=grouped)
    arrays = num_arrays(rule, situation.num_state, is_kept=True, is_estimated=False)
    return ShardPlaces(
        hosts=hosts,
        nbytes=FLOAT_NBYTES * situation.numel * arrays * max(deployment.shares()),
        cpu_share=shard_cpu_s(deployment, rule) / closed_form(deployment, rule).step_s,
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
        yield tuple(groups[:SHARDS_MAX])
        return
    yield tuple(groups[:SHARDS_MAX])
    for number in SHARDS_PER_HOST:
        if number * len(groups) <= SHARDS_MAX:
            yield tuple(host for host in groups for _ in range(number))


def rows_of(situation: Situation, shards: ShardPlaces) -> list[AdviceRow]:
    """Returns a row for each way to train that fits, in the order of the table."""
    mode = DDP if situation.num_workers > 1 else ALONE
    alone = AdviceRow(
        mode=mode,
        compression="none",
        grouped=False,
        time=ring_form(situation.deployment((0,))),
        evidence=EVIDENCE[mode],
        num_shards=0,
    )
    if is_too_large(situation.numel):
        return [alone]
    return [alone, *_shard_rows(situation, shards.hosts)]


def _shard_rows(situation: Situation, hosts: Sequence[int]) -> Iterator[AdviceRow]:
    grouped = is_grouped(situation)
    found = {is_one: situation.deployment(hosts, grouped=is_one) for is_one in {False, grouped}}
    for candidate in candidates_of(situation):
        ways = (False, True) if grouped and candidate.mode == "ssgd" else (grouped,)
        for is_one in ways:
            if row := row_of(found[is_one], candidate, grouped=is_one):
                yield row


def candidates_of(situation: Situation) -> tuple[Candidate, ...]:
    """Returns the modes that fit: with unequal workers also backup workers."""
    number = len(situation.groups) if is_grouped(situation) else situation.num_workers
    backup = backup_candidate(number)
    is_unequal = bool(situation.slow) or situation.deviation > 0
    return (*CANDIDATES, backup) if is_unequal else CANDIDATES


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceVerdict:
    """The way to train that is advised, and the reason."""

    row: AdviceRow  # The way to train.
    text: str  # The advice as one sentence.
    also: str = ""  # A clearly faster way at a higher risk, as a sentence; empty: none.


def require_risk(risk: str) -> None:
    """Raises a `ConfigError` if there is no such risk."""
    if risk not in RISKS:
        raise ConfigError(f"--risk is {risk!r}, must be one of {', '.join(RISKS)}")


def choose_row(rows: Sequence[AdviceRow], risk: str) -> AdviceVerdict:
    """Returns what to use at a risk.

    Args:
        risk: One of `RISKS`: `none` changes no update, `low` allows what lost at most half a point
            where that was measured, `any` everything.

    Raises:
        ConfigError: There is no such risk.
    """
    require_risk(risk)
    best = choose(rows, risk)
    any_way = choose(rows, "any")
    also = ""
    if any_way.time.step_s * MUCH < best.time.step_s:
        also = (
            f"{any_way.name} would take {_ms(any_way)} instead of {_ms(best)}: "
            f"{any_way.evidence.text}. Try it on your task"
        )
    first = choose(rows, "none")
    if best.mode == ALONE:
        text = "use one process without a job: one worker has nobody to wait for"
    elif len(rows) == 1:
        text = (
            "use DDP, or FSDP where a GPU does not hold the model: a job of Paceline has at most "
            "2^36 parameters"
        )
    elif best.mode == DDP:
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


def _use(row: AdviceRow) -> str:
    packed = "" if row.compression == "none" else f", compression={row.compression!r}"
    return f"mode={row.mode!r}{packed}" + (', local_group="host"' if row.grouped else "")


def _ms(row: AdviceRow) -> str:
    return in_ms(row.time.step_s)


def distance(situation: Situation) -> float:
    """Returns the largest factor by which a situation lies beyond every run; 1: by none."""
    return max((max(ratio, 1 / ratio) for ratio in _ratios(situation).values()), default=1.0)


def _ratios(situation: Situation) -> dict[str, float]:
    """Returns the numbers that lie beyond every run, each over the nearest one measured."""
    values = {
        "workers": float(situation.num_workers),
        "Gbit/s": situation.link / 125e6,
        "parameters": float(situation.numel),
    }
    found = {}
    for name, value in values.items():
        least, most = MEASURED[name]
        if not 0.99 * least <= value <= 1.01 * most:
            found[name] = value / (most if value > most else least)
    return found


def beyond_measured(situation: Situation) -> list[str]:
    """Returns how far the situation lies from every run that was measured, as text."""
    found = [
        f"{three_figures(max(ratio, 1 / ratio))}x {'more' if ratio > 1 else 'fewer'} {name} than "
        "any run"
        for name, ratio in _ratios(situation).items()
    ]
    if situation.round_trip_s > TRIP_MAX_S:
        found.append(f"a round trip of {1e3 * situation.round_trip_s:g} ms")
    if is_too_large(situation.numel):
        found.append("more parameters than one job accepts (2^36)")
    return found
