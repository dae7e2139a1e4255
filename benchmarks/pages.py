"""Writes the tables that pages show of the code or of a result: `python -m benchmarks.pages`.

A page marks the place of such a table with two comments, `<!-- begin NAME -->` and
`<!-- end NAME -->`. This program replaces the text between them. Nothing is measured. With
`--check` it writes nothing and ends with 1 if a page differs; a test does the same.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from typer.main import get_command

from benchmarks import (
    choosing,
    growth_tables,
    newest_tables,
    pipeline_kills,
    pipeline_learning,
    round_tables,
)
from benchmarks.exchanges import tables as exchange_tables
from benchmarks.hosts import DDP
from benchmarks.learning import tables
from benchmarks.markdown import machine, table
from benchmarks.survival import tables as survival_tables
from psserver import exits as psserver_exits
from psserver.commands import cli as psserver_cli
from psserver.decisions.shard import Shard
from psserver.engine.engine import Engine
from psserver.process.settings import SECTIONS
from psserver.publish.publications import Publications
from psserver.service.metrics import ShardCollector
from psserver.service.publish_metrics import PublicationCollector
from psserver.service.standby_metrics import StandbyCollector, StandbyView
from psworker import exits as psworker_exits
from psworker.commands import cli as psworker_cli

ROOT = Path(__file__).resolve().parents[1]


# ----- settings, commands and exit codes: docs/reference.md


def settings() -> str:
    """Returns the settings of `psserver start`, from the classes that check them."""
    rows = []
    for section, kind in SECTIONS.items():
        prefix = "" if section == "server" else f"{section}-"
        for name, field in kind.model_fields.items():
            rows.append(
                [
                    f"`--{prefix}{name.replace('_', '-')}`",
                    f"`{kind.model_config['env_prefix']}{name.upper()}`",
                    "; ".join(part for part in (_default(field), _bounds(field)) if part),
                    " ".join((field.description or "").split()),
                ]
            )
    return table(["flag", "variable", "default; range", "meaning"], rows)


def _default(field: FieldInfo) -> str:
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _bounds(field: FieldInfo) -> str:
    bounds = {
        key: getattr(item, key)
        for item in field.metadata
        for key in ("ge", "le")
        if hasattr(item, key)
    }
    if bounds:
        return f"{bounds['ge']:.12g} to {bounds['le']:.12g}"
    choices = getattr(field.annotation, "__args__", ())
    return ", ".join(f"`{choice}`" for choice in choices if isinstance(choice, str))


def exit_codes() -> str:
    """Returns every exit code of both programs."""
    meanings = {
        program: {int(code): meaning for code, meaning in listed.items()}
        for program, listed in (
            ("psserver", psserver_exits.MEANINGS),
            ("psworker", psworker_exits.MEANINGS),
        )
    }
    codes = sorted({code for listed in meanings.values() for code in listed})
    rows = [[str(code), *(listed.get(code, "") for listed in meanings.values())] for code in codes]
    return table(["exit code", "`psserver`", "`psworker`"], rows, "r")


def commands() -> str:
    """Returns every command of both programs with its arguments and options."""
    rows = []
    for program, app in (("psserver", psserver_cli.app), ("psworker", psworker_cli.app)):
        for words, command in _leaves([program], get_command(app)):
            first = " ".join((command.help or "").split("\n\n")[0].split())
            given = [_shown(item) for item in command.params if not getattr(item, "hidden", False)]
            if words == ["psserver", "start"]:
                given = ["`--detach`, `--config FILE`, and the settings above"]
            rows.append([f"`{' '.join(words)}`", first, ", ".join(given)])
    return table(["command", "what it does", "arguments and options"], rows)


def _leaves(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from _leaves([*words, name], inner)


def _shown(item: Any) -> str:
    if item.param_type_name == "option":
        return f"`{max(item.opts, key=len)}`"
    return f"`{(item.name or '').upper()}`"


def metrics() -> str:
    """Returns every metric of a shard with its labels."""
    ends = {"counter": "_total", "info": "_info"}
    rows = []
    engine = Engine(Shard(0, 1, lease_s=10.0), now=lambda: 0.0)
    published = PublicationCollector(Publications(engine, {}))
    parts = (ShardCollector(engine), published, StandbyCollector(StandbyView))
    for family in (family for part in parts for family in part.collect()):
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        kind = f"{family.type.capitalize()}. " if family.type in ("histogram", "summary") else ""
        name = f"`{family.name}{ends.get(family.type, '')}`"
        rows.append([name, labels, f"{kind}{family.documentation}"])
    return table(["metric", "labels", "meaning"], rows)


def dashboard() -> str:
    """Returns the cost of a look of the dashboard, from the newest result."""
    figures = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    median, most = figures["look_ms"]["median"], figures["look_ms"]["max"]
    row = [
        f"{figures['shards']} shards, {figures['workers']} workers",
        f"{median:.2f} ms; the shard with most {most:.2f} ms",
        f"{median / 10:.2f}% of a core",
    ]
    looks = table(["cluster", "a shard's CPU for one look", "at one look a second"], [row])
    if "poll" not in figures:
        return looks
    poll = figures["poll"]
    shard, memory = poll["shard_percent_of_core"], poll["page_mb"]
    row = [
        f"{poll['seconds'] / 60:.0f} minutes, {poll['views']} views",
        f"{shard['median'] - figures['alone_percent_of_core']:.2f}%",
        f"{figures['alone_percent_of_core']:.2f}%",
        f"{poll['page_percent_of_core']:.2f}%",
        f"{memory['start']:.0f} and {memory['end']:.0f} MB",
    ]
    columns = [
        "`psserver dashboard` with a browser that asks once a second",
        "of a core, more than a shard takes alone",
        "a shard alone",
        "the page's process",
        "its memory at the start and at the end",
    ]
    return f"{looks}\n\n{table(columns, [row])}"


# ----- the data planes: docs/dataplane.md

RESULTS = ROOT / "docs" / "results" / "transport.jsonl"
DASHBOARD = ROOT / "docs" / "results" / "dashboard.json"
HOSTS = ROOT / "docs" / "results" / "hosts.json"
STRAGGLER = ROOT / "docs" / "results" / "straggler.json"
RECOVERY = ROOT / "docs" / "results" / "recovery.json"
PATHS = {"local": "shared memory", "tcp": "TCP", "grpc": "gRPC"}


@dataclass(frozen=True, slots=True)
class Round:
    """A case of `benchmarks.transport`, beside the floor that the same run gives it."""

    plane: str
    case: str
    workers: int
    times_ms: list[float]
    floor_ms: float | None  # None: nothing to compare with.
    gbytes: float
    cpu_s: float

    @property
    def median_ms(self) -> float:
        """Median round."""
        return statistics.median(self.times_ms)

    @property
    def share(self) -> float:
        """The floor divided by the median round."""
        return (self.floor_ms or 0.0) / self.median_ms

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        known = self.floor_ms is not None
        return [
            f"`{self.plane}`" if self.plane in PATHS else self.plane,
            f"`{self.case}`",
            f"{self.workers}",
            f"{self.floor_ms:.1f}" if self.floor_ms is not None else "",
            f"{self.median_ms:.1f}",
            f"**{100 * self.share:.0f}%**" if known else "",
            f"{self.cpu_s / self.gbytes:.2f}",
        ]


class TransportRun:
    """A run of `benchmarks.transport`."""

    def __init__(self, result: dict[str, Any]) -> None:
        """Reads a line of its result file."""
        self.result = result
        self.cases = {(c["plane"], c["case"], c["workers"]): c for c in self.result["cases"]}
        self.copy_gbps = self.result["nbytes"] / statistics.median(self.result["copy_ms"]) / 1e6

    def median_ms(self, plane: str, case: str, workers: int = 1) -> float:
        """Returns the median round of a case."""
        times_ms: list[float] = self.cases[plane, case, workers]["ms"]
        return statistics.median(times_ms)

    def copies(self, case: str, workers: int) -> float:
        """Returns the copies of the model through memory in one round over shared memory.

        A copy reads and writes each byte once. Each worker copies the weights out, and gathers its
        gradients in `keys`. The shards read each gradient, and read and write weights and momentum.
        """
        return workers * (2 if case == "keys" else 1) + (workers + 4) / 2

    def round(self, plane: str, case: str, workers: int) -> Round:
        """Returns a case with its floor: memory copies, or a plain-socket round for each worker."""
        found = self.cases[plane, case, workers]
        floor_ms = None
        if plane in PATHS and ("socket", case, 1) in self.cases:
            floor_ms = workers * self.median_ms("socket", case)
        if plane == "local":
            floor_ms = self.copies(case, workers) * self.result["nbytes"] / self.copy_gbps / 1e6
        return Round(plane, case, workers, found["ms"], floor_ms, found["gbytes"], found["cpu_s"])

    def rounds(self) -> list[Round]:
        """Returns all cases but the small ones."""
        return [self.round(*key) for key in self.cases if key[1] != "tiny"]


def transport() -> str:
    """Returns the one run: its headline, its constants, its table."""
    run = TransportRun(json.loads(RESULTS.read_text(encoding="utf-8").splitlines()[-1]))
    names = {"socket": "sockets", "gloo": "Gloo"}
    shares = {
        plane: [round_.share for round_ in run.rounds() if round_.plane == plane] for plane in PATHS
    }
    rows = [round_.cells() for round_ in run.rounds() if round_.plane != "grpc"]
    for row in rows:
        row[0] = names.get(row[0], row[0])
    socket_gbps = 2 * run.result["nbytes"] / run.median_ms("socket", "flat") / 1e6
    planes = [plane for plane in PATHS if (plane, "tiny", 1) in run.cases]
    fixed = ", ".join(f"{run.median_ms(plane, 'tiny'):.2f} ({PATHS[plane]})" for plane in planes)
    return "\n".join(
        [
            f"**A round through shared memory reaches {_range(shares['local'])} of its floor, a "
            f"round over TCP {_range(shares['tcp'])} of plain sockets, over gRPC "
            f"{_range(shares['grpc'])}.**",
            "",
            f"{run.result['date']}, commit {run.result['commit']}, "
            f"{machine(run.result['machine'])}, "
            f"{len(run.result['copy_ms'])} rounds a case. M = "
            f"{run.copy_gbps:.1f} GB/s, K = {socket_gbps:.1f} GB/s, m = {fixed} ms.",
            "",
            table(
                ["path", "case", "workers", "floor, ms", "measured", "floor/measured", "CPU s/GB"],
                rows, "lllrrrr",
            ),
        ]
    )  # fmt: skip


def _range(shares: list[float]) -> str:
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{low}%" if low == high else f"{low} to {high}%"


def hosts() -> str:
    """Returns the table of several hosts, from the newest result."""
    figures = json.loads(HOSTS.read_text())
    four, two = figures["four_hosts"], figures.get("two_by_two")
    rows = [
        ["4 hosts, 500 Mbit/s", f"`{mode}`", f"{step_ms:.0f}", f"{four['bound_ms'][mode]:.0f}"]
        for mode, step_ms in four["step_ms"].items()
    ]
    if two is not None:
        rows += [
            ["2 hosts of 2 workers, 1 Gbit/s", f"`{mode}`", f"{step_ms:.0f}", ""]
            for mode, step_ms in two["step_ms"].items()
        ]
    head = ["hosts", "mode", "step, ms", "max(compute, bytes / bandwidth), ms"]
    return f"{figures['date']}, {machine(figures['machine'])}.\n\n" + table(head, rows, "llrr")


def reasons() -> str:
    """Returns the README's three reasons, with figures of the newest results."""
    step_ms = json.loads(HOSTS.read_text())["four_hosts"]["step_ms"]
    paces = json.loads(STRAGGLER.read_text())
    waits, backup = (paces[mode]["10x"] / paces[mode]["none"] for mode in ("ssgd", "ssgd backup=1"))
    run = json.loads(RECOVERY.read_text())["all faults"]
    return f"""\
- **A slow network.** Four hosts at 500 Mbit/s: a step takes {step_ms[DDP]:.0f} ms with DDP
  over Gloo, and **{step_ms["ssd"]:.0f} ms** in `ssd` ([hosts](docs/hosts.md)).
- **A slow machine.** One of eight workers is ten times slower: the others keep {waits:.0%} of
  their pace if they wait for it, and **{backup:.0%}** in `ssgd(backup=1)`
  ([in simulated time](docs/convergence.md)).
- **A killed process.** {run["faults"]} faults in ten minutes (`kill -9`, cut links, full disks,
  power cuts), {run["pushes"]:,} pushes acknowledged: **{run["lost"]} lost, {run["double"]} counted
  twice** ([recovery](docs/recovery.md))."""


