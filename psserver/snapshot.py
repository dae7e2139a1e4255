"""Snapshots of one shard: what it comes back with when its process has died.

Every few seconds each job's slices are copied, each between two of its actions, and written to one
safetensors file per job: temporary file, fsync, rename, so that a full disk or a kill in the middle
leaves the last good one. A slice is copied with its version and with what has been counted of each
worker; slices may be of different versions, as they are at any moment of training. What has been
pushed since the last snapshot is lost with the process: workers are told, and go on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pscore.types import TensorSpec
from psserver.lanes import Copy, Lane
from psserver.membership import Member, Presence
from psserver.shard import Job
from psserver.table import TableSpec, make_spec

log = structlog.get_logger()
FORMAT = 1
COPY_TIMEOUT_S = 60.0
META = "paceline"

Arrays = dict[str, np.ndarray]


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """One job of one shard."""

    meta: dict[str, Any]
    arrays: Arrays = field(default_factory=dict)  # By "table/slice/name".


def describe(job: Job, shard: int, num_shards: int) -> dict[str, Any]:
    """Returns all of a job but its arrays, as JSON can hold it. Called under the driver's lock."""
    return {
        "format": FORMAT,
        "job": job.name,
        "shard": shard,
        "num_shards": num_shards,
        "num_workers": job.membership.num_workers,
        "min_workers": job.membership.min_workers,
        "members": members_to_json(job),
        "tables": [
            {
                "index": table.index,
                "spec": spec_to_json(table.spec),
                "slices": {
                    str(index): {
                        "version": clock.version,
                        "clocks": {str(rank): c.clock for rank, c in clock.counted.items()},
                    }
                    for index, clock in table.clocks.items()
                },
            }
            for table in job.tables.values()
        ],
    }


def members_to_json(job: Job) -> list[dict[str, Any]]:
    """Returns the workers of a job as JSON can hold them."""
    return [
        {
            "rank": member.rank,
            "incarnation": member.incarnation,
            "restart": member.restart,
            "host": member.host,
            "pid": member.pid,
            "presence": member.presence.value,
        }
        for member in job.membership.members.values()
    ]


def copy(
    lanes: dict[tuple[int, int], Lane], start: Callable[[], dict[str, Any]]
) -> Callable[[], Snapshot]:
    """Queues a copy of each slice behind what has been decided, and returns how to wait for all.

    Args:
        lanes: By table and slice. Called under the driver's lock.
        start: Returns `describe` of the job.
    """
    snapshot = Snapshot(meta=start())
    left = threading.Semaphore(0)

    def taker(table: int, index: int) -> Callable[[Arrays], None]:
        def take(arrays: Arrays) -> None:
            for name, array in arrays.items():
                snapshot.arrays[f"{table}/{index}/{name}"] = array
            left.release()

        return take

    for (table, index), lane in lanes.items():
        lane.submit([Copy(take=taker(table, index))])

    def wait() -> Snapshot:
        for _ in lanes:
            if not left.acquire(timeout=COPY_TIMEOUT_S):
                raise TimeoutError(f"a slice was not copied within {COPY_TIMEOUT_S:g} s")
        return snapshot

    return wait


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Writes a snapshot in the place of the job's last one.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the last one is still there.
    """
    path = folder / file_name(snapshot.meta["job"])
    draft = path.with_suffix(".draft")
    try:
        save_file(snapshot.arrays, draft, {META: json.dumps(snapshot.meta)})
        sync(draft)
        draft.replace(path)
        sync(folder)
    except SafetensorError as problem:
        raise OSError(str(problem)) from problem
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return path


def read_all(folder: Path) -> Iterator[Snapshot]:
    """Reads what there is; a file that is not a snapshot of this format is logged and left."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                meta = json.loads((file.metadata() or {})[META])
                if meta["format"] != FORMAT:
                    raise ValueError(f"format {meta['format']}, {FORMAT} wanted")
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, OSError) as problem:
            log.error("snapshot cannot be read", path=str(path), reason=repr(problem))
            continue
        yield Snapshot(meta=meta, arrays=arrays)


def members_of(meta: dict[str, Any], now_s: float) -> list[Member]:
    """Returns the workers in a snapshot; those that were live have a new lease."""
    return [
        Member(
            rank=entry["rank"],
            incarnation=entry["incarnation"],
            restart=entry["restart"],
            host=entry["host"],
            pid=entry["pid"],
            heard_s=now_s,
            presence=Presence(entry["presence"]),
        )
        for entry in meta["members"]
    ]


def spec_of(entry: dict[str, Any]) -> TableSpec:
    """Returns the declaration of a table in a snapshot."""
    spec = entry["spec"]
    tensors = tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in spec["tensors"])
    return make_spec(
        name=spec["name"],
        tensors=tensors,
        num_shards=spec["num_shards"],
        rule=(spec["rule"][0], spec["rule"][1]),
        compressor=(spec["compressor"][0], spec["compressor"][1]),
        optimizer=spec["optimizer"],
        num_groups=spec["num_groups"],
        pull_compressor=tuple(spec.get("pull_compressor", ("none", {}))),
        origin=tuple(spec.get("origin", (0, 0))),
    )


def file_name(job: str) -> str:
    """Returns the file of a job: its name may hold anything, so a hash stands for it."""
    return f"{hashlib.sha256(job.encode()).hexdigest()[:16]}.safetensors"


def spec_to_json(spec: TableSpec) -> dict[str, Any]:
    """Returns the declaration of a table as JSON can hold it."""
    return {
        "name": spec.name,
        "tensors": [asdict(tensor) for tensor in spec.tensors],
        "num_shards": spec.num_shards,
        "rule": [spec.rule.name, spec.rule.arguments()],
        "compressor": [spec.compressor.name, spec.compressor.arguments()],
        "optimizer": spec.optimizer,
        "num_groups": spec.num_groups,
        "pull_compressor": [spec.pull_compressor.name, spec.pull_compressor.arguments()],
        "origin": [spec.origin.clock, spec.origin.step],
    }


def sync(path: Path) -> None:
    """Has a file or a folder on the disk.

    Raises:
        OSError: The disk refuses.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
