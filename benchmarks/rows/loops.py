"""The loops of a shard over rows, beside copies of the same places by numpy.

100,000 rows of 32 floats, drawn from a slab in a mapped file, in the order of their places; one
thread, the best of some rounds. `..._of_floor` is the time over that of numpy's copy of as many
whole places: out of the slab for a read, out of it and back for a step of an optimizer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pscore.rows.optimizers import ROW_OPTIMIZERS
from pscore.rows.spec import RowTable, stride_of
from psserver.rows.mapped import Mapped
from psserver.rows.slab import Slab

DIM, TOUCHED, ROUNDS, AT_ONCE = 32, 100_000, 15, 100_000
FULL, QUICK = 10_000_000, 500_000  # Rows.
OPTIMIZERS = "sgd", "rowwise_adagrad"
HYPER = {"lr": 0.01, "eps": 1e-8}


def _best_ms(action: Callable[[], object]) -> float:
    times_s = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - start_s)
    return 1e3 * min(times_s)


def _measure(name: str, num_rows: int, folder: Path) -> dict[str, float]:
    """Returns milliseconds, and ratios, of the loops of one optimizer."""
    optimizer = ROW_OPTIMIZERS[name]()
    nbytes = stride_of(optimizer, DIM)
    table, memory = RowTable(init="uniform(0.01)"), Mapped(nbytes * num_rows, folder / name, 1)
    slab = Slab(DIM, num_rows, optimizer, table, memory)
    hyper = np.array([HYPER.get(each, 0.0) for each in optimizer.hyper_names])
    zeros = np.zeros(AT_ONCE * DIM, np.float32)
    for part in np.array_split(np.arange(num_rows, dtype=np.uint64), num_rows // AT_ONCE):
        plan = slab.plan(part)
        slab.begin(plan)
        slab.step(plan, zeros, 1.0, 1, 1, hyper)
    drawn = np.random.default_rng(0).choice(num_rows, TOUCHED, replace=False)
    ids = np.sort(drawn).astype(np.uint64)
    plan, places = slab.plan(ids), slab.find(ids)
    out = np.empty(TOUCHED * DIM, np.float32)
    whole = memory.data.reshape(num_rows, nbytes).view(np.uint64)
    copy = np.empty((TOUCHED, whole.shape[1]), np.uint64)

    def copy_out() -> None:
        np.take(whole, places, axis=0, out=copy, mode="clip")

    def copy_back() -> None:
        copy_out()
        whole[places] = copy

    read_ms, step_ms = _best_ms(copy_out), _best_ms(copy_back)
    found = {
        "read": _best_ms(lambda: slab.read(ids, places, DIM, out)),
        "step": _best_ms(lambda: slab.step(plan, zeros, 1.0, 2, 2, hyper)),
    }
    return {
        f"{name}_find_ms": _best_ms(lambda: slab.find(ids)),
        **{f"{name}_{loop}_ms": took_ms for loop, took_ms in found.items()},
        f"{name}_read_of_floor": found["read"] / read_ms,
        f"{name}_step_of_floor": found["step"] / step_ms,
    }


def measure(quick: bool) -> dict[str, float]:
    """Returns the figures by optimizer.

    Args:
        quick: Whether the slab is small.
    """
    found: dict[str, float] = {}
    for name in OPTIMIZERS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            found |= _measure(name, QUICK if quick else FULL, Path(folder))
    return found