GPU = ROOT / "docs" / "results" / "gpu.json"


def gpu(path: Path = GPU) -> str:
    """Returns the figures of a GPU: kernels beside a copy, and communication that is not hidden."""
    if not path.is_file():
        return "No GPU has been measured yet."
    run = json.loads(path.read_text(encoding="utf-8"))
    about = f"`{run['command']}`, {run['date']}, commit {run['commit']}, {machine(run['machine'])}."
    blocks = [f"**{run['device']}.** {about}"]
    if run["kernels"]:
        rows = [
            [
                f"`{row['what']}`",
                f"{row['best_ms']:.3f}",
                f"{row['gbps']:.0f}",
                f"{100 * row['of_copy']:.0f} %",
            ]
            for row in run["kernels"]
        ]
        head = [f"{run['numel'] / 1e6:g}M float32", "ms", "GB/s", "of a copy's bandwidth"]
        blocks.append(table(head, rows, "lrrr"))
    rows = [
        [
            f"`{row['model']}`",
            str(row["processes"]),
            f"`{row['mode']}`",
            *(f"{row[name]:.1f}" if name in row else "" for name in ("plain_ms", "step_ms")),
            f"{100 * row['not_hidden']:.0f} %" if "not_hidden" in row else "no time was left",
        ]
        for row in run["steps"]
    ]
    head = ["model", "processes", "mode", "plain step, ms", "step, ms", "not hidden"]
    blocks.append(table(head, rows, "lrlrrr"))
    return "\n\n".join(blocks)


