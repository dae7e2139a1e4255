"""A job's numbers on their way back into a shard: declared, written in parts, and then made a job.

What is written lies in memory beside the tables until the job is made of it, or until nobody has
sent any more of it for a while (checkpoint_service.py); room for all of it is asked for when it is
declared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import psutil

from pscore.errors import ConfigError, LimitError, RemoteProtocolError
from pscore.optimizers import OPTIMIZERS
from pscore.partition import make_layout
from pscore.pb.ps.v1 import checkpoint_pb2 as pb
from pscore.table_spec import TableSpec
from pscore.types import Origin, SliceSpec
from psserver.engine.engine import Engine
from psserver.engine.residuals import is_owed

DELIVERIES_MAX = 8
NAME_LENGTH_MAX = 256
VERSION_MAX = 1 << 48  # Of a slice; nobody makes so many updates.


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One table, as it was declared."""

    spec: TableSpec
    version: int  # Of all slices, from which the job goes on.
    clock: int  # Steps from which its workers go on: in an asynchronous mode not the version.
    counts: list[int]  # Optimizer steps of each tensor.
    arrays: frozenset[str]  # By their names in `SliceStore.restore`.
    parts: dict[int, SliceSpec]  # This shard's slices.

    @property
    def nbytes(self) -> int:
        """Bytes of all that is to come."""
        return sum(4 * len(self.of(part)) * part.numel for part in self.parts.values())

    def of(self, part: SliceSpec) -> list[str]:
        """Returns the arrays of a slice: what is owed is there where it is compressed."""
        return [name for name in self.arrays if part.compress or not is_owed(name)]


class Delivery:
    """One job on its way out of a checkpoint."""

    def __init__(self, request: pb.PrepareRequest, engine: Engine, staged_nbytes: int) -> None:
        """Takes down what is to come.

        Args:
            request: Job and tables.
            engine: The shard.
            staged_nbytes: What other checkpoints take on their way here.

        Raises:
            PacelineError: It cannot be a job of this shard, or there is no memory for it.
        """
        self.job = request.job
        self.num_workers = request.num_workers
        self.min_workers = request.min_workers
        self.touched_s = engine.now()
        self._engine = engine
        self._require_free()
        self._tables = [_declared(text, engine) for text in request.tables]
        self.nbytes = sum(table.nbytes for table in self._tables)
        what = f"the checkpoint of job {self.job!r} on shard {engine.shard.index}"
        engine.shard.require_memory(what, self.nbytes, staged_nbytes)
        available = psutil.virtual_memory().available
        if self.nbytes > available:
            raise LimitError(f"{what} has {self.nbytes} bytes, {available} are left on its host")
        self._written: dict[tuple[int, int, str], int] = {}  # Bytes: by table, slice, array.
        self._arrays: dict[tuple[int, int], dict[str, np.ndarray]] = {
            (number, index): {name: np.zeros(part.numel, np.float32) for name in table.of(part)}
            for number, table in enumerate(self._tables)
            for index, part in table.parts.items()
        }

    def write(self, request: pb.WriteRequest) -> None:
        """Takes the next part of an array.

        Raises:
            RemoteProtocolError: It was not declared, or parts before it are missing.
        """
        self.touched_s = self._engine.now()
        key = (request.table, request.slice, request.array)
        array = self._arrays.get(key[:2], {}).get(request.array)
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
        """Makes the job; called under the engine's lock.

        Raises:
            PacelineError: Something is missing, or the job cannot be made.
        """
        for (number, index), arrays in self._arrays.items():
            for name, array in arrays.items():
                if self._written.get((number, index, name), 0) < array.nbytes:
                    raise RemoteProtocolError(
                        f"{name!r} of slice {index} of the checkpoint is not whole"
                    )
        self._require_free()
        engine = self._engine
        job = engine.begin_restored(self.job, self.num_workers, self.min_workers)
        for number, declared in enumerate(self._tables):
            table, _ = engine.define(job, declared.spec)
            version, first = declared.version, declared.clock
            # Who joins goes on where everybody was: drawn numbers are of a step, and so the same.
            clocks = dict.fromkeys(range(self.num_workers), first)
            for index, clock in table.clocks.items():
                arrays = self._arrays[number, index]
                for name in [name for name in arrays if is_owed(name)]:
                    engine.requests.debts.keep(job, table, index, name, arrays.pop(name), first)
                segments = table.specs[index].segments
                counts = [declared.counts[segment.tensor] for segment in segments]
                arrays["counts"] = np.array(counts, dtype=np.int64)
                engine.requests.queues[id(job), table.index, index].store.restore(
                    arrays, version, clocks
                )
                clock.restore(version, clocks)
        engine.note_owed(job)

    def _require_free(self) -> None:
        shard = self._engine.shard
        job = shard.jobs.get(self.job)
        if job is not None and job.membership.live():
            raise ConfigError(
                f"job {self.job!r} has live workers on shard {shard.index}; restore it under "
                "another name with --job, or when they have left"
            )


def _declared(text: str, engine: Engine) -> Declared:
    """Returns one table of a request, checked.

    Raises:
        PacelineError: It cannot be a table of this shard.
    """
    try:
        about = json.loads(text)
        spec = TableSpec.from_json(about["spec"])
        version = int(about["version"])
        clock = int(about.get("clock", version))
        spec = replace(spec, origin=Origin(clock, spec.origin.step))
        counts = [int(count) for count in about["counts"]]
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
    if not (0 <= version <= VERSION_MAX and 0 <= clock <= VERSION_MAX):
        raise RemoteProtocolError(
            f"table {spec.name!r} of the checkpoint has version {version} and clock {clock}"
        )
    wanted = {
        "weights",
        *(f"state.{i}" for i in range(len(OPTIMIZERS[spec.optimizer].state_names))),
    }
    for name in sorted(names ^ wanted):
        if name in wanted:
            raise RemoteProtocolError(f"table {spec.name!r} of the checkpoint is without {name!r}")
        is_kept = name.startswith("memory.") or is_owed(name, spec.compressor)
        if not is_kept or len(name) > NAME_LENGTH_MAX:
            raise RemoteProtocolError(
                f"array {name[:NAME_LENGTH_MAX]!r} of table {spec.name!r} of the checkpoint is "
                "none that a shard keeps"
            )
    parts = make_layout(spec.tensors, spec.num_shards).of_shard(shard.index)
    return Declared(
        spec=spec,
        version=version,
        clock=clock,
        counts=counts,
        arrays=names,
        parts={part.index: part for part in parts},
    )
