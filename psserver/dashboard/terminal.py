"""The view of the dashboard for a terminal: `psserver top`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from pscore.text import printable
from psserver.remote.status import grid, in_bytes, in_time, is_live

SPARKS = "".join(map(chr, range(0x2581, 0x2589)))  # Blocks, from low to full.
SPARKS_MAX = 60
EVENTS_SHOWN = 8
WORKERS_SHOWN = 40
RECENT_S = 10.0
STYLES = {"good": "green", "bad": "red", "info": ""}


def picture(view: dict[str, Any], job: str | None = None) -> RenderableType:
    """Returns a view (`History.view`) for `rich` to print.

    Args:
        view: The view.
        job: Show only this job; None: all with live workers, else the newest.
    """
    status = view["status"]
    if status is None:
        return Text("no shard answers")
    jobs = [each for each in status["jobs"] if each["name"] == job] if job else _shown(status)
    parts: list[RenderableType] = [_head(view, status)]
    for each in jobs:
        parts += _job(view, each)
    if job and not jobs:
        parts.append(Text(f"no job {printable(job)!r} here"))
    events = view["events"][-EVENTS_SHOWN:]
    for event in reversed(events):
        clock = time.strftime("%H:%M:%S", time.localtime(event["t"]))
        parts.append(Text(f"{clock}  {printable(event['text'])}", style=STYLES[event["kind"]]))
    return Group(*parts)


def _shown(status: dict[str, Any]) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = status["jobs"]
    return [job for job in jobs if is_live(job)] or jobs[:1]


def _head(view: dict[str, Any], status: dict[str, Any]) -> RenderableType:
    rows = [
        (
            shard["index"],
            shard["address"],
            "answers",
            in_time(shard["uptime_s"]),
            in_bytes(shard["memory_nbytes"]),
            in_bytes(shard["under_way_nbytes"]),
            shard["num_recoveries"],
        )
        for shard in status["shards"]
    ]
    rows += [(s["index"], s["address"], "SILENT", "", "", "", "") for s in status["silent"]]
    clock = time.strftime("%H:%M:%S", time.localtime(view["now_s"]))
    names = ("shard", "address", "state", "up", "memory", "under way", "recoveries")
    table: RenderableType = grid(f"cluster {status['cluster']}, {clock}", names, sorted(rows))
    return table


def _job(view: dict[str, Any], job: dict[str, Any]) -> list[RenderableType]:
    columns, rows = view["columns"], view["rows"].get(job["name"], [])

    def newest(name: str) -> float | None:
        values = [v for t, v in _column(columns, rows, name) if t > view["now_s"] - RECENT_S]
        return sum(values) / len(values) if values else None

    age_s = job["checkpoint_age_s"]
    lines = [
        f"step {job['step']}, {_number(newest('steps_per_s'))} steps/s"
        + "".join(f", {printable(k)} {v:.4g}" for k, v in job["reported"].items()),
        f"pushed {_rate(newest('pushed_per_s'))} (compressed {_ratio(job, 'pushed')}), "
        f"pulled {_rate(newest('pulled_per_s'))} (compressed {_ratio(job, 'pulled')}), "
        f"checkpoint {'none' if age_s is None else in_time(age_s) + ' ago'}, "
        f"lost workers {job['num_lost']}",
    ]
    for name, title in (("steps_per_s", "steps/s"), ("loss", "loss")):
        values = [value for _, value in _column(columns, rows, name)][-SPARKS_MAX:]
        if values:
            lines.append(f"{title:8} {sparks(values)}")
    waits = [*job["waiting_for"], *(text for t in job["tables"] for text in t["waiting_for"])]
    lines += [f"waits for {printable(text)}" for text in dict.fromkeys(waits)]
    more = len(job["workers"]) - WORKERS_SHOWN
    if more > 0:
        lines.insert(0, f"and {more} more (psserver status shows all workers)")
    return [_workers(job), Text("\n".join(lines))]


def _workers(job: dict[str, Any]) -> RenderableType:
    first = max((worker["step"] for worker in job["workers"]), default=0)
    rows = [
        (
            worker["rank"],
            worker["state"],
            worker["step"],
            first - worker["step"],
            "" if worker["recent"]["step_s"] is None else in_time(worker["recent"]["step_s"]),
            *(_share(worker["recent"][name]) for name in ("wait", "hidden", "waited_for")),
            worker["staleness"],
            f"{in_time(worker['last_heard_s'])} ago",
            worker["host"],
        )
        for worker in job["workers"][:WORKERS_SHOWN]
    ]
    names = (
        *("worker", "state", "step", "behind", "step time", "waits for shards", "hidden"),
        *("others wait for it", "staleness", "heard", "host"),
    )
    mode = ", ".join(table["mode"] for table in job["tables"][:1])
    table: RenderableType = grid(f"job {job['name']} {mode}", names, rows)
    return table


def _column(
    columns: Sequence[str], rows: Sequence[Sequence[float | None]], name: str
) -> list[tuple[float, float]]:
    """Returns time and value of the rows that have one."""
    index = columns.index(name)
    return [(float(row[0] or 0.0), value) for row in rows if (value := row[index]) is not None]


def sparks(values: Sequence[float]) -> str:
    """Returns values as a line of bars, the lowest and the highest of them at both ends."""
    low, high = min(values), max(values)
    span = high - low or 1.0
    bars = (SPARKS[int((value - low) / span * (len(SPARKS) - 1))] for value in values)
    return f"{''.join(bars)} {low:.4g} to {high:.4g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{in_bytes(value)}/s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _ratio(job: dict[str, Any], verb: str) -> str:
    nbytes, raw_nbytes = job[f"{verb}_nbytes"], job[f"raw_{verb}_nbytes"]
    return f"{raw_nbytes / nbytes:.1f}x" if nbytes else "1x"
