"""What a shard writes into its vault as it goes, and how it goes on from there after a SIGKILL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from pscore.compressors.base import Compressor
from pscore.rules import make_rule
from pscore.segment import Segment, WeightsMap
from pscore.types import FloatArray, Push, SliceSpec
from psserver import records
from psserver.barriers import Barrier
from psserver.clock import SliceClock
from psserver.counted import Bin, Token
from psserver.footprint import num_changing
from psserver.intake import Request
from psserver.journal import ROOT_NBYTES, SliceJournal
from psserver.shard import Actions, Address, Job, Shard
from psserver.store import RAW, Payload, SliceStore
from psserver.table import Table
from psserver.vault import JobVault, Meta, Vault

log = structlog.get_logger()
RECORDS_NBYTES = 8192  # Of the two records of a slice, with some workers.


@dataclass(slots=True, kw_only=True)
class Room:
    """Where the numbers of a table live."""

    weights: Segment
    journals: dict[int, SliceJournal] = field(default_factory=dict)  # By slice; none on the heap.


class Recovery:
    """The vault of one shard, by job. Called under the driver's lock."""

    def __init__(self, vault: Vault | None, shard: Shard) -> None:
        """Keeps `shard` in `vault`, or nowhere."""
        self._vault = vault
        self._shard = shard
        self._jobs: dict[int, JobVault] = {}  # By the id of the job.
        self._roots: dict[tuple[int, int], dict[int, int]] = {}  # By job and table: by slice.
        self._without: set[int] = set()  # Jobs for which there was no room.

    # ----- writing

    def note(self, job: Job) -> None:
        """Writes down who takes part in a job; called when that changes."""
        if self._vault is None or id(job) in self._without:
            return
        try:
            if id(job) not in self._jobs:
                self._jobs[id(job)] = self._vault.make()
            self._jobs[id(job)].write_job(_describe(job))
        except OSError as problem:
            log.error("membership is not journalled", job=job.name, reason=str(problem))

    def note_table(self, job: Job, table: Table) -> None:
        """Writes down the mode of a table; called when that changes."""
        kept = self._jobs.get(id(job))
        if kept is None:
            return
        try:
            kept.write_table(table.index, self._describe_table(job, table))
        except OSError as problem:
            log.error("mode is not journalled", job=job.name, reason=str(problem))

    def make_room(self, job: Job, table: Table) -> Room:
        """Returns memory for a new table: in the vault, or on the heap if that has no room.

        Raises:
            OSError: There is none anywhere.
        """
        layout = WeightsMap(list(table.specs.values()))
        kept = self._jobs.get(id(job))
        if kept is not None:
            try:
                weights = kept.weights(table.index, layout.nbytes)
                kept.arena.reserve(_nbytes_in_arena(table))
                roots = {index: kept.arena.allocate(ROOT_NBYTES) for index in table.specs}
                room = self._open(kept, table, weights, roots)
                self._roots[id(job), table.index] = roots
                kept.write_table(table.index, self._describe_table(job, table))
            except OSError as problem:
                self.forget(id(job))
                self._without.add(id(job))
                log.warning(
                    "no room to journal a job: it would be lost with this process",
                    job=job.name,
                    table=table.spec.name,
                    folder=str(kept.folder),
                    reason=str(problem),
                )
            else:
                return room
        return Room(weights=Segment.create(layout.nbytes))

    def note_owed(self, job: Job, arrays: Mapping[str, FloatArray]) -> None:
        """Writes down what workers have still to claim, or that there is nothing more of it."""
        kept = self._jobs.get(id(job))
        if kept is None:
            return
        try:
            kept.write_owed(arrays)
        except OSError as problem:
            log.error("what workers owe is not journalled", job=job.name, reason=str(problem))

    def owed(self, job: Job) -> dict[str, FloatArray]:
        """Returns what `note_owed` wrote; nothing if that cannot be read."""
        kept = self._jobs.get(id(job))
        try:
            return {} if kept is None else kept.read_owed()
        except ValueError as problem:
            log.error("what workers owed is lost", job=job.name, reason=str(problem))
            return {}

    def forget(self, key: int) -> None:
        """Deletes what is kept of the job with this id."""
        self._without.discard(key)
        for entry in [entry for entry in self._roots if entry[0] == key]:
            del self._roots[entry]
        kept = self._jobs.pop(key, None)
        if kept is not None:
            kept.remove()

    def remove(self) -> None:
        """Deletes everything."""
        if self._vault is not None:
            self._vault.remove()

    # ----- reading

    def take_up(self, now_s: float, allocate: Callable[[Job, Table, Room], None]) -> list[Job]:
        """Goes on with every job that a former process has left.

        Args:
            now_s: The time.
            allocate: Makes the stores of a table.

        Returns:
            The jobs, their clocks not yet resumed (`resume`).
        """
        jobs: list[Job] = []
        for kept in [] if self._vault is None else list(self._vault.found()):
            assert self._vault is not None
            name = ""
            try:
                meta = kept.read_job()
                if meta["name"] in self._shard.jobs:
                    kept.remove()  # An older one of this name, which had not been deleted yet.
                    continue
                name = meta["name"]
                jobs.append(self._take_up(kept, meta, kept.read_tables(), now_s, allocate))
            except (OSError, ValueError, KeyError) as problem:
                self._shard.jobs.pop(name, None)
                self._vault.drop(kept.folder, problem)
        return jobs

    def _take_up(
        self,
        kept: JobVault,
        meta: Meta,
        tables: list[Meta],
        now_s: float,
        allocate: Callable[[Job, Table, Room], None],
    ) -> Job:
        members = records.members_of(meta, now_s)
        least = meta["min_workers"]
        job = self._shard.restore(meta["name"], meta["num_workers"], members, least)
        for name, number, ranks, *rest in meta["barriers"]:
            job.barriers.by_name[name] = Barrier(number, set(ranks), *rest)
        for entry in tables:
            table, _ = self._shard.define(job, records.spec_of(entry))
            roots = {int(index): root for index, root in entry["roots"].items()}
            self._roots[id(job), table.index] = roots
            table.epoch = entry["epoch"]
            table.former = None if entry["former"] is None else make_rule(*entry["former"])
            table.aside |= {int(rank): tuple(change) for rank, change in entry["aside"].items()}
            table.changed |= {int(rank): tuple(c) for rank, c in entry["changed"].items()}
            weights = kept.weights(table.index, WeightsMap(list(table.specs.values())).nbytes)
            allocate(job, table, self._open(kept, table, weights, roots))
        self._jobs[id(job)] = kept
        return job

    def _describe_table(self, job: Job, table: Table) -> Meta:
        former = table.former
        return {
            "spec": records.spec_to_json(table.spec),
            "roots": self._roots[id(job), table.index],
            "epoch": table.epoch,
            "former": None if former is None else [former.name, former.arguments()],
            "aside": table.aside,
            "changed": table.changed,
        }

    def _open(self, kept: JobVault, table: Table, weights: Segment, roots: dict[int, int]) -> Room:
        room = Room(weights=weights)
        for index, spec in table.specs.items():
            longest = table.spec.compressor.payload_nbytes_max(spec.numel)
            room.journals[index] = SliceJournal(
                kept.arena, roots[index], spec.numel, longest, len(spec.segments)
            )
        return room


