"""The whole answer of `psworker advise`: numbers with sources, table, shards, lines, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pscore.timing.choice import AdviceRow
from pscore.timing.deployment import RATE_SOURCES
from pscore.timing.evidence import ALONE, DDP
from psworker.advice.choices import (
    ERROR,
    AdviceVerdict,
    ShardPlaces,
    beyond_measured,
    choose_row,
    plan_shards,
    rows_of,
)
from psworker.advice.situation import Situation
from psworker.advice.sizes import shown_nbytes, shown_numel

ERROR_SOURCE = (
    "docs/results/predictions.json: the worst of 12 runs on shaped links, all predicted first; "
    "`python -m benchmarks.predictions` makes new ones"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceReport:
    """The result of `psworker advise`."""

    situation: Situation
    rows: Sequence[AdviceRow]
    shards: ShardPlaces
    verdict: AdviceVerdict
    risk: str
    beyond: Sequence[str]  # How far the situation lies from every measured run.
    lines: Sequence[str]  # Lines to write.

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON can hold it."""
        shards = self.shards
        return {
            "verdict": self.verdict.text,
            "also": self.verdict.also,
            "use": self.verdict.row.mode,
            "limit": self.verdict.row.time.limit,
            "risk": self.risk,
            "table": [row.as_json() | {"error": self.error_of(row)} for row in self.rows],
            "error_source": ERROR_SOURCE,
            "beyond_measured": list(self.beyond),
            "shards": {
                "number": len(shards.hosts),
                "hosts": list(shards.hosts),
                "memory_nbytes": round(shards.nbytes),
                "cpu_share": round(shards.cpu_share, 3),
            },
            "lines": list(self.lines),
            "given": self.situation.as_json(),
            "rates": RATE_SOURCES,
        }

    def error_of(self, row: AdviceRow) -> float | None:
        """Returns the share by which a time may be wrong; None: nothing like it was measured."""
        return None if self.beyond or not row.is_measured else ERROR


def advise(situation: Situation, risk: str = "low") -> AdviceReport:
    """Returns the advice for a situation.

    Args:
        risk: One of `choices.RISKS`.

    Raises:
        ConfigError: There is no such risk.
    """
    shards = plan_shards(situation)
    rows = rows_of(situation, shards)
    verdict = choose_row(rows, risk)
    return AdviceReport(
        situation=situation,
        rows=rows,
        shards=shards,
        verdict=verdict,
        risk=risk,
        beyond=beyond_measured(situation),
        lines=_lines(situation, shards, verdict.row),
    )


def _lines(situation: Situation, shards: ShardPlaces, row: AdviceRow) -> list[str]:
    """Returns the lines to write: the commands of the hosts, and the line of the script."""
    hosts, here = len(situation.groups), max(situation.groups)
    train = "--rdzv-backend c10d --rdzv-endpoint host0:29400 train.py" if hosts > 1 else "train.py"
    launch = f"torchrun --nnodes {hosts} --nproc-per-node {here} {train}"
    if situation.has_sites:  # The hosts of a site are not known.
        there = ", ".join(f"{n} on site {site}" for site, n in enumerate(situation.groups))
        launch = f"torchrun --nnodes HOSTS --nproc-per-node HERE {train}  # Workers: {there}"
    if row.mode == ALONE:
        return ["python train.py"]
    if row.mode == DDP:
        return [launch, "model = torch.nn.parallel.DistributedDataParallel(model)"]
    servers = ",".join(f"host{host}:{7070 + n}" for n, host in _ports(shards.hosts))
    number = len(shards.hosts)
    where = "site" if situation.has_sites else "host"
    lines = [
        f"# on {where} {host}: psserver start --shards {number} --shard-index {index} --host "
        f"host{host} --port {7070 + port} --data-port {7170 + port} (docs/machines.md)"
        for index, (port, host) in enumerate(_ports(shards.hosts))
    ]
    arguments = [f'mode="{row.mode}"']
    if row.compression != "none":
        arguments.append(f'compression="{row.compression}"')
    if situation.overlap and not row.mode.startswith(("local", "diloco")):
        arguments.append("overlap=True")
    if here > 1:
        arguments.append('local_group="host"' if row.grouped else "local_group=None")
    joined = ", ".join(arguments)
    return [
        *_shortened(lines),
        f"export PACELINE_SERVERS={servers if number <= SHOWN_MAX else 'host0:7070,...'}",
        launch,
        "optimizer = psworker.DistributedOptimizer(optimizer, "
        f"named_parameters=model.named_parameters(), {joined})",
    ]


SHOWN_MAX = 8  # Shards whose lines are shown, each.


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= SHOWN_MAX:
        return lines
    return [*lines[:2], f"# ... and so on, {len(lines)} shards in all"]


def _ports(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns, for each shard, its place among those of its host, and the host."""
    seen: dict[int, int] = {}
    found = []
    for host in hosts:
        found.append((seen.get(host, 0), host))
        seen[host] = seen.get(host, 0) + 1
    return found


# ----- for people


def lines_of(report: AdviceReport) -> list[str]:
    """Returns the report as lines for a terminal."""
    situation, shards = report.situation, report.shards
    lines = [f"advice for {shown_numel(situation.numel)} parameters", ""]
    width = max(map(len, situation.sources))
    for name, each in situation.sources.items():
        lines.append(f"  {name:<{width}}  {each.value}   [{each.source}]")
    lines += ["", *_table(report), ""]
    if report.beyond:
        lines.append(f"not measured: {'; '.join(report.beyond)}. So no error is printed")
    else:
        lines.append(f"error: {ERROR_SOURCE}")
    where = "sites" if situation.has_sites else "hosts"
    places = ", ".join(map(str, sorted(set(shards.hosts))[:SHOWN_MAX]))
    more = ", ..." if len(set(shards.hosts)) > SHOWN_MAX else ""
    used = "shards" if report.verdict.row.num_shards else "shards, if you use some"
    if any(row.num_shards for row in report.rows):
        lines.append(
            f"{used}: {len(shards.hosts)}, on {where} {places}{more}; "
            f"{shown_nbytes(shards.nbytes)} of memory each (weights twice, state and sum twice for "
            f"the journal), their threads {shards.cpu_share:.0%} of an ssgd step"
        )
    verdict = [f"=> {report.verdict.text}"]
    if report.verdict.also:
        verdict.append(f"   {report.verdict.also}")
    return [*lines, "", *verdict, "", *report.lines]


def _table(report: AdviceReport) -> list[str]:
    names = [row.name for row in report.rows]
    limits = [row.time.limit for row in report.rows]
    wide, long = max(map(len, names)), max(map(len, limits))
    lines = [f"  {'way':<{wide}}  {'ms a step':>9}  {'+-':>4}  {'limit':<{long}}  accuracy"]
    for row in report.rows:
        error = report.error_of(row)
        about = "?" if error is None else f"{error:.0%}"
        mark = "*" if row is report.verdict.row else " "
        lines.append(
            f"{mark} {row.name:<{wide}}  {1e3 * row.time.step_s:>9,.0f}  {about:>4}  "
            f"{row.time.limit:<{long}}  {row.evidence.text}"
        )
    return lines
