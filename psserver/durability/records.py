"""Records: declarations of tables and the workers of a job, as JSON in checkpoints and journals."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pscore.types import TensorSpec
from psserver.decisions.membership import Member, Presence
from psserver.decisions.shard import Job
from psserver.decisions.table import TableSpec, make_spec


def members_to_json(job: Job) -> list[dict[str, Any]]:
    """Returns the workers of a job as JSON can hold them."""
    return [
        {
            "rank": member.rank,
            "incarnation": member.incarnation,
            "spent": list(member.spent),
            "restart": member.restart,
            "host": member.host,
            "pid": member.pid,
            "presence": member.presence.value,
        }
        for member in job.membership.members.values()
    ]


def members_of(meta: dict[str, Any], now_s: float) -> list[Member]:
    """Returns the workers in a record; those that were live have a new lease."""
    return [
        Member(
            rank=entry["rank"],
            incarnation=entry["incarnation"],
            spent=tuple(entry.get("spent", ())),
            restart=entry["restart"],
            host=entry["host"],
            pid=entry["pid"],
            heard_s=now_s,
            presence=Presence(entry["presence"]),
        )
        for entry in meta["members"]
    ]


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


def spec_of(entry: dict[str, Any]) -> TableSpec:
    """Returns the declaration of a table in a record."""
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


def sync(path: Path) -> None:
    """Writes a file or a folder through to the disk.

    Raises:
        OSError: The disk refuses.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
