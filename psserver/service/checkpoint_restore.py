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
from pscore.optimizers import OPTIMIZERS
from pscore.partition import make_layout
from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from pscore.table_spec import TableSpec, count_of
from pscore.types import Origin, SliceSpec
from psserver.decisions.membership import Membership
from psserver.decisions.table import make_table
from psserver.engine.engine import Engine
from psserver.engine.host_memory import available_nbytes
from psserver.engine.residuals import is_residual
from psserver.engine.restore import RestoredTable, require_free, restore

UPLOADS_MAX = 8
NAME_LENGTH_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTable:
    """The declaration of one table."""

    spec: TableSpec
    version: int  # Version of all slices.
    clock: int  # First step of the workers; in an asynchronous mode not the version.
    counts: list[int]  # Optimizer steps of each tensor.
    arrays: frozenset[str]  # By their names in `SliceStore.restore`.
    parts: dict[int, SliceSpec]  # This shard's slices.

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(4 * len(self.of(part)) * part.numel for part in self.parts.values())

    def of(self, part: SliceSpec) -> list[str]:
        """Returns the arrays of a slice: one that is not compressed has no residuals."""
        return [name for name in self.arrays if part.compress or not is_residual(name)]


class CheckpointUpload:
    """The numbers of one job, received in parts.

    Attributes:
        arrays: The declared arrays, by table and slice, and by name.
    """

    def __init__(self, request: pb.PrepareRequest, engine: Engine, staged_nbytes: int) -> None:
        """Allocates memory for the declared tables.

        Args:
            request: Job and tables.
            engine: The shard.
            staged_nbytes: Memory of other uploads.

        Raises:
            PacelineError: It cannot be a job of this shard, or there is no memory for it.
        """
        self.job = request.job
        self.num_workers = request.num_workers
        self.min_workers = request.min_workers
        self.touched_s = engine.now()
        self._engine = engine
        require_free(engine, self.job)
        members = Membership(request.num_workers, 0.0, request.min_workers)
        self._tables = [_declared(text, engine) for text in request.tables]
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
            (number, index): {name: np.zeros(part.numel, np.float32) for name in table.of(part)}
            for number, table in enumerate(self._tables)
            for index, part in table.parts.items()
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
        restore(self._engine, self.job, self.num_workers, self.min_workers, tables)


def _declared(text: str, engine: Engine) -> DeclaredTable:
    """Returns one table of a request, checked.

    Raises:
        PacelineError: It cannot be a table of this shard.
    """
    try:
        about = json.loads(text)
        spec = TableSpec.from_json(about["spec"])
        version = count_of(about["version"], f"the version of table {spec.name!r}")
        clock = count_of(about.get("clock", version), f"the clock of table {spec.name!r}")
        spec = replace(spec, origin=Origin(clock, spec.origin.step))
        counts = [count_of(count, "the optimizer's steps of a tensor") for count in about["counts"]]
        names = frozenset(str(name) for name in about["arrays"])
    except (ValueError, KeyError, TypeError) as problem:
        raise RemoteProtocolError(f"a table of the checkpoint: {problem!r}") from problem
    shard = engine.shard
    if spec.num_shards != shard.num_shards:
        raise ConfigError(f"there are {shard.num_shards} shards here")
    if spec.optimizer not in OPTIMIZERS or len(counts) != len(spec.tensors):
        raise RemoteProtocolError(
            f"table {spec.name!r} of the checkpoint: optimizer {spec.optimizer!r}, {len(counts)} "
            f"counts for {len(spec.tensors)} tensors"
        )
    wanted = {
        "weights",
        *(f"state.{i}" for i in range(len(OPTIMIZERS[spec.optimizer].state_names))),
    }
    for name in sorted(names ^ wanted):
        if name in wanted:
            raise RemoteProtocolError(f"table {spec.name!r} of the checkpoint lacks {name!r}")
        is_kept = name.startswith("memory.") or is_residual(name, spec.compressor)
        if not is_kept or len(name) > NAME_LENGTH_MAX:
            raise RemoteProtocolError(
                f"array {name[:NAME_LENGTH_MAX]!r} of table {spec.name!r} of the checkpoint is "
                "not one that a shard keeps"
            )
    parts = make_layout(spec.tensors, spec.num_shards).of_shard(shard.index)
    return DeclaredTable(
        spec=spec,
        version=version,
        clock=clock,
        counts=counts,
        arrays=names,
        parts={part.index: part for part in parts},
    )
