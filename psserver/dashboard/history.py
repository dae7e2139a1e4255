"""The status of a cluster over some hours: rates, means of a window, and events.

A state machine that is guarded by one lock: the thread that asks the shards adds to it, the threads
that serve the page read it. Memory is bounded: one row a second for a quarter of an hour, means of
15 of them for six hours, and the newest 300 events.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from psserver.dashboard.events import HistoryEvent, Status, changes
from psserver.remote.waits import advice_of, waits_of

FINE_MAX = 900  # Rows of a second.
COARSE = 15  # Rows that become one.
COARSE_MAX = 6 * 3600 // COARSE
EVENTS_MAX = 300
JOBS_MAX = 16  # Jobs with rows; of more, those without live workers are left out first.
WINDOW_S = 10.0  # Seconds of the shares and means of each worker: several heartbeats.
# A row of a job, after its time: seconds since 1970.
COLUMNS = (
    "step", "steps_per_s", "loss", "tokens_per_s", "pushed_per_s", "pulled_per_s",
    "push_ratio", "pull_ratio", "staleness", "waited_for",
)  # fmt: skip
Row = list[float | None]
Rows = dict[str, Row]  # By job.


class History:
    """The answers of the shards of one cluster, as they have come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fine: deque[tuple[float, Rows]] = deque(maxlen=FINE_MAX)
        self._coarse: deque[tuple[float, Rows]] = deque(maxlen=COARSE_MAX)
        self._events: deque[tuple[float, HistoryEvent]] = deque(maxlen=EVENTS_MAX)
        self._window: deque[tuple[float, Status]] = deque()
        self._status: Status | None = None
        self._answered_s = 0.0
        self._now_s = 0.0
        self._num_rows = 0

    def add(self, now_s: float, status: Status | None) -> None:
        """Adds an answer.

        Args:
            now_s: Seconds since 1970.
            status: Status of `psserver.remote.status.combine`; None: no shard has answered.
        """
        with self._lock:
            self._now_s = now_s
            if status is None:
                self._add_silence(now_s)
                return
            former = self._status
            if former is not None:
                self._events.extend((now_s, event) for event in changes(former, status))
            rows = _rows(self._window[-1] if self._window else None, now_s, status)
            self._status, self._answered_s = status, now_s
            self._window.append((now_s, status))
            while len(self._window) > 1 and now_s - self._window[0][0] > WINDOW_S:
                self._window.popleft()
            for job in self._with_window(status)["jobs"]:
                if job["name"] in rows:
                    rows[job["name"]].append(_slowest(job))
                    if (speed := _speed(job)) is not None:
                        rows[job["name"]][COLUMNS.index("steps_per_s")] = speed
            self._fine.append((now_s, rows))
            self._num_rows += 1
            if self._num_rows % COARSE == 0:
                self._coarse.append(_mean(list(self._fine)[-COARSE:]))

    def _add_silence(self, now_s: float) -> None:
        """Counts the shards of the last answer as silent."""
        if self._status is None or not self._status["shards"]:
            return
        shards = [*self._status["shards"], *self._status["silent"]]
        silent = [{"index": s["index"], "address": s["address"]} for s in shards]
        silent.sort(key=lambda shard: shard["index"])
        status = {**self._status, "shards": [], "silent": silent}
        self._events.extend((now_s, event) for event in changes(self._status, status))
        self._status = status

    def view(self, since_s: float = 0.0) -> dict[str, Any]:
        """Returns the newest status, with rows and events after `since_s`, as a JSON value."""
        with self._lock:
            status = self._status
            return {
                "now_s": self._now_s,
                "answered_s": self._answered_s,
                "columns": ["t", *COLUMNS],
                "status": None if status is None else self._with_window(status),
                "rows": self._since(since_s),
                "events": [
                    {"t": at_s, "kind": event.kind, "text": event.text}
                    for at_s, event in self._events
                    if at_s > since_s
                ],
            }

    def _since(self, since_s: float) -> dict[str, list[Row]]:
        """Returns the rows of each job after a time, the oldest first."""
        begin_s = self._fine[0][0] if self._fine else 0.0
        old = [(at_s, rows) for at_s, rows in self._coarse if since_s < at_s < begin_s]
        found: dict[str, list[Row]] = {}
        for at_s, rows in [*old, *((at_s, rows) for at_s, rows in self._fine if at_s > since_s)]:
            for name, row in rows.items():
                found.setdefault(name, []).append([round(at_s, 2), *row])
        return found

    def _with_window(self, status: Status) -> Status:
        """Returns the status, with waits, and the means of the last seconds for each worker."""
        begin_s, begin = self._window[0]
        seconds = self._window[-1][0] - begin_s
        former = {
            (job["name"], worker["rank"], worker["pid"]): worker
            for job in begin["jobs"]
            for worker in job["workers"]
        }
        jobs = [
            {
                **job,
                "waits": [wait._asdict() for wait in waits_of(job)],
                "advice": advice_of(job),
                "workers": [
                    {
                        **worker,
                        "recent": _recent(
                            former.get((job["name"], worker["rank"], worker["pid"])),
                            worker,
                            seconds,
                        ),
                    }
                    for worker in job["workers"]
                ],
            }
            for job in status["jobs"]
        ]
        return {**status, "jobs": jobs}


