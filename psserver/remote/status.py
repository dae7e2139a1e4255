"""Combines the status of all shards and their jobs into one view, as a table or JSON."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from pscore.grid import Grid
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.text import counted, printable
from psserver.decisions.job_state import State
from psserver.exits import CommandError, Exit
from psserver.remote.waits import advice_of, waits_of

ADDED = {"tokens", "tokens_per_s"}  # Reported values that add up over the workers.
WIDTH = 200  # Width of tables outside of a terminal, in columns.
LISTED_MAX = 8  # Tables shown of one job; a user of the low-level interface may have thousands.
Value = Callable[[dict[str, Any]], object]  # Returns the cell of a column for an item.
TABLE_COLUMNS: Mapping[str, Value] = {
    "table": lambda table: table["name"],
    "mode": lambda table: table["mode"],
    "compression": lambda table: table["compressor"],
    "optimizer": lambda table: table["optimizer"],
    "slices": lambda table: table["num_slices"],
    "weights": lambda table: in_bytes(table["nbytes"]),
    "version": lambda table: (
        " ".join(map(str, table.get("rounds") or ()))
        or _versions(table["version_min"], table["version_max"])
    ),
}
PEER_COLUMNS: Mapping[str, Value] = {
    "worker": lambda peers: peers["rank"],
    "step": lambda peers: peers["step"],
    "partner": lambda peers: "none yet" if peers["partner"] < 0 else peers["partner"],
    "heard": lambda peers: f"{in_time(peers['age_s'])} ago",
    "exchanges": lambda peers: peers["num_exchanges"],
    "staleness": lambda peers: peers["staleness"],
    "from the mean": lambda peers: f"{peers['distance']:.2g}",
}
STAGE_COLUMNS: Mapping[str, Value] = {
    "stage": lambda stage: stage["stage"],
    "replica": lambda stage: stage["replica"],
    "worker": lambda stage: stage["rank"],
    "minibatch": lambda stage: stage["minibatch"],
    "version": lambda stage: stage["version"],
    "versions held": lambda stage: stage["versions_held"],
    "in flight": lambda stage: stage["in_flight"],
    "activations": lambda stage: in_bytes(stage["activation_nbytes"]),
    "waited": lambda stage: in_time(stage["waits_s"]),
}


def combine(
    addresses: Sequence[str], answers: Sequence[pb.StatusReply | Exception]
) -> dict[str, Any]:
    """Returns the answers of all shards, of which one at least has answered, as a JSON value.

    Bytes and counts are added up over the shards; a worker's step, staleness and silence are the
    largest that any shard has seen; its data planes are one for each shard that it has reported to;
    versions are the oldest and newest of any slice. Where workers exchange models, and push them
    now and then, steps are those that the workers have made. Jobs with live workers come first, by
    their names; then the others, the newest first: the one whose workers were heard last.
    """
    answered = {
        address: answer
        for address, answer in zip(addresses, answers, strict=True)
        if isinstance(answer, pb.StatusReply)
    }
    replies = list(answered.values())
    silent = [
        {"index": index, "address": address}
        for index, address in enumerate(addresses)
        if address not in answered
    ]
    names = sorted({job.job for reply in replies for job in reply.jobs})
    jobs = [
        _job(name, [job for reply in replies for job in reply.jobs if job.job == name])
        for name in names
    ]
    return {
        "cluster": replies[0].shard.cluster,
        "version": replies[0].shard.version,
        "protocol": replies[0].shard.protocol,
        "shards": [
            {
                "index": reply.shard.shard,
                "address": address,
                "pid": reply.pid,
                "uptime_s": round(reply.uptime_s, 1),
                "memory_nbytes": reply.memory_nbytes,
                "under_way_nbytes": reply.under_way_nbytes,
                "num_recoveries": reply.num_recoveries,
                "num_mended": reply.num_mended,
                "moving": reply.moving,
                "moved_to": reply.shard.moved_to,
                "copies": _fields(reply.copies) if reply.HasField("copies") else None,
            }
            for address, reply in answered.items()
        ],
        "silent": silent,
        "jobs": sorted(jobs, key=_place),
    }


def is_live(job: dict[str, Any]) -> bool:
    """Returns whether workers take part in a job of the picture."""
    return bool(job["state"] == State.LIVE.value)


def _place(job: dict[str, Any]) -> tuple[bool, float]:
    """Returns the place of a job in the list; jobs with the same one are in the order of names."""
    if is_live(job):
        return False, 0.0
    return True, math.inf if job["silent_s"] is None else job["silent_s"]


def _job(name: str, parts: Sequence[pb.JobStatus]) -> dict[str, Any]:
    ranks = sorted({worker.rank for part in parts for worker in part.workers})
    workers = [
        _worker([w for part in parts for w in part.workers if w.rank == rank]) for rank in ranks
    ]
    tables = dict.fromkeys(table.name for part in parts for table in part.tables)
    with_peers = [worker for worker in workers if worker["peers"]]
    return {
        "name": name,
        "num_workers": parts[0].num_workers,
        "min_workers": parts[0].min_workers,
        "num_pushes": sum(part.num_pushes for part in parts),
        "num_updates": sum(part.num_updates for part in parts),
        "waiting_for": list(dict.fromkeys(text for part in parts for text in part.waiting_for)),
        "pushed_nbytes": sum(part.pushed_nbytes for part in parts),
        "pulled_nbytes": sum(part.pulled_nbytes for part in parts),
        "raw_pushed_nbytes": sum(part.raw_pushed_nbytes for part in parts),
        "raw_pulled_nbytes": sum(part.raw_pulled_nbytes for part in parts),
        "state": parts[0].state,
        "chosen": parts[0].chosen,
        "step": max([part.step for part in parts] + [worker["step"] for worker in with_peers]),
        "silent_s": _silent_s(parts),
        "open_steps": max(part.open_steps for part in parts),
        "num_lost": max(part.num_lost for part in parts),
        "checkpoint_age_s": _checkpoint_age_s(parts),
        "reported": _reported(workers),
        "workers": workers,
        "tables": [
            _table([t for part in parts for t in part.tables if t.name == table])
            for table in tables
        ],
        "published": [],  # `psserver.remote.readers` adds them.
    }


def _worker(seen: Sequence[pb.WorkerStatus]) -> dict[str, Any]:
    states = {worker.state for worker in seen}
    return {
        "rank": seen[0].rank,
        "host": seen[0].host,
        "pid": seen[0].pid,
        "state": next(s for s in ("lost", "live", "left", *sorted(states)) if s in states),
        "step": max(n for w in seen for n in (w.step, *(report.step for report in w.peers))),
        "staleness": max(worker.staleness for worker in seen),
        "last_heard_s": round(max(worker.last_heard_s for worker in seen), 1),
        "reported": {
            name: value for worker in seen for name, value in sorted(worker.reported.items())
        },
        "peers": [_fields(report, age_s=1) for worker in seen for report in worker.peers],
        "pace": _pace(seen),
        "waited_for_s": round(max(worker.waited_for_s for worker in seen), 1),
        "data_planes": [worker.data_plane for worker in seen if worker.data_plane],
        "stage": next(
            (_fields(one.stage, waits_s=3) for one in seen if one.HasField("stage")), None
        ),
    }


def _fields(message: Message, **digits: int) -> dict[str, Any]:
    """Returns the fields of a message by name; those in `digits` are rounded to so many."""
    fields = {name: getattr(message, name) for name in message.DESCRIPTOR.fields_by_name}
    return fields | {name: round(fields[name], count) for name, count in digits.items()}


def _pace(seen: Sequence[pb.WorkerStatus]) -> dict[str, Any]:
    """Returns the sums of a worker's steps and waits, which only the first shard has."""
    pace = max((worker.pace for worker in seen), key=lambda pace: pace.num_steps)
    return _fields(pace, steps_s=3, waits_s=3, requests_s=3, step_s=6)