# ----- the cost of not overlapping: docs/training.md


def overlap() -> str:
    """Returns the step times with and without `overlap`, from the result file."""
    path = ROOT / "docs" / "results" / "overlap.json"
    run = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        [
            f"`{case['mode']}`" + (f", {case['compression']}" * (case["compression"] != "none")),
            f"{case['compute_ms']:.0f}",
            f"{case['default_ms']:.0f}",
            f"{case['overlap_ms']:.0f}",
            f"{case['default_ms'] / case['overlap_ms']:.2f}",
        ]
        for case in run["cases"]
    ]
    head = ["mode", "computing, ms", "default, ms", "`overlap=True`, ms", "ratio"]
    return "\n".join(
        [
            f"`{run['command']}`, {run['date']}, commit {run['commit']}, "
            f"{machine(run['machine'])}:",
            "",
            table(head, rows, "lrrrr"),
        ]
    )


# ----- pipelines on slow links: docs/pipelines.md

PIPELINE = ROOT / "docs" / "results" / "pipeline.json"
PIPELINE_COLUMNS = ("ssgd", "ddp", "ssd", "torch", "pipeline", "predicted")


def pipeline() -> str:
    """Returns the minibatches a second of a pipeline and its rivals, if there is a result file."""
    command = "`python -m benchmarks.pipeline --json --results docs/results/pipeline.json`"
    if not PIPELINE.exists():
        return f"Not measured yet on a quiet machine: {command}."
    run = json.loads(PIPELINE.read_text(encoding="utf-8"))
    rows = [
        [
            rate,
            found["plan"],
            *(f"{found[name]:.3g}" if name in found else "" for name in PIPELINE_COLUMNS),
            f"{100 * found['bytes_saved']:.1f}%" if "bytes_saved" in found else "",
        ]
        for rate, found in run.items()
        if isinstance(found, dict)
    ]
    head = ["link", "plan", *PIPELINE_COLUMNS, "bytes saved"]
    about = f"`{run['command']}`, {run['date']}, {machine(run['machine'])}. Minibatches a second:"
    return f"{about}\n\n" + table(head, rows, "llrrrrrrr")


