"""Shards with row tables in one thread: the real engines, without network and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pscore.compressors.none import NoCompression
from pscore.pb.ps.v1 import data_pb2
from pscore.rows.hashing import IdArray
from pscore.rows.partition import buckets_of, slices_of
from pscore.rows.payload import decode_values, encode_pull, encode_push
from pscore.rows.spec import Rows, RowTable
from pscore.rules import SSGD
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, HyperArray, TensorSpec
from psserver.decisions.limits import Limits
from psserver.decisions.membership import Member
from psserver.decisions.shard import Shard
from psserver.durability.journal_dir import JournalDir
from psserver.engine.engine import Engine
from psserver.engine.resume import recover
from psserver.engine.slice_queue import SliceQueue
from psserver.rows.store import RowStore

JOB = "rows"
Ids = Sequence[Any]  # By table: ids, as a list or an array.


def row_spec(
    *tables: tuple[str, int, int, RowTable],
    optimizer: str = "sgd",
    rule: Rule | None = None,
    num_shards: int = 1,
    parts: int = 1,
) -> TableSpec:
    """Returns the declaration of row tables, each a name, rows (0: no bound), dim and the rest."""
    return TableSpec(
        name="rows",
        tensors=tuple(
            TensorSpec(name=name, shape=(rows, dim), dtype="float32")
            for name, rows, dim, _ in tables
        ),
        num_shards=num_shards,
        rule=SSGD() if rule is None else rule,
        compressor=NoCompression(),
        optimizer=optimizer,
        num_groups=1,
        content=Rows(tables=tuple(table for *_, table in tables), parts=parts),
    )


def crowded(seed: int, count: int, every: int = 256) -> IdArray:
    """Returns ids below 2^20 of a table with `seed`, ascending, all in each `every`-th bucket."""
    ids = np.arange(1 << 20, dtype=np.uint64)
    found: IdArray = ids[buckets_of(ids, seed) % every == 0][:count]
    return found


class Answers:
    """Receives the answers of a shard."""

    def __init__(self) -> None:
        self.pushes: list[data_pb2.PushReply] = []
        self.pulls: list[tuple[data_pb2.PullReply, np.ndarray]] = []

    def pushed(self, reply: data_pb2.PushReply) -> None:
        self.pushes.append(reply)

    def pulled(
        self, reply: data_pb2.PullReply, arrays: Sequence[Any], release: Callable[[], None] | None
    ) -> None:
        data = b"".join(array.tobytes() for array in arrays)
        self.pulls.append((reply, np.frombuffer(data, np.uint8)))
        if release is not None:
            release()


class RowShards:
    """All shards of a job with one table of rows, and its workers.

    Attributes:
        engines: One for each shard.
    """

    def __init__(
        self,
        spec: TableSpec,
        num_workers: int = 1,
        folder: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Starts the shards, has all workers join and defines the table.

        Args:
            spec: The declaration.
            num_workers: Workers.
            folder: Where the journals are; None: nothing outlives a kill.
            limits: Bounds on memory.
        """
        self.spec, self.num_workers, self._folder = spec, num_workers, folder
        self._limits = limits
        self.layout = spec.layout()
        self.engines = [self._start(shard) for shard in range(spec.num_shards)]
        self.incarnation = 7
        for engine in self.engines:
            for rank in range(num_workers):
                member = Member(rank=rank, incarnation=7, restart=0, host="a", pid=1, heard_s=0.0)
                engine.define(engine.join(JOB, num_workers, member), spec)

    def _start(self, shard: int) -> Engine:
        self._journals: list[JournalDir | None] = getattr(self, "_journals", [])
        journals = None if self._folder is None else JournalDir(self._folder / str(shard))
        self._journals[shard : shard + 1] = [journals]
        limits = self._limits or Limits(is_kept=journals is not None)
        machine = Shard(shard, self.spec.num_shards, 60.0, limits)
        return Engine(machine, now=lambda: 0.0, journals=journals)

    def kill(self, shard: int) -> None:
        """Replaces a shard's process by one that has its journals only."""
        journals = self._journals[shard]
        assert journals is not None
        journals.close()
        self.engines[shard] = self._start(shard)
        assert recover(self.engines[shard]) == [JOB]

    @property
    def journals(self) -> list[JournalDir | None]:
        """The journals of each shard."""
        return list(self._journals)

    def continue_from(self, folder: Path) -> None:
        """Replaces the process of shard 0 by one with the journals in another folder."""
        self._folder = folder
        self.kill(0)

    def stores(self) -> list[RowStore]:
        """Returns the stores of all slices, in the order of the slices."""
        found: dict[int, SliceQueue] = {}
        for engine in self.engines:
            found.update(engine.jobs[JOB].tables[0].queues)
        stores = [found[index].store for index in sorted(found)]
        return [store for store in stores if isinstance(store, RowStore)]

    @property
    def version(self) -> int:
        """The version that all slices have."""
        clocks = [c for e in self.engines for c in e.jobs[JOB].job.table(0).clocks.values()]
        (version,) = {clock.version for clock in clocks}
        return version

    def begin(self, worker: int = 0) -> None:
        """Uploads the weights: none, since rows begin as the seed says."""
        for part in self.layout.slices:
            header = data_pb2.PushHeader(
                sender=self._sender(worker), slice=part.index, role=data_pb2.ROLE_WEIGHTS
            )
            self._send(part.shard, header, [])

    def locate(self, step: int) -> None:
        """Loads a state without rows, for its step."""
        for part in self.layout.slices:
            header = data_pb2.PushHeader(
                sender=self._sender(0), slice=part.index, role=data_pb2.ROLE_STATE, step=step
            )
            self._send(part.shard, header, [])

    def load(self, ids: Ids, values: Sequence[Any], worker: int = 0) -> None:
        """Loads rows, weights or weights and state."""
        for part, chosen in self.divide(ids):
            data = self._payload(ids, values, None, chosen)
            header = data_pb2.PushHeader(
                sender=self._sender(worker), slice=part, role=data_pb2.ROLE_STATE
            )
            self._send(self.layout.slices[part].shard, header, data)

    def push(
        self,
        worker: int,
        step: int,
        ids: Ids,
        values: Sequence[Any],
        hyper: HyperArray,
        *,
        samples: float = 1.0,
        present: int = -1,
        base_version: int = 0,
        occurrences: Sequence[Any] | None = None,
        only: Sequence[int] | None = None,
    ) -> list[str]:
        """Pushes rows to every slice; returns the verdicts of those that have answered.

        Args:
            worker: Rank.
            step: Step.
            ids: By table, in any order, each once.
            values: By table, `(n, dim)`.
            hyper: `(num_groups, num_hyper)`.
            samples: Weight in the mean.
            present: Bit i: table i has a gradient.
            base_version: Version of the rows that the gradient was computed from.
            occurrences: By table, how often each id was in the batch; None: once.
            only: The slices that are pushed to; None: all.
        """
        verdicts = []
        for part, chosen in self.divide(ids):
            if only is not None and part not in only:
                continue
            data = self._payload(ids, values, occurrences, chosen)
            segments = len(self.spec.tensors)
            bits = b"" if present == -1 else present.to_bytes((segments + 7) // 8, "little")
            header = data_pb2.PushHeader(
                sender=self._sender(worker),
                slice=part,
                step=step,
                base_version=base_version,
                samples=samples,
                present=bits,
                hyper=hyper.ravel().tolist(),
            )
            replies = self._send(self.layout.slices[part].shard, header, data).pushes
            verdicts += [data_pb2.Verdict.Name(reply.verdict) for reply in replies]
        return verdicts

    def pull(
        self,
        ids: Ids,
        *,
        worker: int = 0,
        clock: int = 0,
        min_version: int = 0,
        look: bool = True,
        since: int = -1,
        held: Sequence[FloatArray] | None = None,
        with_state: bool = False,
    ) -> list[FloatArray]:
        """Returns the rows of ids, by table `(n, dim)`, in the order of the ids."""
        arrays = [np.asarray(each, np.uint64) for each in ids]
        widths = [tensor.shape[1] for tensor in self.spec.tensors]
        if with_state:
            widths = [slab.width for slab in self.stores()[0].slabs]
        out = [
            np.zeros((len(each), width), np.float32) if held is None else held[index].copy()
            for index, (each, width) in enumerate(zip(arrays, widths, strict=True))
        ]
        for part, chosen in self.divide(ids):
            asked = [each[rows] for each, rows in zip(arrays, chosen, strict=True)]
            header = data_pb2.PullHeader(
                sender=self._sender(worker),
                slice=part,
                clock=clock,
                min_version=min_version,
                look=look,
                with_state=with_state,
            )
            data = np.frombuffer(b"".join(encode_pull(asked, since)), np.uint8)
            answers = Answers()
            engine = self.engines[self.layout.slices[part].shard]
            engine.requests.on_pull(header, answers, 1.0, data)
            ((reply, payload),) = answers.pulls
            assert reply.ready
            parts = [target[rows].copy() for target, rows in zip(out, chosen, strict=True)]
            decode_values(payload, since, widths, parts)
            for target, rows, values in zip(out, chosen, parts, strict=True):
                target[rows] = values
        return out

    # ----- inside

    def _sender(self, worker: int) -> data_pb2.Sender:
        return data_pb2.Sender(job=JOB, worker=worker, incarnation=self.incarnation)

    def divide(self, ids: Ids) -> list[tuple[int, list[np.ndarray]]]:
        """Returns each slice with the positions of its ids, by table, in the order of the ids."""
        num_slices = len(self.layout.slices)
        content = self.spec.content
        assert isinstance(content, Rows)
        owners, orders = [], []
        for each, table in zip(ids, content.tables, strict=True):
            array = np.asarray(each, np.uint64)
            owners.append(slices_of(array, table.seed, num_slices))
            orders.append(np.argsort(array))
        return [
            (
                part,
                [
                    order[owner[order] == part] if len(owner) else np.empty(0, np.int64)
                    for owner, order in zip(owners, orders, strict=True)
                ],
            )
            for part in range(num_slices)
        ]

    def _payload(
        self,
        ids: Ids,
        values: Sequence[Any],
        occurrences: Sequence[Any] | None,
        chosen: Sequence[np.ndarray],
    ) -> list[memoryview]:
        times = occurrences or [np.ones(len(each)) for each in ids]
        return encode_push(
            [np.asarray(e, np.uint64)[rows] for e, rows in zip(ids, chosen, strict=True)],
            [
                np.asarray(v, np.float32)[rows]
                for v, each, rows in zip(values, ids, chosen, strict=True)
            ],
            [np.asarray(t).astype(np.uint16)[rows] for t, rows in zip(times, chosen, strict=True)],
        )

    def _send(self, shard: int, header: data_pb2.PushHeader, parts: list[memoryview]) -> Answers:
        answers = Answers()
        data = np.frombuffer(b"".join(parts), np.uint8)
        requests = self.engines[shard].requests
        requests.admit(header, data.nbytes)
        requests.on_push(header, data, answers)
        return answers