def _silent_s(parts: Sequence[pb.JobStatus]) -> float | None:
    """Returns the seconds since a shard heard a worker of the job; None: it has had none here."""
    heard = [part.silent_s for part in parts if part.workers]
    return round(min(heard), 1) if heard else None


def _checkpoint_age_s(parts: Sequence[pb.JobStatus]) -> float | None:
    """Returns the seconds since the newest checkpoint that a shard knows of; None: none."""
    ages = [part.checkpoint_age_s for part in parts if part.has_checkpoint]
    return round(max(ages), 1) if ages else None


def _reported(workers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns what live workers report of a job: tokens add up, other values are means."""
    found: dict[str, list[float]] = {}
    for worker in workers:
        for name, value in worker["reported"].items():
            if worker["state"] == "live":
                found.setdefault(name, []).append(value)
    return {
        name: sum(values) if name in ADDED else sum(values) / len(values)
        for name, values in sorted(found.items())
    }


def _table(parts: Sequence[pb.TableStatus]) -> dict[str, Any]:
    holding = [part for part in parts if part.num_slices] or parts
    held: Counter[str] = Counter()
    for part in parts:
        held.update(part.held)
    return {
        "name": parts[0].name,
        "mode": parts[0].mode,
        "compressor": parts[0].compressor,
        "optimizer": parts[0].optimizer,
        "num_slices": sum(part.num_slices for part in parts),
        "num_exposed": sum(part.num_exposed for part in parts),
        "held": dict(held),
        "nbytes": sum(part.nbytes for part in parts),
        "version_min": min(part.version_min for part in holding),
        "version_max": max(part.version_max for part in holding),
        "rounds": [
            min((rounds for rounds in of_shards if rounds >= 0), default=-1)
            for of_shards in zip(*(part.rounds for part in parts), strict=False)
        ],
        "waiting_for": [part.waiting_for for part in parts if part.waiting_for],
    }


def show(status: dict[str, Any]) -> None:
    """Prints the picture as tables, ended jobs in a line."""
    from rich.console import Console

    # A file or a pipe has no width; there nothing is cut off.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    console = Console(soft_wrap=False, highlight=False, width=width)
    about = f"cluster {status['cluster']}, paceline {status['version']}"
    columns: dict[str, Value] = {
        "shard": lambda shard: shard["index"],
        "address": lambda shard: shard["address"],
        "process": lambda shard: shard["pid"],
        "up": lambda shard: in_time(shard["uptime_s"]),
        "memory": lambda shard: in_bytes(shard["memory_nbytes"]),
    }
    console.print(table_of(about, columns, status["shards"]))
    for shard in status["silent"]:
        console.print(f"shard {shard['index']} at {shard['address']} does not answer", markup=False)
    _show_safety(console, status["shards"])
    jobs = status["jobs"]
    ended = [job["name"] for job in jobs if job["state"] == State.ENDED.value and len(jobs) > 1]
    for job in jobs:
        if job["name"] not in ended:
            _show_job(console, job)
            for line in published_lines(job["published"], LISTED_MAX):
                console.print(line, markup=False)
    if ended:
        names = ", ".join(ended[:LISTED_MAX]) + (", ..." if len(ended) > LISTED_MAX else "")
        what = f"{len(ended)} ended job{'s' if len(ended) > 1 else ''}: {names}"
        console.print(f"{what} (--job NAME or --json shows more)", markup=False)
    if not status["jobs"]:
        console.print("no jobs yet")


def _show_safety(console: Any, shards: Sequence[dict[str, Any]]) -> None:
    """Prints how often jobs were set back, and how copies at a second place fare."""
    if num_mended := max(shard["num_mended"] for shard in shards):
        console.print(
            f"jobs were set back to a checkpoint {num_mended} times: a shard had lost its part"
        )
    for shard in shards:
        if shard["moved_to"]:
            console.print(f"shard {shard['index']} is at {shard['moved_to']} now", markup=False)
        if shard["moving"]:
            console.print(f"shard {shard['index']}: {printable(shard['moving'])}", markup=False)
    for copies in (shard["copies"] for shard in shards if shard["copies"]):
        fares = f"not up to date: {copies['problem']}" if copies["problem"] else copies["count"]
        console.print(
            printable(f"copies of checkpoints at {copies['place']}: {fares}"), markup=False
        )


def only(status: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the picture with one of its jobs.

    Raises:
        CommandError: There is no such job; names the jobs of these shards.
    """
    found = [job for job in status["jobs"] if job["name"] == name]
    if not found:
        names = ", ".join(job["name"] for job in status["jobs"][:LISTED_MAX])
        raise CommandError(Exit.USAGE, f"no job {name!r} here; there are {names or 'none'}")
    return {**status, "jobs": found}


def _show_job(console: Any, job: dict[str, Any]) -> None:
    workers = job["workers"]
    columns: dict[str, Value] = {
        "worker": lambda worker: worker["rank"],
        "host": lambda worker: worker["host"],
        "process": lambda worker: worker["pid"],
        "state": lambda worker: worker["state"],
        "step": lambda worker: worker["step"],
    }
    if any(worker["pace"]["round_steps"] for worker in workers):
        columns["of a round"] = lambda worker: worker["pace"]["round_steps"]
    columns |= {
        "staleness": lambda worker: worker["staleness"],
        "plane": lambda worker: ", ".join(dict.fromkeys(worker["data_planes"])),
        "heard": lambda worker: f"{in_time(worker['last_heard_s'])} ago",
    }
    if any(worker["reported"] for worker in workers):
        columns["reported"] = lambda worker: _values(worker["reported"])
    least = f"{job['min_workers']} to " if job["min_workers"] else ""
    title = (
        f"job {job['name']} (workers: {least}{job['num_workers']}, "
        f"pushes: {job['num_pushes']} of {in_bytes(job['pushed_nbytes'])}, "
        f"updates: {job['num_updates']}, pulled: {in_bytes(job['pulled_nbytes'])})"
    )
    console.print(table_of(title, columns, workers))
    peers = [one | {"rank": worker["rank"]} for worker in workers for one in worker["peers"]]
    stages = [one["stage"] | {"rank": one["rank"]} for one in workers if one["stage"]]
    for names, rows in ((PEER_COLUMNS, peers), (STAGE_COLUMNS, stages)):
        if rows:
            console.print(table_of(None, names, rows))
    console.print(table_of(None, TABLE_COLUMNS, job["tables"][:LISTED_MAX]))
    if len(job["tables"]) > LISTED_MAX:
        console.print(f"and {len(job['tables']) - LISTED_MAX} more tables (--json shows them)")
    _show_held(console, job)
    _show_exposed(console, job)
    if job["reported"]:
        console.print(f"reported by live workers: {_values(job['reported'])}", markup=False)
    for wait in waits_of(job)[:LISTED_MAX]:
        console.print(f"waits for {printable(wait.in_words)}", markup=False)
    for line in filter(None, (job["chosen"], advice_of(job))):
        console.print(printable(line), markup=False)


def published_lines(publications: Sequence[dict[str, Any]], room: int) -> list[str]:
    """Returns published weights and their readers as text.

    Args:
        publications: Those of `psserver.remote.readers.listed`.
        room: Readers of each that are listed; those furthest behind come first.
    """
    found = []
    for one in publications:
        sent = ", ".join(f"{form} {in_bytes(n)}" for form, n in sorted(one["sent"].items()))
        table, readers = f"{one['job']}/{one['table']}", one["readers"]
        found.append(
            f"{table}: {_version(one)}, "
            f"{counted(len(readers), 'reader')}; sent: {sent or 'nothing'}"
        )
        found += [
            f"  {reader['host']} pid {reader['pid']}: "
            + (
                f"version {reader['version']}, {reader['lag']} behind ({reader['lag_steps']} "
                f"steps, {reader['lag_s']:g} s), {reader['resyncs']} resyncs"
                if reader["version"] >= 0
                else f"no version yet, since {reader['lag_s']:g} s"
            )
            for reader in sorted(readers, key=lambda reader: -float(reader["lag_s"]))[:room]
        ]
        if len(readers) > room:
            found.append(f"  and {len(readers) - room} more readers (psserver readers)")
    return [printable(line) for line in found]


def _version(published: dict[str, Any]) -> str:
    if published["version"] >= 0:
        return f"version {published['version']} (step {published['step']})"
    unit = "updates" if published["exact"] else "s"
    return f"no version yet, one comes every {published['every']} {unit}"


def _show_held(console: Any, job: dict[str, Any]) -> None:
    """Prints counts of the things that tables hold beside weights."""
    for table in job["tables"]:
        if table.get("held"):
            held = ", ".join(
                f"{name.removesuffix('_nbytes')} "
                f"{in_bytes(count) if name.endswith('_nbytes') else f'{count:,}'}"
                for name, count in sorted(table["held"].items())
            )
            console.print(f"{printable(repr(table['name']))} holds {held}", markup=False)


def _show_exposed(console: Any, job: dict[str, Any]) -> None:
    """Prints how many slices of a job would be lost with the process of their shard."""
    for table in job["tables"]:
        if table["num_exposed"]:
            console.print(
                f"{table['num_exposed']} of {table['num_slices']} slices of {table['name']!r} have "
                "no space to be journalled, and would be lost with their shard's process",
                markup=False,
            )


def table_of(title: str | None, columns: Mapping[str, Value], items: Iterable[Any]) -> Grid:
    """Returns a table for `rich` to print, with a row for each item."""
    from rich.markup import escape

    rows = [[escape(printable(str(value(item)))) for value in columns.values()] for item in items]
    return Grid(list(columns), rows, title and escape(printable(title)))


def _values(reported: dict[str, float]) -> str:
    """Returns reported values for people, the loss and the rate of tokens first."""
    first = [name for name in ("loss", "tokens_per_s") if name in reported]
    names = [*first, *(name for name in reported if name not in first)]
    return ", ".join(f"{printable(name)} {reported[name]:.4g}" for name in names)


def _versions(low: int, high: int) -> str:
    if high < 0:
        return "no weights"
    return str(low) if low == high else f"{low}..{high}"


def in_time(seconds: float) -> str:
    """Returns a time for people: `2.5 min`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def in_bytes(count: float) -> str:
    """Returns a number of bytes for people: `2.5 MiB`."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{count:.0f} B"
