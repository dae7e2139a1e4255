"""Pull and push of rows at a shard, with the journal on: times, and bytes beside their formula.

One worker and one shard. The table has SGD's rows of 32 floats; at each step the worker pulls as
many distinct rows of it as it then pushes, ids drawn anew. The time is that from the request for
the rows to the rows, and on to the acknowledgement of the push, which the shard gives when it has
written the push down; the update follows it and is waited for by the next pull.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import kit, measured

MODULE = "benchmarks.rows.shard"
DIM = 32
PLANES = {"shm": "local", "tcp": "tcp"}
FULL = {"num_rows": 10_000_000, "touched": 100_000, "rounds": 20}
QUICK = {"num_rows": 1_000_000, "touched": 100_000, "rounds": 7}
ID_NBYTES, TIMES_NBYTES, FLOAT_NBYTES = 8, 2, 4


def run_worker(num_rows: int, touched: int, rounds: int) -> None:
    """Runs the worker."""
    from pscore.compressors.none import NoCompression
    from pscore.rows.payload import encode_push
    from pscore.rows.spec import Rows, RowTable
    from pscore.rules import SSGD
    from pscore.table_spec import TableSpec
    from pscore.types import Role, TensorSpec
    from psworker.job import context
    from psworker.rows.row_exchange import RowExchange

    session = context.join().session
    table = RowTable(init="uniform(0.01)", max_rows=num_rows)
    spec = TableSpec(
        name="rows",
        tensors=(TensorSpec(name="table", shape=(num_rows, DIM), dtype="float32"),),
        num_shards=1,
        rule=SSGD(),
        compressor=NoCompression(),
        optimizer="sgd",
        num_groups=1,
        content=Rows(tables=(table,)),
    )
    exchange = RowExchange(session, spec)
    exchange.load(0, Role.WEIGHTS, [])
    exchange.flush()
    exchange.begin(0)
    hyper = np.array([[0.01, 0.0, 0.0]])
    drawn = np.random.default_rng(0)

    def step(ids: np.ndarray) -> float:
        out = np.empty(len(ids) * DIM, np.float32)
        times = np.ones(len(ids), np.uint16)
        start_s = time.perf_counter()
        exchange.wait(0, exchange.request(0, [ids], out))
        exchange.push(0, encode_push([ids], [out], [times]), hyper=hyper, present=1, samples=1.0)
        exchange.flush()
        return time.perf_counter() - start_s

    for part in np.array_split(np.arange(num_rows, dtype=np.uint64), -(-num_rows // touched)):
        step(part)  # All rows are there: none is made while the time is taken.
    measured.await_go()
    before = exchange.traffic.pushed_nbytes + exchange.traffic.pulled_nbytes
    times_s = [
        step(np.sort(drawn.choice(num_rows, touched, replace=False).astype(np.uint64)))
        for _ in range(rounds)
    ]
    nbytes = exchange.traffic.pushed_nbytes + exchange.traffic.pulled_nbytes - before
    measured.report({"times_s": times_s, "nbytes": nbytes, "cpu_s": measured.own_cpu_s()})
    context.shutdown()


def measure(quick: bool) -> dict[str, float]:
    """Returns milliseconds by data plane, and the bytes of a step over those of the formula.

    Args:
        quick: Whether the table is small.
    """
    case = QUICK if quick else FULL
    found: dict[str, float] = {}
    ratio = 0.0
    for name, plane in PLANES.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            (result,), _ = kit.run_workers(
                MODULE,
                "worker",
                case,
                plane=plane,
                num_workers=1,
                num_shards=1,
                journal_dir=Path(folder),
            )
        found[name] = round(1000 * float(np.median(result["times_s"])), 2)
        row_nbytes = ID_NBYTES + TIMES_NBYTES + 2 * FLOAT_NBYTES * DIM
        ratio = result["nbytes"] / (case["rounds"] * case["touched"] * row_nbytes)
    return found | {"bytes_of_formula": round(ratio, 4)}


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"worker": run_worker})
