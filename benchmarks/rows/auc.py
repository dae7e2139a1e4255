"""AUC of examples/dlrm.py on its computed click log: one process of torch, and modes of rows.

`one_process` is torch alone, with `nn.Embedding` of all ids and the same first rows, on the joined
batches; `ssgd`, `asgd`, `ssp` and `hybrid` (dense steps together, rows at once) are the example on
two workers and two shards; `bayes` is the best AUC that any model can reach on the same samples.
All are means over the seeds of the log; `ssgd_off` is the largest difference of `ssgd` from
`one_process` with the same seed.
"""

from __future__ import annotations

import importlib
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
SAID = re.compile(r"AUC ([\d.]+), best possible ([\d.]+)")


def run_example(samples: int, *options: str) -> tuple[float, float]:
    """Returns the AUC of the example on two workers, and the best possible."""
    words = [sys.executable, "-m", "psworker", "run", "--workers", "2", "--shards", "2", "--quiet"]
    words += ["--", str(EXAMPLES / "dlrm.py"), "--samples", str(samples), *options]
    done = subprocess.run(words, cwd=kit.ROOT, capture_output=True, text=True)
    found = SAID.search(done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return float(found[1]), float(found[2])


def run_alone(samples: int, seed: int) -> float:
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

    def score(numbers: Any) -> torch.Tensor:
        ranks = (torch.from_numpy(each.astype(np.int64)) for each in log.ranks(numbers))
        scores: torch.Tensor = model(*ranks)
        return scores

    for step in range(samples // BATCH):
        numbers = step * BATCH + np.arange(BATCH)
        click = torch.from_numpy(log.labels(numbers))
        model.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score(numbers), click)
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
    numbers = samples + np.arange(dlrm.TESTED)
    with torch.no_grad():
        return float(clicks.auc(log.labels(numbers), score(numbers).numpy()))


def _make_table(name: str, num_ids: int) -> Any:
    """Returns a module of torch with the first rows of a row table, by the ranks of its ids."""
    import torch

    import psworker

    ids = mix64(np.arange(num_ids + 1, dtype=np.uint64)).view(np.int64)
    with torch.no_grad():
        rows = psworker.Embedding(None, DIM, name=name, init="normal(0.1)")(torch.from_numpy(ids))
    return torch.nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)


def measure(quick: bool) -> dict[str, float]:
    """Returns the AUC by way.

    Args:
        quick: Whether there are few samples, one seed and two modes.
    """
    samples = SAMPLES or (QUICK if quick else FULL)
    runs: list[dict[str, float]] = []
    for seed in range(1 if quick else SEEDS):
        run = {"one_process": run_alone(samples, seed)}
        for name in QUICK_MODES if quick else MODES:
            run[name], run["bayes"] = run_example(samples, "--seed", str(seed), *MODES[name])
        runs.append(run)
    found = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
    off = max(abs(run["ssgd"] - run["one_process"]) for run in runs)
    return {**found, "ssgd_off": off, "samples": samples, "seeds": len(runs)}
