"""Blocks of docs/publish.md and docs/rows.md, from docs/results/publish.json and rows.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks import kit
from benchmarks.markdown import machine, table

FOLDER = kit.ROOT / "docs" / "results"


def _newest(name: str, command: str) -> tuple[dict[str, Any], str]:
    """Returns a result, and the sentence that says where it comes from."""
    found: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    about = f"`{command}`, {found['date']}, commit {found['commit']}, {machine(found['machine'])}."
    return found, about


def published() -> str:
    """Returns the figures of published weights."""
    found, about = _newest(
        "publish.json", "python -m benchmarks.publish --quick --out docs/results/publish.json"
    )
    smaller, cost, beside = found["smaller_than_bf16"], found["training_cost"], found["beside"]
    rows = [
        [
            f"versions read during {sum(found['kills'].values())} kills of shards, a relay and "
            "readers; of them mixed or older",
            f"{found['commits']:,}; {found['torn']}",
        ],
        *(
            [f"bytes of all bfloat16 weights over a step's, AdamW at {rate}", f"{times:.1f}"]
            for rate, times in smaller.items()
        ),
        *(
            [f"step time that 8 readers add, every={every[1:]}", f"{100 * share:.1f} %"]
            for every, share in cost.items()
        ),
        [
            "from the end of `publish` to the commit of the last of 8 readers, 1 % changed",
            f"{found['refresh_ms']['delta']:.1f} ms",
        ],
        ["all weights, for a reader that begins", f"{found['refresh_ms']['whole']:.1f} ms"],
        ["`commit` into a module", f"{found['pause_ms']:.2f} ms"],
        *(
            [f"beside it, all weights: {label}", f"{beside[key]:.1f} ms"]
            for key, label in (
                ("safetensors", "a file of safetensors over HTTP"),
                ("http", "`torch.save` over HTTP"),
                ("gloo", "a broadcast of Gloo"),
            )
        ),
    ]
    link = "loopback" if found["link"] == "loopback" else "links of 1 Gbit/s"
    head = [f"{found['numel'] / 1e6:.0f} million elements, {link}", ""]
    return f"{about}\n\n" + table(head, rows, "lr")


def rollouts() -> str:
    """Returns the episodes of rollouts with weights of some versions ago."""
    found, about = _newest(
        "rollouts.json", "python -m benchmarks.rollouts --out docs/results/rollouts.json"
    )
    runs = found["lengths"]["0"]
    head = ["versions old", f"steps of an episode at the end, {len(runs)} seeds (500 is the most)"]
    rows = [[form, f"{length:.0f}"] for form, length in found["last"].items()]
    return f"{about}\n\n" + table(head, rows, "lr")


def rows_by_id() -> str:
    """Returns the figures of row tables."""
    found, about = _newest(
        "rows.json", "python -m benchmarks.rows --quick --out docs/results/rows.json"
    )
    moved, step, auc = found["pull_push_ms"], found["step_ms"], found["auc"]
    labels = {
        "rows": "step, two workers and two shards: row tables",
        "gloo_sparse": "the same with sparse gradients over Gloo",
        "torchrec_cpu": "the same with TorchRec on the CPU",
        "ddp_dense": "the same with dense DDP",
    }
    rows = [
        *(
            [f"pull and push of 100,000 rows of 32 floats, {plane}", f"{took_ms:.0f} ms"]
            for plane, took_ms in moved.items()
        ),
        ["their bytes over the payload's formula", f"{found['bytes_of_formula']:.2f}"],
        *([label, _time(step[key])] for key, label in labels.items()),
        *([f"AUC on a click log that is computed: {key}", f"{auc[key]:.4f}"] for key in auc),
        *(
            [f"while shards and workers are killed: {key}", f"{count:.0f}"]
            for key, count in found["kills"].items()
        ),
    ]
    labels = {"rows": "row tables", "gloo_sparse": "Gloo's sum of as many rows",
              "gloo_dense": "Gloo's sum of all rows"}  # fmt: skip
    if wire := found.get("wire_ms"):
        rows += [
            [f"step of four workers at 1 Gbit/s: {label}", _time(wire[key])]
            for key, label in labels.items()
        ]
        rows.append(["bytes on these links over the formula", f"{wire['bytes_of_formula']:.2f}"])
    for name, run in found.get("later", {}).items():
        about += f" `--only {name}`{' whole' * (not run['is_quick'])}: {run['date']}, commit "
        about += f"{run['commit']}, {machine(run['machine'])}."
    return f"{about}\n\n" + table(["", ""], rows, "lr")


def _time(took_ms: float | None) -> str:
    return "not installed" if took_ms is None else f"{took_ms:.0f} ms"


BLOCKS: dict[str, Callable[[], str]] = {
    "published": published,
    "rollouts": rollouts,
    "rows by id": rows_by_id,
}
