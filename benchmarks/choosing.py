"""Ten situations and the answer of `psworker advise` to each, for docs/choosing.md."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from typer.main import get_command

from benchmarks.markdown import machine, table
from pscore.timing.shown import in_ms
from psworker.advice.report import AdviceReport, advise
from psworker.advice.request import AdviceRequest
from psworker.commands import cli

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PREDICTIONS, REGRET = RESULTS / "predictions.json", RESULTS / "regret.json"
# A situation for people, and the flags of the command.
SITUATIONS = (
    (
        "8 GPUs on one host, any model",
        "--model gpt2 --workers 8 --hosts 1 --gbit 10 --compute-ms 300",
    ),
    ("4 fast hosts, 100 Gbit/s", "--model resnet50 --workers 4 --gbit 100 --compute-ms 300"),
    (
        "8 GPUs on 2 hosts, 10 Gbit/s, 1.3B parameters",
        "--model 1.3B --workers 8 --hosts 2 --gbit 10 --compute-ms 900",
    ),
    (
        "the same, and no accuracy may be lost",
        "--model 1.3B --workers 8 --hosts 2 --gbit 10 --compute-ms 900 --risk none",
    ),
    (
        "4 hosts, 1 Gbit/s, the link needs as long as computing",
        "--model resnet50 --workers 4 --gbit 1 --compute-ms 1300",
    ),
    (
        "4 hosts, 1 Gbit/s, the link needs twice as long",
        "--model resnet50 --workers 4 --gbit 1 --compute-ms 650",
    ),
    (
        "8 hosts, 1 Gbit/s, 350M parameters: the link needs 40 times as long",
        "--model 350M --workers 8 --gbit 1 --compute-ms 500",
    ),
    (
        "the same, and a loss of accuracy is acceptable",
        "--model 350M --workers 8 --gbit 1 --compute-ms 500 --risk any",
    ),
    (
        "two sites of 6 and 2 workers, 0.5 Gbit/s between them",
        "--model 350M --sites 6,2 --between-gbit 0.5 --gbit 10 --compute-ms 500 --risk any",
    ),
    (
        "64 GPUs on 8 hosts, 400 Gbit/s, 7B parameters",
        "--model llama-7b --workers 64 --hosts 8 --gbit 400 --compute-ms 2000",
    ),
)


def answer(flags: str) -> AdviceReport:
    """Returns the report of `psworker advise` with these flags."""
    command: Any = get_command(cli.app)
    given = dict(command.commands["advise"].make_context("advise", shlex.split(flags)).params)
    risk = str(given.pop("risk"))
    for name in ("as_json", "command", "job", "servers"):
        del given[name]
    return advise(AdviceRequest(**given).read(), risk)


def situations() -> str:
    """Returns the table of docs/choosing.md."""
    rows = []
    for situation, flags in SITUATIONS:
        found = answer(flags)
        row, shards = found.verdict.row, found.shards.hosts
        also = f"; {found.verdict.also.partition(':')[0]}" if found.verdict.also else ""
        rows.append(
            [
                situation,
                f"`{flags}`",
                f"{row.name}: {in_ms(row.time.step_s)}{also}",
                row.time.limit,
                str(len(shards)) if row.num_shards else "none",
            ]
        )
    return table(["situation", "`psworker advise`", "answer", "limit", "shards"], rows)


def predictions() -> str:
    """Returns the cases that were predicted before they were measured."""
    run = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    rows = [
        [
            row["links"],
            f"`{row['mode']}`",
            f"{row['simulated_ms']:,.0f}",
            f"{row['closed_ms']:,.0f}",
            f"{row['measured_ms']:,.0f}",
            f"{100 * (row['closed_ms'] / row['measured_ms'] - 1):+.0f}%",
        ]
        for row in run["rows"]
    ]
    ranked = "right" if run["ranking_right"] else "**wrong**"
    return "\n".join(
        [
            f"`{run['command']}`, {run['date']}, {machine(run['machine'])}. Error of the closed "
            f"form: {run['closed_median_error']:.0%} in the median, "
            f"{run['closed_worst_error']:.0%} at most; of the simulation {run['median_error']:.0%} "
            f"and {run['worst_error']:.0%}. The order of the modes is {ranked}.",
            "",
            table(["links", "mode", "simulated, ms", "closed form", "measured", "error"], rows,
                  "llrrrr"),
        ]
    )  # fmt: skip


def regret() -> str:
    """Returns the time that `mode="auto"` loses on traces, and whether its logs replay."""
    run = json.loads(REGRET.read_text(encoding="utf-8"))
    replays = "replays" if run["replays"] else "**does not replay**"
    return (
        f"`{run['command']}`, {run['date']}: {len(run['traces'])} jobs took at most "
        f"{run['worst_regret']:.1%} more time than in the best mode, "
        f"{max(0.0, run['worst_behind_ssgd']):.1%} more than in `ssgd`; each log {replays}."
    )
