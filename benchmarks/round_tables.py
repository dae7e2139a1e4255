"""Tables of rounds for the pages of docs/: their losses, their bytes and their times."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import round_links, round_quorum, round_times
from benchmarks.markdown import machine, table
from benchmarks.rounds import FORMS, FURTHER

RESULTS = Path(__file__).parent.parent / "docs" / "results"
ROUNDS = tuple(  # By task and data; those that there are.
    RESULTS / f"rounds{task}.json" for task in ("", "-unlike", "-lenet", "-lenet-unlike", "-resnet")
)
ROUND_LINKS = RESULTS / "round_links.json"
ROUND_TIMES = RESULTS / "round_times.json"
ROUND_QUORUM = RESULTS / "round_quorum.json"
TASK_NAMES = {"text": "characters", "lenet": "LeNet", "resnet": "ResNet-20"}
NEAR = 0.01  # Of the loss of rounds that block: the target of `mirror`.


def rounds() -> str:
    """Returns the losses of rounds that block and that overlap, by task and length."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in ROUNDS if path.exists()]
    forms = [form for form in (*FORMS, *FURTHER) if any(_has(run, form) for run in runs)]
    parts = [
        (run["arguments"], length.removeprefix("H"), row)
        for run in runs
        for length, row in run["forms"].items()
    ]
    head = ["task", "data", "H", "steps", "seeds", *(f"`{form}`" for form in forms)]
    rows = [
        [
            TASK_NAMES[about["task"]],
            "unlike" if about["unlike"] else "alike",
            length,
            str(row["blocking"]["steps"]),
            str(len(row["blocking"]["losses"])),
            *(_loss_of(row, form) for form in forms),
        ]
        for about, length, row in parts
    ]
    ratios = [_mean_loss(row, "mirror") / _mean_loss(row, "blocking") for _, _, row in parts]
    num_near = sum(ratio <= 1 + NEAR for ratio in ratios)
    dates = sorted({run["date"] for run in runs})
    return (
        "`python -m benchmarks.rounds`, with `--task`, `--unlike`, `--lengths`, `--steps` and "
        f"`--seeds` of the columns, {' and '.join(dates)}. `mirror` is within 1% of rounds that "
        f"block, or below them, in {num_near} of these {len(parts)} cases.\n\n"
        f"{table(head, rows, 'llrrr' + 'r' * len(forms))}"
    )


def link_bytes() -> str:
    """Returns the bytes of rounds on a slow link, beside those of DDP."""
    run = json.loads(ROUND_LINKS.read_text(encoding="utf-8"))
    return (
        "`python -m benchmarks.rounds --links --out docs/results/round_links.json`, "
        f"{run['date']}, {machine(run['machine'])}. {round_links.verdict(run)}\n\n"
        f"{round_links.rows_of(run)}"
    )


def times() -> str:
    """Returns the times of rounds on slow links, beside their computing."""
    command = "`python -m benchmarks.rounds --times --out docs/results/round_times.json`"
    if not ROUND_TIMES.exists():
        return f"Not measured yet on a quiet machine: {command}."
    run = json.loads(ROUND_TIMES.read_text(encoding="utf-8"))
    return (
        f"{command}, {run['date']}, {machine(run['machine'])}. {round_times.verdict(run)}\n\n"
        f"{round_times.rows_of(run)}"
    )


def quorum() -> str:
    """Returns two means of rounds with a quorum, and two windows."""
    run = json.loads(ROUND_QUORUM.read_text(encoding="utf-8"))
    return f"`{run['command']}`, {run['date']}.\n\n{round_quorum.tables_of(run)}"


def _has(run: dict[str, Any], form: str) -> bool:
    return any(form in row for row in run["forms"].values())


def _mean_loss(row: dict[str, Any], form: str) -> float:
    return statistics.fmean(row[form]["losses"])


def _loss_of(row: dict[str, Any], form: str) -> str:
    """Returns the loss of rounds that block, or another form's beside it."""
    if form not in row:
        return ""
    loss, base = _mean_loss(row, form), _mean_loss(row, "blocking")
    if not math.isfinite(loss):
        return "diverged"
    return f"{loss:.3f}" if form == "blocking" else f"{loss / base - 1:+.1%}"


BLOCKS: dict[str, Callable[[], str]] = {
    "rounds": rounds,
    "round links": link_bytes,
    "round times": times,
    "quorum": quorum,
}