def _recent(
    former: dict[str, Any] | None, worker: dict[str, Any], seconds: float
) -> dict[str, float | None]:
    """Returns the means of a worker over the last seconds; None where there are none."""
    found: dict[str, float | None] = dict.fromkeys(("step_s", "wait", "hidden", "waited_for"))
    if former is None or seconds <= 0.0:
        return found
    pace, before = worker["pace"], former["pace"]
    count = pace["num_steps"] - before["num_steps"]
    steps_s, waits_s, requests_s = (
        pace[name] - before[name] for name in ("steps_s", "waits_s", "requests_s")
    )
    waited_s = worker["waited_for_s"] - former["waited_for_s"]
    if count > 0 and steps_s > 0.0:
        found["step_s"] = steps_s / count
        found["wait"] = _share(waits_s / steps_s)
    if requests_s > 0.0:
        found["hidden"] = _share(1.0 - waits_s / requests_s)
    if waited_s >= 0.0:
        found["waited_for"] = _share(waited_s / seconds)
    return found


def _slowest(job: dict[str, Any]) -> float | None:
    """Returns the share of time in which others waited for the worker they waited for most."""
    live = [worker["recent"] for worker in job["workers"] if worker["state"] == "live"]
    shares = [recent["waited_for"] for recent in live if recent["waited_for"] is not None]
    return max(shares, default=None)


def _speed(job: dict[str, Any]) -> float | None:
    """Returns the steps of training in a second, the mean of live workers; None: none reports it.

    A step of the shards may be a round of many steps, or come from workers that exchange models
    and push a few of them.
    """
    paces = [worker["recent"]["step_s"] for worker in job["workers"] if worker["state"] == "live"]
    speeds = [1.0 / step_s for step_s in paces if step_s is not None]
    return sum(speeds) / len(speeds) if speeds else None


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _rows(former: tuple[float, Status] | None, now_s: float, status: Status) -> Rows:
    """Returns a row of each job."""
    before: dict[str, dict[str, Any]] = {}
    seconds = 0.0
    if former is not None:
        seconds = now_s - former[0]
        # Sums over other processes than before cannot be compared.
        if _processes(former[1]) == _processes(status):
            before = {job["name"]: job for job in former[1]["jobs"]}
    jobs = sorted(status["jobs"], key=lambda job: job["state"] != "live")[:JOBS_MAX]
    return {job["name"]: _row(before.get(job["name"]), job, seconds) for job in jobs}


def _processes(status: Status) -> list[tuple[int, int]]:
    return [(shard["index"], shard["pid"]) for shard in status["shards"]]


def _row(former: dict[str, Any] | None, job: dict[str, Any], seconds: float) -> Row:
    reported = job["reported"]
    staleness = [w["staleness"] for w in job["workers"] if w["state"] == "live"]

    def delta(name: str) -> float | None:
        if former is None or seconds <= 0.0 or job[name] < former[name]:
            return None
        return float(job[name] - former[name])

    def rate(name: str) -> float | None:
        found = delta(name)
        return None if found is None else found / seconds

    def ratio(raw: str, sent: str) -> float | None:
        nbytes, raw_nbytes = delta(sent), delta(raw)
        return raw_nbytes / nbytes if nbytes and raw_nbytes is not None else None

    return [
        job["step"],
        rate("step"),
        reported.get("loss"),
        reported.get("tokens_per_s"),
        rate("pushed_nbytes"),
        rate("pulled_nbytes"),
        ratio("raw_pushed_nbytes", "pushed_nbytes"),
        ratio("raw_pulled_nbytes", "pulled_nbytes"),
        float(max(staleness, default=0)),
    ]


def _mean(rows: Sequence[tuple[float, Rows]]) -> tuple[float, Rows]:
    """Returns the means of some rows, at the time of the last one; None where none has a value."""
    found: dict[str, list[Row]] = {}
    for _, jobs in rows:
        for name, row in jobs.items():
            found.setdefault(name, []).append(row)

    def mean(values: Sequence[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return sum(there) / len(there) if there else None

    means = {
        name: [listed[-1][0], *(mean(values) for values in list(zip(*listed, strict=True))[1:])]
        for name, listed in found.items()
    }
    return rows[-1][0], means
