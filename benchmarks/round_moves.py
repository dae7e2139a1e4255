"""Loss and bytes of rounds at rates of fine-tuning: `python -m benchmarks.rounds --moves`.

A transformer that has learned at a usual rate goes on in rounds at smaller ones: rounds that send
all, `sparseloco`, and `pulseloco`, the last two both ways. Four workers in simulated time, as in
`benchmarks/rounds.py`; bytes are those of pushes and pulls, without the weights at the begin.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import kit
from benchmarks.chars import PART, Text
from benchmarks.markdown import table
from pscore.compressors.none import NoCompression
from pscore.compressors.pulseloco import PulseLoCo
from pscore.compressors.sparseloco import SparseLoCo
from pscore.rules import DiLoCo
from pssim.training import TrainingCluster, TrainingJob

RATES = (3e-6, 1e-5, 1e-4, 1e-3)
LENGTH, ROUNDS, LEARNED = 20, 10, 400  # Steps of a round, rounds, steps before them.
LR = 3e-3  # Before them.
NUM_WORKERS = 4
FORMS: dict[str, dict[str, Any]] = {
    "diloco": {"compressor": NoCompression(), "pull_compressor": NoCompression()},
    "sparseloco, k = 64": {"compressor": SparseLoCo(), "pull_compressor": SparseLoCo(decay=1.0)},
    "pulseloco": {"compressor": PulseLoCo(), "pull_compressor": PulseLoCo()},
}


def learned(task: Text) -> nn.Module:
    """Returns the model after some steps of one worker at a usual rate."""
    model = task.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for step in range(LEARNED):
        optimizer.zero_grad()
        task.gradient(model, 0, step)
        optimizer.step()
    return model


def train(task: Text, start: nn.Module, form: str, rate: float) -> tuple[float, int]:
    """Returns the held-out loss and the bytes of one worker's rounds."""

    def make_model() -> nn.Module:
        model = task.make_model()
        model.load_state_dict(start.state_dict())
        return model

    is_sparse = form.startswith("sparse")
    job = TrainingJob(
        rule=DiLoCo(
            steps=LENGTH,
            outer_lr=1.0 if is_sparse else 0.7,
            outer_momentum=0.0 if is_sparse else 0.9,
        ),
        make_model=make_model,
        gradient=lambda model, rank, step: task.gradient(model, rank, LEARNED + step),
        group={"lr": rate},
        make_inner=lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1),
        num_workers=NUM_WORKERS,
        steps=LENGTH * ROUNDS,
        **FORMS[form],
    )
    cluster = TrainingCluster(job).run()
    worker = cluster.workers[1]
    nbytes = worker.pushed_nbytes + worker.pulled_nbytes - 4 * cluster.layout.numel
    return task.held_out_loss(cluster.show(make_model())), nbytes


def run(out: Path | None, *, as_json: bool) -> None:
    """Trains all forms at all rates."""
    torch.set_num_threads(1)
    task = Text(path=PART, seed=0, num_parts=1)
    start = learned(task)
    found: dict[str, Any] = {"before": round(task.held_out_loss(start), 4), "rates": {}}
    for rate in RATES:
        row = found["rates"][f"{rate:g}"] = {}
        for form in FORMS:
            loss, nbytes = train(task, start, form, rate)
            row[form] = {"loss": round(loss, 4), "nbytes": nbytes}
            print(f"{rate:g}, {form}: {loss:.4f}, {nbytes} bytes", flush=True)
    found |= {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": kit.machine(),
        "commit": kit.commit(),
    }
    kit.publish(found, rows_of(found), out, as_json=as_json)


def rows_of(found: dict[str, Any]) -> str:
    """Returns the table of a result."""
    head = ["rate", *(f"{form}: loss" for form in FORMS), *(f"{form}: bytes" for form in FORMS)]
    rows = []
    for rate, row in found["rates"].items():
        dense = row["diloco"]["nbytes"]
        shares = [f"{row[form]['nbytes'] / dense:.1%}" for form in FORMS]
        rows.append([rate, *(f"{row[form]['loss']:.4f}" for form in FORMS), *shares])
    return table(head, rows, "r" * len(head))
