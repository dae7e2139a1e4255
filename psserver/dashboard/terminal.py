"""The view of the dashboard for a terminal: `psserver top`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pscore.grid import WIDEST
from pscore.text import printable
from psserver.remote.status import in_bytes, in_time, is_live, published_lines
from psserver.remote.waits import advice_of, waits_of

SPARKS = "".join(map(chr, range(0x2581, 0x2589)))  # Blocks, from low to full.
SPARKS_MAX = 60
EVENTS_SHOWN = 8
WAITS_SHOWN = 4
READERS_SHOWN = 4
WORKERS_SHOWN = 40
LAST_WIDTH = 8  # Room for a part of the last column.
WORKERS_SHOWN_MIN = 3  # Also in a terminal of few lines.
RECENT_S = 10.0
HOT = 0.2  # Share of time in which others wait for a worker, from which on it is red.
STYLES = {"good": "green", "bad": "red", "info": "", "live": "green", "lost": "red"}


def picture(
    view: dict[str, Any], job: str | None = None, height: int | None = None
) -> RenderableType:
    """Returns a view (`History.view`) for `rich` to print.

    Args:
        job: Show only this job; None: all with live workers, else the newest.
        height: Lines of the terminal: workers and events are left out until it fits; None: the
            text may be longer than a screen.
    """
    status = view["status"]
    if status is None:
        return Text("no shard answers")
    jobs = [each for each in status["jobs"] if each["name"] == job] if job else _shown(status)
    clock = time.strftime("%H:%M:%S", time.localtime(view["now_s"]))
    parts: list[RenderableType] = [
        Text(f"cluster {printable(status['cluster'])}, {clock}", style="bold"),
        _shards(status),
    ]
    texts = [_lines(view, each) for each in jobs]
    events = list(reversed(view["events"][-EVENTS_SHOWN:]))
    room = WORKERS_SHOWN
    if height is not None:
        num_shards = len(status["shards"]) + len(status["silent"])
        left = height - num_shards - sum(len(lines) + 5 for lines in texts) - 4
        events = events[: max(2, min(EVENTS_SHOWN, left // 3))]
        room = max(WORKERS_SHOWN_MIN, (left - len(events)) // max(1, len(jobs)))
    for each, lines in zip(jobs, texts, strict=True):
        parts += [Text(), *lines, *_workers(each, min(room, WORKERS_SHOWN))]
    if job and not jobs:
        parts.append(Text(f"no job {printable(job)!r} here"))
    parts.append(Text())
    for event in events:
        clock = time.strftime("%H:%M:%S", time.localtime(event["t"]))
        parts.append(_line(f"{clock}  {printable(event['text'])}", STYLES[event["kind"]]))
    return Group(*parts)


def _shown(status: dict[str, Any]) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = status["jobs"]
    return [job for job in jobs if is_live(job)] or jobs[:1]


def _shards(status: dict[str, Any]) -> RenderableType:
    rows: list[tuple[object, ...]] = [
        (
            shard["index"],
            Text("answers", style="green"),
            in_time(shard["uptime_s"]),
            in_bytes(shard["memory_nbytes"]),
            in_bytes(shard["under_way_nbytes"]),
            shard["num_recoveries"],
            shard["address"],
        )
        for shard in status["shards"]
    ]
    silent = Text("silent", style="red")
    rows += [(s["index"], silent, "", "", "", "", s["address"]) for s in status["silent"]]
    names = ("shard", "state", "up", "memory", "under way", "recoveries", "address")
    return _Columns(names, sorted(rows, key=lambda row: str(row[0]).zfill(4)))


def _lines(view: dict[str, Any], job: dict[str, Any]) -> list[Text]:
    """Returns a job's name, its numbers, and the workers that others wait for."""
    columns, rows = view["columns"], view["rows"].get(job["name"], [])

    def newest(name: str) -> float | None:
        values = [v for t, v in _column(columns, rows, name) if t > view["now_s"] - RECENT_S]
        return sum(values) / len(values) if values else None

    age_s = job["checkpoint_age_s"]
    mode = "".join(f", {printable(table['mode'])}" for table in job["tables"][:1])
    num_live = sum(worker["state"] == "live" for worker in job["workers"])
    found = [
        Text(f"job {printable(job['name'])}, {job['state']}{mode}", style="bold"),
        _line(
            f"step {job['step']}, {_number(newest('steps_per_s'))} steps/s"
            + "".join(f", {printable(k)} {_reported(v)}" for k, v in job["reported"].items())
        ),
        _line(
            f"pushed {_rate(newest('pushed_per_s'))} (compressed {_ratio(job, 'pushed')}), "
            f"pulled {_rate(newest('pulled_per_s'))} (compressed {_ratio(job, 'pulled')})"
        ),
        _line(
            f"workers {num_live} of {job['num_workers']} live, {job['num_lost']} lost; "
            f"checkpoint {'none' if age_s is None else in_time(age_s) + ' ago'}"
        ),
    ]
    for name, title in (("steps_per_s", "steps/s"), ("loss", "loss")):
        values = [value for _, value in _column(columns, rows, name)][-SPARKS_MAX:]
        if values:
            found.append(_line(f"{title:8} {sparks(values)}"))
    waits = waits_of(job)
    texts = [f"waits for {printable(wait.in_words)}" for wait in waits[:WAITS_SHOWN]]
    found += [_line(text, "yellow") for text in texts]
    if len(waits) > WAITS_SHOWN:
        found.append(_line(f"and {len(waits) - WAITS_SHOWN} more waits"))
    if advice := advice_of(job):
        found.append(_line(printable(advice), "yellow"))
    return found + [
        _line(text) for text in published_lines(job.get("published", ()), READERS_SHOWN)
    ]


