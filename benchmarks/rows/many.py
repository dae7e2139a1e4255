"""A job with one table of many rows and one worker, which makes its steps as it is told."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kit, measured
from benchmarks.survival.shards import Shards, free_ports
from pscore.compressors.none import NoCompression
from pscore.rows.partition import slices_of
from pscore.rows.payload import encode_push
from pscore.rows.spec import Rows, RowTable
from pscore.rules import SSGD
from pscore.table_spec import TableSpec
from pscore.types import Role, TensorSpec

MODULE, JOB, DIM, SEED = "benchmarks.rows.many", "many-rows", 32, 1
FULL, QUICK = 10_000_000, 200_000  # Rows.
AT_ONCE = 200_000  # Rows of a step that makes new ones.
HYPER = np.array([[0.01, 0.0, 0.0]])  # sgd


def spec_of(table: RowTable, num_shards: int) -> TableSpec:
    """Returns the declaration of one table without a bound of ids, trained by SGD."""
    return TableSpec(
        name="rows",
        tensors=(TensorSpec(name="table", shape=(0, DIM), dtype="float32"),),
        num_shards=num_shards,
        rule=SSGD(),
        compressor=NoCompression(),
        optimizer="sgd",
        num_groups=1,
        content=Rows(tables=(table,)),
    )


class Worker:
    """The worker: each method is an order that it obeys."""

    def __init__(self, table: RowTable, num_shards: int) -> None:
        """Joins the job, and makes the first version if it is new."""
        from psworker.job import context
        from psworker.rows.row_exchange import RowExchange

        session = context.join().session
        self._exchange = RowExchange(session, spec_of(table, num_shards))
        self._num_slices = num_shards
        if "rows" not in session.known_tables:
            for index in range(num_shards):
                self._exchange.load(index, Role.WEIGHTS, [])
            self._exchange.flush()
        self._exchange.begin(None)

    def push(self, ids: np.ndarray) -> float:
        """Pulls some rows, and pushes them as their own gradient; returns the seconds."""
        parts = self._divide(ids)
        start_s = time.perf_counter()
        rows = self._pull(parts, is_look=False)
        for index, (own, values) in enumerate(zip(parts, rows, strict=True)):
            times = np.ones(len(own), np.uint16)
            payload = encode_push([own], [values], [times])
            self._exchange.push(index, payload, hyper=HYPER, present=1, samples=1.0)
        self._exchange.flush()
        return time.perf_counter() - start_s

    def fill(self, num_rows: int) -> None:
        """Makes the rows of the first ids."""
        for part in np.array_split(np.arange(num_rows, dtype=np.uint64), -(-num_rows // AT_ONCE)):
            self.push(part)

    def pass_through(self, num_ids: int) -> None:
        """Pushes the first ids, each in two steps one behind the other."""
        for part in np.array_split(np.arange(num_ids, dtype=np.uint64), -(-num_ids // AT_ONCE)):
            self.push(part)
            self.push(part)

    def draw(self, num_rows: int, touched: int, rounds: int) -> None:
        """Draws the rows of the next steps."""
        drawn = np.random.default_rng(rounds)
        ids = (drawn.choice(num_rows, touched, replace=False) for _ in range(rounds))
        self._drawn = [np.sort(each).astype(np.uint64) for each in ids]

    def steps(self) -> list[float]:
        """Makes steps on the drawn rows; returns the seconds of each."""
        return [self.push(each) for each in self._drawn]

    def look(self, num_rows: int, first: int = 0) -> str:
        """Looks rows up, from the id `first` on; returns a hash of all of them."""
        found = hashlib.sha256()
        ids = np.arange(first, first + num_rows, dtype=np.uint64)
        for part in np.array_split(ids, -(-num_rows // AT_ONCE)):
            parts = self._divide(part)
            rows = np.empty((len(part), DIM), np.float32)
            for own, values in zip(parts, self._pull(parts, is_look=True), strict=True):
                rows[np.searchsorted(part, own)] = values
            found.update(rows)
        return found.hexdigest()

    def _divide(self, ids: np.ndarray) -> list[np.ndarray]:
        """Returns the ids of each slice."""
        owners = slices_of(ids, SEED, self._num_slices)
        return [ids[owners == index] for index in range(self._num_slices)]

    def _pull(self, parts: list[np.ndarray], *, is_look: bool) -> list[np.ndarray]:
        rows = [np.empty((len(own), DIM), np.float32) for own in parts]
        calls = [
            self._exchange.request(index, [own], out.reshape(-1), is_look=is_look)
            for index, (own, out) in enumerate(zip(parts, rows, strict=True))
        ]
        for index, call in enumerate(calls):
            self._exchange.wait(index, call)
        return rows


def obey(table: dict[str, Any], num_shards: int) -> None:
    """Runs a worker, which reads orders from standard input until it ends."""
    worker = Worker(RowTable(**table), num_shards)
    print("null", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)


class Job:
    """The shards and the worker.

    Attributes:
        shards: The shards.
    """

    def __init__(self, shards: Shards, worker: kit.Role) -> None:
        """Keeps both."""
        self.shards, self._worker = shards, worker

    def tell(self, name: str, *arguments: Any) -> None:
        """Gives an order."""
        self._worker.tell(json.dumps([name, *arguments]))

    def hear(self) -> Any:
        """Returns the answer to an order."""
        return self._worker.line()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Gives an order, and returns the answer."""
        self.tell(name, *arguments)
        return self.hear()


@contextmanager
def shards_of(folder: Path, num_shards: int, *flags: str) -> Iterator[Shards]:
    """Starts shards whose state lies in `folder`; ends them in any case."""
    (folder / "state").mkdir(parents=True)
    number = ["--shards", str(num_shards), "--checkpoint-s", "86400", *flags]
    shards = Shards(folder, folder / "state", number, port=free_ports(num_shards))
    shards.start()
    try:
        yield shards
    finally:
        shards.stop()


@contextmanager
def running(shards: Shards, table: RowTable) -> Iterator[Job]:
    """Starts a worker of running shards; ends it in any case."""
    num_shards = len(shards.addresses)
    environment = kit.worker_environment(shards.addresses, 0, 1, "auto", JOB)
    arguments = {"table": asdict(table), "num_shards": num_shards}
    with kit.roles(kit.Role(MODULE, "obey", arguments, environment)) as (worker,):
        job = Job(shards, worker)
        job.hear()
        yield job


def table_of(num_rows: int) -> RowTable:
    """Returns the declaration of a table with room for so many rows."""
    return RowTable(seed=SEED, init="uniform(0.01)", max_rows=num_rows)


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"obey": obey})
