"""A checkpoint on its way into a shard: declared, written in parts, then made a job.

The parts lie in memory beside the tables until the job is made of them, or until the client has
sent none for a while (checkpoint_service.py). Memory for all of them is reserved when they are
declared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from pscore.errors import ConfigError, LimitError, RemoteProtocolError
from pscore.json_text import count_of
from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from pscore.table_spec import TableSpec
from pscore.types import Origin, SliceSpec
from psserver.archives import archive_of
from psserver.decisions.membership import Membership
from psserver.decisions.table import make_table
from psserver.engine.engine import Engine
from psserver.engine.host_memory import available_nbytes
from psserver.engine.restore import RestoredTable, require_free, restore

UPLOADS_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTable:
    """The declaration of one table."""

    spec: TableSpec
    version: int  # Version of all slices.
    clock: int  # First step of the workers; in an asynchronous mode not the version.
    counts: list[int]  # Optimizer steps of each tensor.
    parts: dict[int, SliceSpec]  # This shard's slices.
    # Dtype and elements of each array, by slice and by its name in `Store.restore`.
    arrays: dict[int, dict[str, tuple[str, int]]]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        every = [sizes for arrays in self.arrays.values() for sizes in arrays.values()]
        return sum(np.dtype(dtype).itemsize * numel for dtype, numel in every)


class CheckpointUpload:
    """The numbers of one job, received in parts.

    Attributes:
        arrays: The declared arrays, by table and slice, and by name.
    """

    def __init__(self, request: pb.PrepareRequest, engine: Engine, staged_nbytes: int) -> None:
        """Allocates memory for the declared tables.

        Raises:
            PacelineError: It cannot be a job of this shard, or there is no memory for it.
        """
        self.job = request.job
        self.num_workers = request.num_workers
        self.min_workers = request.min_workers
        self.touched_s = engine.now()
        self._engine = engine
        self._replaces = request.replaces
        members = Membership(request.num_workers, 0.0, request.min_workers)
        self._tables = [_declared(text, engine) for text in request.tables]
        if not self._replaces:
            require_free(engine, self.job)
        for number, table in enumerate(self._tables):  # All that `Engine.define` would refuse.
            make_table(table.spec, number, engine.shard.index, members, is_kept=False)
        self.nbytes = sum(table.nbytes for table in self._tables)
        what = f"the checkpoint of job {self.job!r} on shard {engine.shard.index}"
        with engine.lock:
            engine.shard.require_memory(what, self.nbytes, staged_nbytes)
        available = available_nbytes()
        if self.nbytes > available:
            raise LimitError(f"{what} has {self.nbytes} bytes, {available} are left on its host")
        self._written: dict[tuple[int, int, str], int] = {}  # Bytes: by table, slice, array.
        self.arrays: dict[tuple[int, int], dict[str, np.ndarray]] = {
            (number, index): {name: np.zeros(numel, dtype) for name, (dtype, numel) in own.items()}
            for number, table in enumerate(self._tables)
            for index, own in table.arrays.items()
        }

    def write(self, request: pb.WriteRequest) -> None:
        """Copies the next part of an array.

        Raises:
            RemoteProtocolError: It was not declared, or parts before it are missing.
        """
        self.touched_s = self._engine.now()
        key = (request.table, request.slice, request.array)
        array = self.arrays.get(key[:2], {}).get(request.array)
        if array is None:
            raise RemoteProtocolError(
                f"no array {request.array!r} of slice {request.slice} of table {request.table} "
                "was declared"
            )
        target, written = array.view(np.uint8), self._written.get(key, 0)
        stop = request.offset + len(request.data)
        if request.offset > written or stop > target.nbytes:
            raise RemoteProtocolError(
                f"bytes {request.offset} to {stop} of {request.array!r}, it has {target.nbytes} "
                f"and {written} are there"
            )
        target[request.offset : stop] = np.frombuffer(request.data, dtype=np.uint8)
        self._written[key] = max(written, stop)

    def clear(self) -> None:
        """Frees the job whose place this one takes.

        Raises:
            ConfigError: Workers take part in it.
        """
        self._engine.forget(self.job, is_forced=self._replaces)

    def finish(self) -> None:
        """Makes the job.

        Raises:
            PacelineError: Something is missing, or the job cannot be made.
        """
        for (number, index), arrays in self.arrays.items():
            for name, array in arrays.items():
                if self._written.get((number, index, name), 0) < array.nbytes:
                    raise RemoteProtocolError(
                        f"{name!r} of slice {index} of the checkpoint is incomplete"
                    )
        tables: list[RestoredTable] = []
        for number, declared in enumerate(self._tables):
            slices = {index: self.arrays[number, index] for index in declared.parts}
            for index, part in declared.parts.items():
                counts = [declared.counts[segment.tensor] for segment in part.segments]
                slices[index]["counts"] = np.array(counts, dtype=np.int64)
            tables.append(
                RestoredTable(
                    spec=declared.spec,
                    version=declared.version,
                    clock=declared.clock,
                    slices=slices,
                )
            )
        restore(
            self._engine,
            self.job,
            self.num_workers,
            self.min_workers,
            tables,
            replaces=self._replaces,
        )


def _declared(text: str, engine: Engine) -> DeclaredTable:
    """Returns one table of a request, checked."""
    try:
        about = json.loads(text)
        spec = TableSpec.from_json(about["spec"])
        version = count_of(about["version"], f"the version of table {spec.name!r}")
        clock = count_of(about.get("clock", version), f"the clock of table {spec.name!r}")
        spec = replace(spec, origin=Origin(clock, spec.origin.step))
        counts = [count_of(count, "the optimizer's steps of a tensor") for count in about["counts"]]
        parts = [part for part in spec.layout().slices if part.shard == engine.shard.index]
        arrays = archive_of(spec.content.name).staged(spec, parts, about)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise RemoteProtocolError(f"a table of the checkpoint: {problem!r}") from problem
    shard = engine.shard
    if spec.num_shards != shard.num_shards:
        raise ConfigError(
            f"there are {shard.num_shards} shards here: give --servers the addresses of all"
        )
    if len(counts) != len(spec.tensors):
        raise RemoteProtocolError(
            f"table {spec.name!r} of the checkpoint: {len(counts)} counts for "
            f"{len(spec.tensors)} tensors"
        )
    return DeclaredTable(
        spec=spec,
        version=version,
        clock=clock,
        counts=counts,
        arrays=arrays,
        parts={part.index: part for part in parts},
    )
