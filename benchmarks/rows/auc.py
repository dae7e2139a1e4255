"""AUC of examples/dlrm.py on its computed click log: one process of torch, and modes of rows.

`one_process` is torch alone, with `nn.Embedding` of all ids and the same first rows, on the joined
batches; `ssgd`, `asgd`, `ssp` and `hybrid` (dense steps together, rows at once) are the example on
two workers and two shards; `bayes` is the best AUC that any model can reach on the same samples.
`often_...` is the same of the samples whose user and item were seen 50 times or more. All are means
over the seeds of the log; `ssgd_off` is the largest difference of `ssgd` from `one_process` with
the same seed.

Without `--quick` each run is written to bench-out/rows-auc.jsonl, and is not made again there.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks import kit
from pscore.rows.hashing import mix64

EXAMPLES = kit.ROOT / "examples"
FULL, QUICK = 10_000_000, 400_000  # Samples.
SAMPLES: int | None = None  # Others than these.
SEEDS = 3  # One if it is quick.
MODES: dict[str, tuple[str, ...]] = {
    "ssgd": (),
    "asgd": ("--mode", "asgd"),
    "ssp": ("--mode", "ssp(bound=3)"),
    "hybrid": ("--rows-mode", "asgd"),
}
QUICK_MODES = ("ssgd", "asgd")
BATCH, DIM, LR = 2048, 16, 0.1  # As the example's.
RUNS = kit.ROOT / "bench-out" / "rows-auc.jsonl"
SAID = re.compile(r"AUC ([\d.]+), best possible ([\d.]+)")
Scores = list[tuple[float, float]]  # AUC, and the best possible: of all samples, of ids seen often.


def run_example(samples: int, *options: str) -> Scores:
    """Returns the AUC of the example on two workers, and the best possible."""
    words = [sys.executable, "-m", "psworker", "run", "--workers", "2", "--shards", "2", "--quiet"]
    words += ["--", str(EXAMPLES / "dlrm.py"), "--samples", str(samples), *options]
    done = subprocess.run(words, cwd=kit.ROOT, capture_output=True, text=True)
    found = SAID.findall(done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return [(float(auc), float(best)) for auc, best in found]


def run_alone(samples: int, seed: int) -> Scores:
    """Returns the AUC of one process of torch on the batches of all workers."""
    import torch

    sys.path.insert(0, str(EXAMPLES))  # The example imports its log from its own folder.
    dlrm: Any = importlib.import_module("dlrm")
    clicks: Any = importlib.import_module("clicks")
    torch.manual_seed(seed)
    log = clicks.Clicks(seed, dlrm.USERS, dlrm.ITEMS)
    users, items = _make_table("users", dlrm.USERS[0]), _make_table("items", dlrm.ITEMS[0])
    model = dlrm.ClickModel(users, items, DIM)
    rows = [users.weight, items.weight]
    dense = [each for each in model.parameters() if each not in set(rows)]
    optimizers = [torch.optim.Adagrad(dense, lr=0.02), torch.optim.Adagrad(rows, lr=LR)]

    for user, item, click in dlrm.batches(log, 0, samples // BATCH, BATCH, 0, 1):
        model.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(user, item), click)
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
    scores: Scores = list(dlrm.evaluate(model, log, samples).values())
    return scores


def _make_table(name: str, num_ids: int) -> Any:
    """Returns a module of torch with all ids of the log, and the first rows of a row table."""
    import torch

    import psworker

    ids = torch.from_numpy(np.sort(mix64(np.arange(num_ids + 1, dtype=np.uint64)).view(np.int64)))
    with torch.no_grad():
        rows = psworker.Embedding(None, DIM, name=name, init="normal(0.1)")(ids)
    table = torch.nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)
    table.register_forward_pre_hook(lambda _, given: (torch.searchsorted(ids, given[0]),))
    return table


def _run(samples: int, seed: int, way: str) -> Scores:
    if way == "one_process":
        return run_alone(samples, seed)
    return run_example(samples, "--seed", str(seed), *MODES[way])


def _known(samples: int) -> dict[tuple[int, str], Scores]:
    """Returns the runs that were made before, by seed and way."""
    lines = RUNS.read_text(encoding="utf-8").splitlines() if RUNS.exists() else []
    runs = [json.loads(line) for line in lines]
    return {(run["seed"], run["way"]): run["scores"] for run in runs if run["samples"] == samples}


def measure(quick: bool) -> dict[str, Any]:
    """Returns the AUC by way.

    Args:
        quick: Whether there are few samples, one seed and two modes.
    """
    samples = SAMPLES or (QUICK if quick else FULL)
    seeds = range(1 if quick else SEEDS)
    ways = ["one_process", *(QUICK_MODES if quick else MODES)]
    runs = {} if quick else _known(samples)
    for seed, way in itertools.product(seeds, ways):
        if (seed, way) in runs:
            continue
        runs[seed, way] = _run(samples, seed, way)
        if not quick:
            about = {"samples": samples, "seed": seed, "way": way, "commit": kit.commit()}
            RUNS.parent.mkdir(exist_ok=True)
            with RUNS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**about, "scores": runs[seed, way]}) + "\n")
    found: list[dict[str, float]] = []
    for which in range(2):  # All samples; those of ids seen often.
        mean = {way: float(np.mean([runs[seed, way][which][0] for seed in seeds])) for way in ways}
        best = float(np.mean([runs[seed, "ssgd"][which][1] for seed in seeds]))
        found.append({**mean, "bayes": best})
    off = max(abs(runs[seed, "ssgd"][0][0] - runs[seed, "one_process"][0][0]) for seed in seeds)
    often = {f"often_{name}": value for name, value in found[1].items()}
    return {**found[0], **often, "ssgd_off": off, "samples": samples, "seeds": len(seeds)}