def resume(
    job: Job, table: Table, spec: SliceSpec, store: SliceStore, clock: SliceClock
) -> Actions:
    """Lets the clock of a slice go on from its journal; returns what is to be done."""
    journal = store.journal
    if journal is None or journal.is_new:
        return []
    address = Address(job.name, table.index, spec.index)
    record, counted = journal.record, store.counted

    def token_of(push: Push, payload: Payload) -> Request:
        return Request(job, address, clock, push.worker, Nobody(), payload)

    bins = bins_of(journal, table.spec.compressor, token_of)
    for rank, steps in counted.items():
        newest = max(steps.ahead, default=steps.clock - 1) + 1
        job.steps[rank] = max(job.steps.get(rank, 0), newest)
    if record.epoch == table.epoch or table.former is None:
        actions = clock.resume(record.version, counted, bins)
    else:  # Killed over a change of the mode, which this slice had not come to.
        clock.rule = table.former
        table.aside |= dict.fromkeys(job.membership.expected(), ())
        actions = clock.resume(record.version, counted, bins) + clock.change(table.spec.rule)
        table.aside.clear()
    return [(address, action) for action in actions]


def bins_of(
    journal: SliceJournal, compressor: Compressor, token_of: Callable[[Push, Payload], Token]
) -> dict[int, Bin]:
    """Returns what a former process had counted that is in no update yet, by bin.

    Args:
        journal: Of the slice.
        compressor: Of its pushes.
        token_of: Returns what stands for a push whose payload waits to be added.
    """
    bins: dict[int, Bin] = {}
    for bin_ in journal.record.bins:
        added = [(journal.push_of(entry), entry.weight) for entry in bin_.added]
        bins[bin_.bin] = Bin(added=added)
    for entry in journal.record.held:
        push = journal.push_of(entry)
        cell = journal.pool.at(entry.place)
        payload = Payload(
            data=cell.data[: entry.nbytes],
            compressor=compressor if entry.is_compressed else RAW,
            cell=cell,
        )
        bins.setdefault(entry.step, Bin()).held[push.worker] = (push, token_of(push, payload))
    return bins


class Nobody:
    """Who is answered once a former process has answered already."""

    def pushed(self, reply: object) -> None:
        """Says nothing."""

    def pulled(self, reply: object, arrays: object, release: Callable[[], None] | None) -> None:
        """Says nothing."""
        if release is not None:
            release()


def _describe(job: Job) -> Meta:
    return {
        "name": job.name,
        "num_workers": job.membership.num_workers,
        "min_workers": job.membership.min_workers,
        "members": records.members_to_json(job),
        "barriers": [
            [name, one.number, sorted(one.arrived), one.is_open, one.largest, one.former]
            for name, one in job.barriers.by_name.items()
        ],
    }


def _nbytes_in_arena(table: Table) -> int:
    """Returns the bytes that a table will need there: state and sums, and records."""
    num_state = len(table.optimizer.state_names)
    arrays = num_changing(table.spec.rule, num_state, is_kept=True) * table.nbytes
    return arrays + len(table.specs) * RECORDS_NBYTES
