"""Rows that are here before a step needs them: prefetched ones, and those of a worker's cache.

`compute_ms`: a step of the dense part alone, on rows that lie in the worker; `as_needed_ms`: with
rows of a table that the lookup pulls; `ahead_ms`: with `prefetch`. One worker and one shard, one
thread each. `ahead_of_compute` is the ratio of the third to the first.

`bytes_saved`: share of the bytes of pulled rows that a cache of 1 % of the ids saves, with the
click model of examples/dlrm.py on two workers in `asgd`; `saved_at_best`: that of a cache that
always holds the 1 % that are drawn most often; `auc` and `auc_cached`: the model's AUC.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from benchmarks import kit, measured
from benchmarks.rows.step import DIM

MODULE = "benchmarks.rows.early"
WAYS = {"compute_ms": "compute", "as_needed_ms": "as needed", "ahead_ms": "ahead"}
FULL = {"num_rows": 1_000_000, "touched": 10_000, "hidden": 512, "rounds": 20}
QUICK = {"num_rows": 250_000, "touched": 10_000, "hidden": 512, "rounds": 5}
SAMPLES, QUICK_SAMPLES = 2_000_000, 200_000
BATCH, CLICK_DIM, STALENESS, SHARE = 2048, 16, 10, 100  # The cache has one of so many ids.


def run_step(num_rows: int, touched: int, hidden: int, rounds: int, way: str) -> None:
    """Runs the worker of one way."""
    import torch

    import psworker

    torch.set_num_threads(1)
    table = psworker.Embedding(num_rows, DIM, name="table", init="uniform(0.01)")
    top = torch.nn.Sequential(
        torch.nn.Linear(DIM, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden),
        torch.nn.ReLU(), torch.nn.Linear(hidden, 1),
    )  # fmt: skip
    has_rows = way != "compute"
    model = torch.nn.ModuleDict({"table": table, "top": top} if has_rows else {"top": top})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.Adagrad(top.parameters()),
        model.named_parameters(),
        rows=torch.optim.Adagrad([table.weight]) if has_rows else None,
    )
    given = torch.randn(touched, DIM)
    batches: Any = (
        torch.randint(num_rows, (touched,)) for _ in range(rounds + measured.WARM_ROUNDS)
    )
    if way == "ahead":
        batches = psworker.prefetch(batches, model, ids=lambda ids: {table: ids})

    def one_step() -> None:
        ids = next(batches)
        optimizer.zero_grad()
        rows = table(ids) if has_rows else given.detach().requires_grad_()
        torch.autograd.backward(top(rows).square().mean())
        optimizer.step()

    measured.report(measured.timed(one_step, rounds))
    psworker.shutdown()


def run_clicks(samples: int, has_cache: bool) -> None:
    """Trains the click model as one worker, and reports its bytes of pulled rows and its AUC."""
    import torch

    import psworker

    sys.path.insert(0, str(kit.ROOT / "examples"))
    dlrm: Any = importlib.import_module("dlrm")
    clicks: Any = importlib.import_module("clicks")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    log = clicks.Clicks(0, dlrm.USERS, dlrm.ITEMS)
    tables = []
    for name, (num_ids, _) in {"users": dlrm.USERS, "items": dlrm.ITEMS}.items():
        cache = psworker.RowCache(num_ids // SHARE, STALENESS) if has_cache else None
        table = psworker.Embedding(None, CLICK_DIM, name=name, init="normal(0.1)", cache=cache)
        tables.append(table)
    model = dlrm.ClickModel(*tables, CLICK_DIM)
    optimizer = psworker.DistributedOptimizer(
        torch.optim.Adagrad(psworker.dense_parameters(model), lr=0.02),
        model.named_parameters(),
        rows=torch.optim.Adagrad([table.weight for table in tables], lr=0.1),
        mode="asgd",
    )
    rank, num_workers = psworker.rank(), psworker.size()
    steps, size = samples // BATCH, BATCH // num_workers
    measured.await_go()
    for user, item, click in dlrm.batches(log, 0, steps, size, rank, num_workers):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(user, item), click)
        torch.autograd.backward(loss)
        optimizer.step()
    nbytes = tables[0].source.tables.exchange.traffic.pulled_nbytes  # type: ignore[union-attr]
    psworker.barrier("trained")
    auc = dlrm.evaluate(model, log, samples)["all"][0] if rank == 0 else None
    psworker.barrier("evaluated")
    measured.report({"nbytes": nbytes, "auc": auc})
    psworker.shutdown()


def _saved_at_best(size: int) -> float:
    """Returns the share of rows, of batches of `size`, that the best cache of 1 % saves.

    A row that is drawn with probability q a step is pulled, and then used 10 q times without.
    """
    dlrm, pulled, saved = importlib.import_module("dlrm"), 0.0, 0.0
    for number, exponent in (dlrm.USERS, dlrm.ITEMS):
        edges = np.arange(1, number + 2) ** (1.0 - exponent)
        chances = np.diff((edges - 1.0) / (edges[-1] - 1.0))  # As clicks.py draws ranks.
        used = 1.0 - (1.0 - chances) ** size
        hot = used[: number // SHARE]
        pulled += used.sum()
        saved += (hot * STALENESS * hot / (1.0 + STALENESS * hot)).sum()
    return saved / pulled


def _run_clicks(samples: int, *, has_cache: bool) -> tuple[int, float]:
    """Returns the bytes of pulled rows of both workers, and the AUC."""
    arguments = {"samples": samples, "has_cache": has_cache}
    results, _ = kit.run_workers(
        MODULE, "clicks", arguments, plane="auto", num_workers=2, num_shards=2
    )
    return sum(result["nbytes"] for result in results), float(results[0]["auc"])


def measure(quick: bool) -> dict[str, float]:
    """Returns the figures.

    Args:
        quick: Whether the table is small, and there are few samples.
    """
    case, found = QUICK if quick else FULL, {}
    for name, way in WAYS.items():
        (result,), _ = kit.run_workers(
            MODULE, "step", {**case, "way": way}, plane="auto", num_workers=1, num_shards=1
        )
        found[name] = 1e3 * kit.median(result["times_s"])
    found["ahead_of_compute"] = found["ahead_ms"] / found["compute_ms"]
    samples = QUICK_SAMPLES if quick else SAMPLES
    nbytes, auc = _run_clicks(samples, has_cache=False)
    of_cached, auc_cached = _run_clicks(samples, has_cache=True)
    sys.path.insert(0, str(kit.ROOT / "examples"))
    return {
        **found,
        "bytes_saved": 1.0 - of_cached / nbytes,
        "saved_at_best": _saved_at_best(BATCH // 2),
        "auc": auc,
        "auc_cached": auc_cached,
    }


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"step": run_step, "clicks": run_clicks})