IMAGES = ROOT / "docs" / "results" / "images.json"  # deploy/check writes it.


def images(path: Path = IMAGES) -> str:
    """Returns the sizes of the container images."""
    found = json.loads(path.read_text(encoding="utf-8"))
    sizes = {target: f"{image['nbytes'] / 1e9:.2f} GB" for target, image in found.items()}
    rows = [
        [f"`{target}`", size, found[target]["date"]]
        for target, size in sizes.items()
        if target != "base"
    ]
    about = f"`deploy/check`, on a base of {sizes['base']}:"
    return f"{about}\n\n" + table(["target", "size", "date"], rows, "lrl")


CHECKED = ROOT / "docs" / "results" / "check-deploy.json"  # make check-deploy CHECK_DEPLOY=write


def checked(engine: str) -> str:
    """Returns when an engine's tests have passed, how many, and which were not run."""
    found = json.loads(CHECKED.read_text(encoding="utf-8"))[engine]
    return f"`make check-deploy`, {found['date']}: {found['said']}."


# The engines whose pages say that.
CHECKED_ENGINES = (
    *("Docker", "Kubernetes", "Prometheus", "Ray", "Slurm", "shell", "systemd", "torchrun"),
)


# ----- the blocks, and their pages


BLOCKS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "exit codes": exit_codes,
    "commands": commands,
    "dashboard": dashboard,
    "metrics": metrics,
    "transport": transport,
    "hosts": hosts,
    "reasons": reasons,
    "gpu": gpu,
    "overlap": overlap,
    "pipeline": pipeline,
    "images": images,
    **{engine: partial(checked, engine) for engine in CHECKED_ENGINES},
    "situations": choosing.situations,
    "predictions": choosing.predictions,
    "regret": choosing.regret,
    "pipeline kills": pipeline_kills.results,
    "pipeline learning": pipeline_learning.results,
    **tables.TABLES,
    **exchange_tables.BLOCKS,
    **survival_tables.BLOCKS,
    **round_tables.BLOCKS,
    **newest_tables.BLOCKS,
    **growth_tables.BLOCKS,
}
PAGES = (
    "README.md",
    "docs/choosing.md",
    "docs/compressors.md",
    "docs/dashboard.md",
    "docs/convergence.md",
    "docs/dataplane.md",
    "docs/deploy.md",
    "docs/gpu.md",
    "docs/kubernetes.md",
    "docs/links.md",
    "docs/machines.md",
    "docs/monitoring.md",
    "docs/pipelines.md",
    "docs/publish.md",
    "docs/ray.md",
    "docs/recovery.md",
    "docs/reference.md",
    "docs/rows.md",
    "docs/rules/decentralised.md",
    "docs/rules/overlap.md",
    "docs/rules/quorum.md",
    "docs/slurm.md",
    "docs/standby.md",
    "docs/systemd.md",
    "docs/torchrun.md",
    "docs/training.md",
)
MARKED = re.compile(r"(<!-- begin (?P<name>[\w ]+) -->\n).*?(\n<!-- end (?P=name) -->)", re.DOTALL)


def filled(text: str) -> str:
    """Returns a page with its blocks as they are made now.

    Raises:
        KeyError: A block has a name that nothing here makes.
    """
    return MARKED.sub(lambda found: found[1] + BLOCKS[found["name"]]() + found[3], text)


def main() -> None:
    """Writes the blocks of all pages, or checks them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    changed = []
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        if (wanted := filled(text)) != text:
            changed.append(name)
            if not args.check:
                (ROOT / name).write_text(wanted, encoding="utf-8")
    print(f"pages that differed: {', '.join(changed) or 'none'}")
    if args.json:
        print(json.dumps({"changed": changed}))
    if args.check and changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
