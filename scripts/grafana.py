"""Writes the Grafana dashboard, deploy/grafana/paceline.json, from the panels listed here.

    python scripts/grafana.py           # writes the file
    python scripts/grafana.py --check   # exit code 1 if the file differs

Prometheus renames the label `job`, the training job, to `exported_job`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "paceline.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 7  # Of a panel; a row of the dashboard is 24 wide.
JOB = 'exported_job=~"$job"'
BY_WORKER = "by (exported_job, worker)"
BY_READER = "by (exported_job, host, pid, reader)"
READER = "{{exported_job}} {{host}} pid {{pid}}"
NOT_YET = 'answer="not_yet"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: its expressions, each with the legend of its series."""

    title: str
    about: str
    unit: str
    expressions: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def rate(name: str, *labels: str) -> str:
    """Returns the rate of a counter in the chosen jobs."""
    return f"rate({name}{{{', '.join((JOB, *labels))}}}[$__rate_interval])"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Speed": (
        Panel(
            title="Steps per second",
            about="Each worker's steps.",
            unit="ops",
            expressions=(
                (
                    f"sum {BY_WORKER} ({rate('paceline_worker_step_seconds_count')})",
                    "{{exported_job}} worker {{worker}}",
                ),
            ),
        ),
        Panel(
            title="Seconds of a step",
            about="From the end of one step to the end of the next: data, forward, backward, and "
            "the wait for weights.",
            unit="s",
            expressions=(
                (
                    f"sum {BY_WORKER} ({rate('paceline_worker_step_seconds_sum')}) / "
                    f"sum {BY_WORKER} ({rate('paceline_worker_step_seconds_count')})",
                    "{{exported_job}} worker {{worker}}",
                ),
                (
                    f"sum {BY_WORKER} ({rate('paceline_worker_pull_wait_seconds_total')}) / "
                    f"sum {BY_WORKER} ({rate('paceline_worker_step_seconds_count')})",
                    "{{exported_job}} worker {{worker}}: wait",
                ),
            ),
        ),
        Panel(
            title="Communication hidden behind computation",
            about="Share of the time with pushes or pulls under way in which the worker did not "
            "wait for them.",
            unit="percentunit",
            expressions=(
                (
                    f"1 - sum {BY_WORKER} ({rate('paceline_worker_pull_wait_seconds_total')}) / "
                    f"sum {BY_WORKER} ({rate('paceline_worker_request_seconds_total')})",
                    "{{exported_job}} worker {{worker}}",
                ),
            ),
        ),
        Panel(
            title="Loss",
            about="Mean of the values that workers report: optimizer.report(loss=...).",
            unit="none",
            expressions=(
                (
                    f'avg by (exported_job) (paceline_reported{{{JOB}, name="loss"}})',
                    "{{exported_job}}",
                ),
            ),
        ),
        Panel(
            title="Updates per second",
            about="Updates of slices by the optimizer, on each shard.",
            unit="ops",
            expressions=(
                (
                    "sum by (instance) (rate(paceline_updates_total[$__rate_interval]))",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            title="Seconds to apply a push (99 of 100)",
            about="Decoding and adding one push, with the update where both are one pass.",
            unit="s",
            expressions=(
                (
                    "histogram_quantile(0.99, sum by (instance, le) "
                    "(rate(paceline_apply_seconds_bucket[$__rate_interval])))",
                    "{{instance}}",
                ),
            ),
        ),
    ),
    "Who waits for whom": (
        Panel(
            title="Share of time in which others wait for a worker",
            about="At a step or a barrier; sampled once a second on each shard.",
            unit="percentunit",
            expressions=(
                (
                    f"max {BY_WORKER} ({rate('paceline_waited_for_seconds_total')})",
                    "{{exported_job}} worker {{worker}}",
                ),
            ),
        ),
        Panel(
            title="Steps behind the first worker",
            about="0: the first.",
            unit="none",
            expressions=(
                (
                    f"max by (exported_job) (paceline_worker_step{{{JOB}}}) "
                    "- on (exported_job) group_right () "
                    f"max {BY_WORKER} (paceline_worker_step{{{JOB}}})",
                    "{{exported_job}} worker {{worker}}",
                ),
            ),
        ),
        Panel(
            title="Staleness of gradients",
            about="Updates between the weights that a gradient was computed from and those that "
            "it is applied to.",
            unit="none",
            kind="heatmap",
            expressions=(
                (
                    "sum by (le) (increase(paceline_staleness_steps_bucket[$__rate_interval]))",
                    "{{le}}",
                ),
            ),
        ),
        Panel(
            title="Pulls that had to wait",
            about="Pulls that were answered with `not yet`; the worker asks again.",
            unit="ops",
            expressions=(
                (
                    f"sum by (exported_job) ({rate('paceline_pull_requests_total', NOT_YET)})",
                    "{{exported_job}}",
                ),
            ),
        ),
        Panel(
            title="Pushes by verdict",
            about="Accepted, duplicate or too late to count.",
            unit="ops",
            expressions=(
                (
                    f"sum by (exported_job, verdict) ({rate('paceline_push_requests_total')})",
                    "{{exported_job}} {{verdict}}",
                ),
            ),
        ),
        Panel(
            title="Open steps",
            about="Steps with pushes and without an update, of the slice with most.",
            unit="none",
            expressions=(
                (f"max by (exported_job) (paceline_open_steps{{{JOB}}})", "{{exported_job}}"),
            ),
        ),
    ),
    "Bytes": (
        Panel(
            title="Bytes per second",
            about="Payloads of pushes (received by shards) and pulls (sent).",
            unit="Bps",
            expressions=(
                (
                    f"sum by (exported_job, direction) ({rate('paceline_job_bytes_total')})",
                    "{{exported_job}} {{direction}}",
                ),
            ),
        ),
        Panel(
            title="Compression",
            about="Uncompressed bytes over payload bytes, in both directions.",
            unit="none",
            expressions=(
                (
                    f"sum by (exported_job, direction) "
                    f"({rate('paceline_job_uncompressed_bytes_total')}) / "
                    f"sum by (exported_job, direction) ({rate('paceline_job_bytes_total')})",
                    "{{exported_job}} {{direction}}",
                ),
                (
                    f"max by (exported_job, direction) (paceline_compression_ratio{{{JOB}}})",
                    "{{exported_job}} {{direction}}: since the begin",
                ),
            ),
        ),
        Panel(
            title="Bytes under way",
            about="Of pushes and answers that wait, and their limit.",
            unit="bytes",
            expressions=(
                ("sum by (instance) (paceline_under_way_bytes)", "{{instance}}"),
                ("min(paceline_under_way_limit_bytes)", "limit"),
            ),
        ),
    ),
    "Health": (
        Panel(
            title="Shards that answer",
            about="Of those that Prometheus scrapes.",
            unit="none",
            expressions=(('sum(up{job=~".*paceline.*"})', "up"), ("count(paceline_jobs)", "known")),
        ),
        Panel(
            title="Live workers",
            about="Those that hold a lease, and those lost so far.",
            unit="none",
            expressions=(
                (f"max by (exported_job) (paceline_workers_live{{{JOB}}})", "{{exported_job}}"),
                (
                    f"max by (exported_job) (paceline_workers_lost_total{{{JOB}}})",
                    "{{exported_job}}: lost",
                ),
            ),
        ),
        Panel(
            title="Recoveries of shards",
            about="Processes that have continued jobs from their journals.",
            unit="none",
            expressions=(("sum by (instance) (paceline_recoveries_total)", "{{instance}}"),),
        ),
        Panel(
            title="Age of the newest checkpoint",
            about="Without one, the time since the shard has the job.",
            unit="s",
            expressions=(
                (
                    f"max by (exported_job) (paceline_checkpoint_age_seconds{{{JOB}}})",
                    "{{exported_job}}",
                ),
            ),
        ),
        Panel(
            title="Memory",
            about="Of each shard's process, its tables and its journals.",
            unit="bytes",
            expressions=(
                ('process_resident_memory_bytes{job=~".*paceline.*"}', "{{instance}}"),
                ("paceline_table_bytes", "{{instance}} tables"),
                ("paceline_journal_bytes", "{{instance}} journals"),
            ),
        ),
        Panel(
            title="Cores",
            about="Seconds of CPU per second of each shard.",
            unit="none",
            expressions=(
                (
                    'rate(process_cpu_seconds_total{job=~".*paceline.*"}[$__rate_interval])',
                    "{{instance}}",
                ),
            ),
        ),
    ),
    "Readers of weights": (
        Panel(
            title="Seconds behind the newest version",
            about="Since when there is a version that a reader does not use yet.",
            unit="s",
            expressions=((f"max {BY_READER} (paceline_reader_lag_seconds{{{JOB}}})", READER),),
        ),
        Panel(
            title="Steps behind the newest version",
            about="Steps of training; in an asynchronous mode 0.",
            unit="none",
            expressions=((f"max {BY_READER} (paceline_reader_lag_steps{{{JOB}}})", READER),),
        ),
        Panel(
            title="Bytes to readers per second",
            about="By form: whole weights, or one of the forms of differences.",
            unit="Bps",
            expressions=(
                (
                    f"sum by (exported_job, form) ({rate('paceline_published_bytes_total')})",
                    "{{exported_job}} {{form}}",
                ),
            ),
        ),
    ),
}


