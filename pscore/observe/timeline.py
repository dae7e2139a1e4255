"""A timeline of a process, as a Chrome trace that Perfetto and chrome://tracing open.

A process with PACELINE_TIMELINE=trace.json keeps its last spans in a ring and writes them at its
end to a file of its own, `trace.worker0.json` or `trace.shard0.json`; `psworker timeline` joins the
files. Without the variable nothing is recorded, and each place costs one test of None.

Times are those of the monotonic clock, which all processes of a Linux host share (containers too),
so that their spans fit to the nanosecond. Between hosts, or boots, the wall clocks decide,
and spans fit as well as those are set.

Spans of one thread nest, as its calls do. A span that lasts while its thread does other work (a
push) is on a track of its own name: as many rows as there were at once.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pscore.commandline import replaceable
from pscore.errors import ConfigError
from pscore.json_text import to_json
from pscore.observe.boot import boot_id

log = logging.getLogger("paceline")
SPANS_MAX = 100_000  # Most spans of a process: about 20 MB of JSON.
TRACK_TID = 1 << 20  # Above the numbers of threads, which count from 1.

Span = tuple[str, int, int, int, str, Mapping[str, Any]]  # Name, begin, end, thread, track, args.


class Timeline:
    """The spans of this process; all methods may be called from any thread."""

    def __init__(self, path: Path, process: str, spans_max: int = SPANS_MAX) -> None:
        """Starts empty.

        Args:
            path: The file that `write` makes.
            process: Name of the process: `worker 0`.
            spans_max: So many of the last spans are kept.
        """
        self.path = path
        self._process = process
        self._spans: deque[Span] = deque(maxlen=spans_max)
        self._num_spans = 0
        self._threads: dict[int, str] = {}
        self._lock = threading.Lock()

    @staticmethod
    def now_ns() -> int:
        """Returns the time at which a span begins."""
        return time.monotonic_ns()

    def span(
        self, name: str, begin_ns: int, *, end_ns: int | None = None, track: str = "", **args: Any
    ) -> None:
        """Records a span that has just ended.

        Args:
            begin_ns: `now_ns` at its begin.
            end_ns: `now_ns` at its end, if that is not now.
            track: Where it is shown; by default with the calling thread.
            **args: Further fields for a reader: numbers and strings.
        """
        end_ns = time.monotonic_ns() if end_ns is None else end_ns
        thread = threading.get_ident()
        with self._lock:
            if thread not in self._threads:
                self._threads[thread] = threading.current_thread().name
            self._num_spans += 1
            self._spans.append((name, begin_ns, end_ns, thread, track, args))

    def write(self) -> None:
        """Writes the file; a failure is logged and has no other effect."""
        with self._lock:
            spans, threads = list(self._spans), dict(self._threads)
            num_dropped = self._num_spans - len(spans)
        if num_dropped:
            log.warning(
                "%s has only the last %d spans, %d before them are gone",
                self.path,
                len(spans),
                num_dropped,
            )
        pid = os.getpid()
        trace = {
            "traceEvents": [*_labels(pid, self._process, threads), *_events(pid, spans, threads)],
            "displayTimeUnit": "ms",
            "otherData": {
                "process": self._process,
                "dropped": num_dropped,
                "host": boot_id()
                or socket.gethostname(),  # Processes of one host share a monotonic clock.
                "wall_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
            },
        }
        try:
            _write(self.path, trace)
        except OSError as problem:
            log.warning("no timeline: cannot write %s: %s", self.path, problem)


@contextlib.contextmanager
def recorded(timeline: Timeline | None, name: str, **args: Any) -> Iterator[None]:
    """Records the body of a `with` block as a span, unless it raises; None records nothing."""
    begin_ns = 0 if timeline is None else timeline.now_ns()
    yield
    if timeline is not None:
        timeline.span(name, begin_ns, **args)


def open_timeline(path: str | Path | None, kind: str, index: int) -> Timeline | None:
    """Returns a process's timeline, or None if it is off.

    Args:
        path: As PACELINE_TIMELINE has it: the process's own name goes before the suffix.
        kind: `worker` or `shard`.
    """
    if not path:
        return None
    path = Path(path).absolute()
    return Timeline(
        path.with_name(f"{path.stem}.{kind}{index}{path.suffix or '.json'}"), f"{kind} {index}"
    )


def require_folder(path: str | Path | None) -> None:
    """Raises a `ConfigError` if there is no folder for a timeline, before hours are recorded."""
    folder = Path(path or "").absolute().parent
    if path and not os.access(folder, os.W_OK):
        raise ConfigError(
            f"no timeline can be written to {path} (PACELINE_TIMELINE): {folder} is no folder "
            "that can be written to; make it, or name another one"
        )


def join(paths: Sequence[Path], out: Path) -> list[str]:
    """Joins the files of several processes into one, which begins at 0.

    Each push of a worker points to where a shard decodes it.

    Args:
        paths: Files that `Timeline.write` wrote.
        out: Path of the merged trace to write.

    Returns:
        A description of the file, a line for each process.

    Raises:
        ConfigError: A file is not a timeline, or `out` cannot be written.
    """
    offsets: dict[str, int] = {}  # Offset of each host's monotonic clock.
    events: list[dict[str, Any]] = []
    lines = []
    traces = [_read(path) for path in paths]
    for number, trace in enumerate(sorted(traces, key=_place), start=1):
        about = trace["otherData"]
        # One number for all of a host: their clocks are the same, to the nanosecond. It is taken
        # relative to the first host's: microseconds since 1970 leave a float no nanoseconds.
        offset_ns = offsets.setdefault(about["host"], about["wall_minus_monotonic_ns"])
        shift_ns = offset_ns - next(iter(offsets.values()))
        moved = [_moved(event, number, shift_ns) for event in trace["traceEvents"]]
        events += [*moved, _metadata("process_sort_index", number, 0, {"sort_index": number})]
        num_spans = sum(event["ph"] == "X" for event in moved)
        gone = f", {about['dropped']} before them are gone" if about["dropped"] else ""
        lines.append(f"{about['process']}: {num_spans} spans{gone}")
    begin_us = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    for event in events:
        if event["ph"] != "M":
            event["ts"] = round(event["ts"] - begin_us, 3)
    joined = {"traceEvents": [*events, *_arrows(events)], "displayTimeUnit": "ms"}
    try:
        _write(out, joined)
    except OSError as problem:
        raise ConfigError(f"cannot write {out}: {problem.strerror}") from None
    return lines


# ----- inside


def _labels(pid: int, process: str, threads: Mapping[int, str]) -> list[dict[str, Any]]:
    named = enumerate(threads.values(), start=1)
    return [
        _metadata("process_name", pid, 0, {"name": process}),
        *(_metadata("thread_name", pid, tid, {"name": name}) for tid, name in named),
    ]


def _metadata(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": dict(args)}


def _events(
    pid: int, spans: Iterable[Span], threads: Mapping[int, str]
) -> Iterable[dict[str, Any]]:
    """Returns complete events, in the order of their begins; an outer span before an inner one."""
    tids = {thread: tid for tid, thread in enumerate(threads, start=1)}
    rows = _Rows(pid)
    spans = sorted(spans, key=lambda span: (span[1], -span[2]))
    for name, begin_ns, end_ns, thread, track, args in spans:
        tid = rows.take(track, begin_ns, end_ns) if track else tids[thread]
        yield {
            "ph": "X",
            "name": name,
            "cat": "paceline",
            "pid": pid,
            "tid": tid,
            "ts": begin_ns / 1e3,
            "dur": (end_ns - begin_ns) / 1e3,
            "args": dict(args),
        }
    yield from rows.labels


class _Rows:
    """Rows of the tracks, as few as hold their spans without two on top of each other."""

    def __init__(self, pid: int) -> None:
        self.labels: list[dict[str, Any]] = []
        self._pid = pid
        self._rows: dict[str, list[tuple[int, int]]] = {}  # Free from, number of the row.

    def take(self, track: str, begin_ns: int, end_ns: int) -> int:
        """Returns the row of a span, which begins no earlier than the one before it."""
        rows = self._rows.setdefault(track, [])
        if rows and rows[0][0] <= begin_ns:
            _, tid = heapq.heappop(rows)
        else:
            tid = TRACK_TID + len(self.labels)
            self.labels.append(_metadata("thread_name", self._pid, tid, {"name": track}))
        heapq.heappush(rows, (end_ns, tid))
        return tid


def _write(path: Path, trace: Mapping[str, Any]) -> None:
    """Writes a file atomically."""
    path = replaceable(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        draft.write_text(to_json(trace), encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        about = trace["otherData"]
        _ = trace["traceEvents"], about["host"], about["process"], about["dropped"]
        _ = about["wall_minus_monotonic_ns"]
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not the timeline of one process") from None
    return trace


def _place(trace: Mapping[str, Any]) -> tuple[bool, int]:
    """Returns the position of a process: workers first, each kind by number."""
    kind, _, number = trace["otherData"]["process"].partition(" ")
    return kind != "worker", int(number) if number.isdecimal() else 0


def _moved(event: Mapping[str, Any], pid: int, shift_ns: int) -> dict[str, Any]:
    """Returns an event with the number of its process in the joined file, on the first clock."""
    moved = {**event, "pid": pid}
    if "ts" in event:
        moved["ts"] = event["ts"] + shift_ns / 1e3
    return moved


def _arrows(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the arrows from each push of a worker to its arrival at a shard."""
    begun: dict[tuple[object, ...], Mapping[str, Any]] = {}
    keys = ("job", "table", "slice", "worker", "step", "role")
    for event in events:
        if event["name"] == "push":
            begun[tuple(event["args"].get(key) for key in keys)] = event
    arrows: list[dict[str, Any]] = []
    for event in events:
        if event["name"] != "decode":
            continue
        push = begun.pop(tuple(event["args"].get(key) for key in keys), None)
        if push is not None:
            common = {"name": "push", "cat": "paceline", "id": len(arrows) + 1}
            for kind, at in (("s", push), ("f", event)):
                where = {"pid": at["pid"], "tid": at["tid"], "ts": at["ts"]}
                arrows.append({"ph": kind, "bp": "e", **common, **where})
    return arrows