def _workers(job: dict[str, Any], room: int) -> list[RenderableType]:
    """Returns the workers of a job in the order of their ranks.

    If there are more than `room`, those are left out that the others wait for least.
    """
    workers = job["workers"]
    more = len(workers) - room
    if more > 0:
        worst = sorted(workers, key=_badness, reverse=True)[:room]
        workers = [worker for worker in workers if worker in worst]
    first = max((worker["step"] for worker in job["workers"]), default=0)
    rows = [
        (
            worker["rank"],
            Text(worker["state"], style=STYLES.get(worker["state"], "")),
            worker["step"],
            first - worker["step"],
            Text(
                _share(worker["recent"]["waited_for"]),
                style="red" if (worker["recent"]["waited_for"] or 0.0) > HOT else "",
            ),
            _step_time(worker["recent"]["step_s"]),
            *(_share(worker["recent"][name]) for name in ("wait", "hidden")),
            worker["staleness"],
            in_time(worker["last_heard_s"]),
            worker["host"],
        )
        for worker in workers
    ]
    names = (
        *("worker", "state", "step", "behind", "others\nwait for\nit", "step\ntime"),
        *("waits\nfor\nshards", "hidden", "stale-\nness", "heard", "host"),
    )
    parts: list[RenderableType] = [_Columns(names, rows)]
    if more > 0:
        parts.append(_line(f"and {more} more (psserver status shows all workers)"))
    return parts


def _badness(worker: dict[str, Any]) -> tuple[bool, float, int]:
    """Returns a key that is larger for workers that a person has to see."""
    is_live = worker["state"] == "live"
    return is_live, worker["recent"]["waited_for"] or 0.0, -worker["rank"]


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


class _Columns:
    """A table of one line a row, with as many of its columns as there is room for."""

    def __init__(self, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self._names = names
        self._rows = [
            [cell if isinstance(cell, Text) else _line(printable(str(cell))) for cell in row]
            for row in rows
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        widest, last = options.update(max_width=WIDEST), len(self._names)
        widths = [
            Measurement.get(console, widest, self._grid(number)).maximum
            for number in range(1, last + 1)
        ]
        if last > 1:  # The last column may be cut.
            widths[-1] = min(widths[-1], widths[-2] + LAST_WIDTH)
        fitting = [number for number, width in enumerate(widths, 1) if width <= options.max_width]
        yield self._grid(max(fitting, default=1))

    def _grid(self, number: int) -> Table:
        grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for index, name in enumerate(self._names[:number], 1):
            is_last = index == len(self._names)
            grid.add_column(name, no_wrap=not is_last, overflow="ellipsis", vertical="bottom")
        for row in self._rows:
            grid.add_row(*row[:number])
        return grid


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


def _reported(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{in_bytes(value)}/s"


def _step_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.0f} ms" if seconds < 1.0 else in_time(seconds)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _ratio(job: dict[str, Any], verb: str) -> str:
    nbytes, raw_nbytes = job[f"{verb}_nbytes"], job[f"raw_{verb}_nbytes"]
    return f"{raw_nbytes / nbytes:.1f}x" if nbytes else "1x"
