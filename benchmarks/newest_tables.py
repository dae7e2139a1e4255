"""Blocks of docs/publish.md and docs/rows.md, from docs/results/publish.json and rows.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from benchmarks import kit
from benchmarks.markdown import machine, table
from benchmarks.publish import COST_NUMEL

FOLDER = kit.ROOT / "docs" / "results"
SMALLER = {"3e-6": 60, "1e-5": 25, "1e-4": 5.5}  # The bars that were set.
SMALL = f" ({COST_NUMEL / 1e6:.0f} million elements)"
COSTS = {"k4": "2 %", "k1": "5 %"}
RELAYED = {"k4": "1 %", "k1": "2.5 %"}
PIECE = 30  # Updates, whose mean a column shows.


def _newest(name: str, command: str) -> tuple[dict[str, Any], str]:
    """Returns a result, and the sentence that says where it comes from."""
    found: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    about = f"`{command}`, {found['date']}, commit {found['commit']}, {machine(found['machine'])}."
    return found, about


def published() -> str:
    """Returns the figures of published weights, beside the bars that were set for them."""
    found = json.loads((FOLDER / "publish.json").read_text(encoding="utf-8"))
    cost = found["training_cost"]
    kills = sum(found["kills"].values())
    rows = [
        [
            f"versions read during {kills} kills of shards, relays and readers",
            f"{found['commits']:,}",
            "100,000",
        ],
        ["of them mixed, or older than the one before", f"{found['torn']}", "0"],
        *(
            [
                f"bytes of all bfloat16 weights over a step's, AdamW at {rate}",
                f"{times:.1f}",
                f"{SMALLER[rate]:g}",
            ]
            for rate, times in found["smaller_than_bf16"].items()
        ),
        *(
            [
                f"8 readers add to a step of {found['step_s']:.2f} s, every={every[1:]}{SMALL}",
                f"{100 * share:.1f} %",
                COSTS[every],
            ]
            for every, share in cost.items()
        ),
        *(
            [
                f"the same behind one relay, every={every[1:]}",
                f"{100 * share:.1f} %",
                RELAYED[every],
            ]
            for every, share in found.get("relayed_cost", {}).items()
        ),
        *_joins(found),
        [
            "from the end of `publish` to the commit of the last of 8 readers, 1 % changed",
            f"{found['refresh_ms']['delta']:.0f} ms",
            "150 ms",
        ],
        ["all weights, 8 readers that begin", f"{found['refresh_ms']['whole']:.0f} ms", ""],
        [
            "all weights changed, 8 readers on the host of one relay",
            f"{found['refresh_ms']['relayed']:.0f} ms",
            "700 ms",
        ],
        ["`commit` into a float32 module, 1 % changed", f"{found['pause_ms']:.2f} ms", "5 ms"],
        *_flip(found),
        *_beside(found["beside"]),
    ]
    head = [f"{found['numel'] / 1e6:.1f} million elements; links of 1 Gbit/s", "", "wanted"]
    return f"{_parts(found, 'benchmarks.publish')}\n\n" + table(head, rows, "lrr")


def _joins(found: dict[str, Any]) -> list[list[str]]:
    """Returns a row with the cost of readers that come and go, if it was measured."""
    if (joins := found.get("joins")) is None:
        return []
    label = f"{joins['number']:,} readers that join and leave add to the slowest step of 100"
    return [[label, f"{100 * joins['p99']:.1f} %", "2 %"]]


def _flip(found: dict[str, Any]) -> list[list[str]]:
    """Returns a row with the length of a commit without a module, if it was measured."""
    flips = [found["flip_ms"]] if "flip_ms" in found else []
    return [["`commit` without a module", f"{flip_ms:.3f} ms", "0.1 ms"] for flip_ms in flips]


def _beside(beside: dict[str, float]) -> list[list[str]]:
    """Returns rows with the milliseconds of other ways, for one reader."""
    labels = {
        "safetensors": "all weights: a file of safetensors over HTTP",
        "http": "all weights: `torch.save` over HTTP",
        "gloo": "all weights: a broadcast of Gloo",
        "xor": "1 % changed: exclusive or in zlib over HTTP",
    }
    return [
        [f"beside it, one reader, {label}", f"{beside[key]:.0f} ms", ""]
        for key, label in labels.items()
    ]


def _parts(found: dict[str, Any], module: str) -> str:
    """Returns a sentence with the commit and load of each part of a result."""
    return f"Parts of `python -m {module} --only PART`, {_runs(found['parts'])}."


def _runs(runs: dict[str, dict[str, Any]]) -> str:
    """Returns the commit of each run, and the load of its machine."""
    loads = {name: machine(run["machine"]).rpartition(" ")[2] for name, run in runs.items()}
    said = [f"{name} {run['commit']} {loads[name]}" for name, run in runs.items()]
    return f"with commit and load: {', '.join(said)}"


def rollouts() -> str:
    """Returns the episodes of rollouts with weights of some versions ago."""
    found, about = _newest(
        "rollouts.json", "python -m benchmarks.rollouts --out docs/results/rollouts.json"
    )
    runs = found["lengths"]["0"]
    labels = [f"updates {begin} to {begin + PIECE}" for begin in range(0, len(runs[0]), PIECE)]
    rows = [
        [
            form,
            *(
                f"{fmean(fmean(run[at : at + PIECE]) for run in seeds):.0f}"
                for at in range(0, len(runs[0]), PIECE)
            ),
        ]
        for form, seeds in found["lengths"].items()
    ]
    head = ["versions old", *labels]
    return f"{about} Steps of an episode (500 is the most), {len(runs)} seeds.\n\n" + table(
        head, rows, "l" + "r" * len(labels)
    )


def standby() -> str:
    """Returns the figures of moves and of lost machines."""
    found = json.loads((FOLDER / "standby.json").read_text(encoding="utf-8"))
    lost, drain = found["machine_lost"], found["drain"]
    times = sorted(lost["times"])
    rows = [
        [
            f"machines lost, {lost['numel'] / 1e6:.1f} million parameters, "
            f"{'' if lost['identical'] else 'not '}all bits as in a run without",
            f"{len(times)}",
        ],
        [
            f"of {lost['pushes']:,} pushes lost, double, torn, partial",
            ", ".join(f"{lost[key]}" for key in ("lost", "double", "torn", "partial")),
        ],
        ["longest time without a step, median", f"{median(times):.2f} s"],
        ["the same, 99 of 100", f"{lost['p99_s']:.2f} s"],
        ["a step without trouble", f"{lost['step_s']:.2f} s"],
        [
            f"pause of a move, the longest of {drain['moves']}; {drain['numel'] / 1e6:.1f} million",
            f"{drain['pause_s']:.3f} s",
        ],
        *_later_parts(found),
        _many_losses(),
        *_costs([found["cost"], *found.get("costs", {}).values()]),
    ]
    if found["off_cost"] is not None:
        rows.append(
            ["what the code costs where there is no standby", f"{100 * found['off_cost']:.1f} %"]
        )
    head = ["two workers and shards in namespaces", ""]
    return f"{_parts(found, 'benchmarks.standby')}\n\n" + table(head, rows, "lr")


def _costs(costs: list[dict[str, Any]]) -> list[list[str]]:
    """Returns rows with the time of a step with a standby, and that of the formula."""
    rows = [["a step with a standby over one without; formula", ""]]
    for cost in costs:
        label = f"{cost['num_workers']} workers, {cost['rate']}"
        said = f"{cost['measured']:.2f}"
        if cost["compute_s"]:
            label = f"{label}, computing {cost['compute_s']:g} s, `{cost['mode']}`"
        else:
            said = f"{said}; {cost['formula']:.2f}"
        rows.append([label, said])
    return rows


def _many_losses() -> list[str]:
    """Returns the row of a long job that loses one machine after another."""
    found = json.loads((FOLDER / "chaos_machines.json").read_text(encoding="utf-8"))
    setup, num_lost = found["setup"], len(found["kills"])
    what = f"{num_lost} machines lost in {setup['seconds'] / 60:.0f} minutes"
    label = f"`benchmarks.chaos --machines`: goodput of {setup['learners']} learners, {what}"
    return [label, f"{100 * found['goodput']:.1f} %"]


def _later_parts(found: dict[str, Any]) -> list[list[str]]:
    """Returns the rows of those parts that were measured, of those that may be missing."""
    rows = []
    if turns := found.get("turns"):
        cost = f"{turns['cost_s']:.1f} s, {100 * turns['share']:.1f} %"
        rows.append([f"{turns['moves']} shards moved in turn cost, of ten minutes", cost])
    if refill := found.get("refill"):
        what = f"{len(refill['times'])} machines lost that workers filled again, longest time"
        rows.append([what, f"{refill['worst_s']:.1f} s"])
    if caught := found.get("catch_up"):
        what = f"{caught['nbytes'] / 1e6:.0f} MB to a new standby at {caught['mbit']} Mbit/s"
        rows.append([what, f"{caught['seconds']:.1f} s, pace {caught['training']:.2f}"])
    return rows


def rows_by_id() -> str:
    """Returns the figures of row tables."""
    found, about = _newest(
        "rows.json", "python -m benchmarks.rows --quick --out docs/results/rows.json"
    )
    moved, step, auc = found["pull_push_ms"], found["step_ms"], found["auc"]
    kills, wrong = found["kills"], ("lost", "double", "torn", "shifted")
    labels = {
        "rows": "step, two workers and two shards: row tables",
        "gloo_sparse": "with sparse gradients over Gloo",
        "torchrec_cpu": "with TorchRec on the CPU",
        "ddp_dense": "with dense DDP",
    }
    logs = f" ({auc['samples'] / 1e6:g}M clicks, seeds: {auc['seeds']})" if "seeds" in auc else ""
    told = [key for key in AUCS if key in auc]
    rows = [
        *(
            [f"pull and push, 100,000 rows of 32, {plane}", f"{took_ms:.0f} ms"]
            for plane, took_ms in moved.items()
        ),
        ["their bytes over the payload's formula", f"{found['bytes_of_formula']:.2f}"],
        *([label, _time(step[key])] for key, label in labels.items()),
        [f"AUC{logs}: {', '.join(told)}", ", ".join(f"{auc[key]:.5f}" for key in told)],
        [
            f"kills in {kills['seconds']:.0f} s, pushes",
            f"{kills['faults']:.0f}, {kills['pushes']:.0f}",
        ],
        [f"rows {', '.join(wrong)}", ", ".join(f"{kills[key]:.0f}" for key in wrong)],
    ]
    labels = {"rows": "four workers at 1 Gbit/s: row tables",
              "gloo_sparse": "Gloo's sum of as many rows",
              "gloo_dense": "Gloo's sum of all rows"}  # fmt: skip
    if wire := found.get("wire_ms"):
        rows += [[label, _time(wire[key])] for key, label in labels.items()]
        rows.append(["bytes over the formula", f"{wire['bytes_of_formula']:.2f}"])
    for number in (2, 8) if (others := found.get("others_ms")) else ():
        pair = (others[f"{way}_{number}"] for way in ("rows", "gloo_sparse"))
        label = f"{number} workers: row tables, Gloo's sum of as many rows"
        rows.append([label, ", ".join(map(_time, pair))])
    rows += _many_rows(found)
    later = {name: run for name, run in found.get("later", {}).items() if not run["is_quick"]}
    if later:
        about += f" Whole runs by `--only`, {_runs(later)}."
    return f"{about}\n\n" + table(["", ""], rows, "lr")


def _many_rows(found: dict[str, Any]) -> list[list[str]]:
    """Returns the figures of the tables of millions of rows that were measured."""
    rows = []
    if back := found.get("back"):
        label = f"a shard of {back['rows'] / 1e6:g}M rows answers behind a kill after"
        rows.append([label, f"{back['median_s']:.1f} s"])
    if journal := found.get("journal"):
        rows.append(["share of a step for the journal", f"{100 * journal['share_lost']:.0f}%"])
    if copies := found.get("copies"):
        label = f"checkpoint of {copies['rows'] / 1e6:g}M rows; of the 1% that have changed"
        both = f"{copies['whole_s']:.0f} s; {copies['changes_s']:.1f} s"
        rows.append([label, f"{both}, {100 * copies['share_of_base']:.1f}% of the bytes"])
        if "whole_pause_ms" in copies:
            rows.append(["pause by the former", f"{copies['whole_pause_ms']:.0f} ms"])
        rows.append(["pause by the latter", f"{copies['changes_pause_ms']:.0f} ms"])
        rows.append(["restored on other shards, the same bits", f"{copies['restore_s']:.0f} s"])
    if bounded := found.get("bounded"):
        label = f"{bounded['ids'] / 1e6:g}M ids, `lru` of a tenth: share of the declared memory"
        rows.append([label, f"{100 * bounded['bytes_of_declared']:.0f}%"])
    if early := found.get("early"):
        rows.append(["prefetched step over its dense part", f"{early['ahead_of_compute']:.2f}"])
        saved = (f"{100 * early[name]:.0f}%" for name in ("bytes_saved", "saved_at_best"))
        rows.append(["bytes that a cache of 1% saves; the best one", ", ".join(saved)])
    return rows


def _time(took_ms: float | None) -> str:
    return "not installed" if took_ms is None else f"{took_ms:.0f} ms"


AUCS = ("one_process", "ssgd", "asgd", "ssp", "hybrid", "bayes")
BLOCKS: dict[str, Callable[[], str]] = {
    "published": published,
    "rollouts": rollouts,
    "standby": standby,
    "rows by id": rows_by_id,
}