def expressions() -> list[str]:
    """Returns the expressions of all panels."""
    panels = [panel for row in ROWS.values() for panel in row]
    return [expression for panel in panels for expression, _ in panel.expressions]


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place})
        top += 1
        for number, panel in enumerate(row):
            left, down = WIDTH * (number % 3), HEIGHT * (number // 3)
            place = {"h": HEIGHT, "w": WIDTH, "x": left, "y": top + down}
            panels.append({**_panel(panel), "gridPos": place})
        top += HEIGHT * -(-len(row) // 3)
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "uid": "paceline",
        "title": "Paceline",
        "tags": ["paceline"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _job()]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    is_map = panel.kind == "heatmap"
    made: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "format": "heatmap" if is_map else "time_series",
            }
            for number, (expression, legend) in enumerate(panel.expressions)
        ],
    }
    if panel.title == "Loss":
        del made["fieldConfig"]["defaults"]["min"]
    return made


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _job() -> dict[str, Any]:
    query = "label_values(paceline_workers_live, exported_job)"
    return {
        "name": "job",
        "label": "Job",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "job"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def main() -> int:
    """Writes or checks the file; returns the exit code."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        if FILE.read_text("utf-8") == text:
            return 0
        print("deploy/grafana/paceline.json differs: python scripts/grafana.py")
        return 1
    FILE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
