"""What a shard writes into its vault as it goes, and how it goes on from there after a SIGKILL.

Whatever comes back is checked before anything is made of it: hashes of small files, the check of
each record, the length and seal of the large ones, and that the weights are of the version that the
record names (sealed.py). A job of which anything is wrong is refused whole: its slices would be of
different times. The next best is its last checkpoint; without one, nobody begins it in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from pscore.compressors.base import Compressor
from pscore.errors import LimitError, PacelineError
from pscore.memory.segment import Segment, WeightsMap
from pscore.rules import make_rule
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, IntArray, Push, SliceSpec
from psserver.decisions.barriers import Barrier
from psserver.decisions.job import State
from psserver.decisions.lifetime import digest
from psserver.decisions.open_step import OpenStep
from psserver.decisions.progress import Token
from psserver.decisions.shard import Actions, Address, Job, Shard
from psserver.decisions.slice_clock import SliceClock
from psserver.decisions.table import Table, num_changing
from psserver.durability import records
from psserver.durability.journal_dir import JobVault, Vault
from psserver.durability.sealed import Meta, WeightsFile
from psserver.engine.requests import Request
from psserver.slices.journal import ROOT_NBYTES, SliceJournal
from psserver.slices.pool import NUMBERS
from psserver.slices.store import RAW, Payload, SliceStore

log = structlog.get_logger()
RECORDS_NBYTES = 8192  # Of the two records of a slice, with some workers.
# What reading raises that is not what was written: also where it has its hash, of another version.
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, PacelineError)


@dataclass(slots=True, kw_only=True)
class Room:
    """Where the numbers of a table live."""

    weights: Segment
    journals: dict[int, SliceJournal] = field(default_factory=dict)  # By slice; none on the heap.
    stamps: dict[int, IntArray] = field(default_factory=dict)  # Likewise: of its two buffers.


class Recovery:
    """The vault of one shard, by job. Called under the engine's lock."""

    def __init__(self, vault: Vault | None, shard: Shard) -> None:
        """Keeps `shard` in `vault`, or nowhere."""
        self._vault = vault
        self._shard = shard
        self._jobs: dict[int, JobVault] = {}  # By the id of the job.
        self._roots: dict[tuple[int, int], dict[int, int]] = {}  # By job and table: by slice.
        self._without: set[int] = set()  # Jobs for which there was no room.
        self._owing: dict[int, Job] = {}  # By id: what their workers claim may be in the vault.

    # ----- writing

    def note(self, job: Job) -> None:
        """Writes down who takes part in a job; called when that changes."""
        is_there = self._shard.jobs.get(job.name) is job
        if self._vault is None or id(job) in self._without or not is_there:
            return
        try:
            if id(job) not in self._jobs:
                self._jobs[id(job)] = self._vault.make(job.name)
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

    def make_room(
        self, job: Job, table: Table, free_one: Callable[[], bool] = lambda: False
    ) -> Room:
        """Returns memory for a new table: in the vault, or on the heap if that has no room.

        Args:
            job: Of the table.
            table: It.
            free_one: Frees what a job takes that has ended; returns whether there was one.

        Raises:
            LimitError: There is no memory anywhere.
        """
        layout = WeightsMap(list(table.specs.values()))
        kept = self._jobs.get(id(job))
        while kept is not None:
            try:
                weights = kept.make_weights(table.index, layout.nbytes, len(table.specs))
                kept.arena.reserve(_nbytes_in_arena(table))
                roots = {index: kept.arena.allocate(ROOT_NBYTES) for index in table.specs}
                room = self._open(kept, table, weights, roots, layout)
                self._roots[id(job), table.index] = roots
                kept.write_table(table.index, self._describe_table(job, table))
                kept.write_job(_describe(job))
            except OSError as problem:
                if free_one():
                    continue
                self.forget(id(job))
                log.warning(
                    "no room to journal a job: it would be lost with this process",
                    job=job.name,
                    table=table.spec.name,
                    folder=str(kept.folder),
                    reason=str(problem),
                )
                break
            else:
                return room
        self._without.add(id(job))  # Part of a job is of no use.
        try:
            return Room(weights=Segment.create(layout.nbytes))
        except OSError as problem:
            raise LimitError(
                f"shard {self._shard.index} has no memory for the {table.nbytes} bytes of the "
                f"weights of {table.spec.name!r}: {problem}"
            ) from problem

    def note_owed(self, job: Job, arrays: Mapping[str, FloatArray]) -> None:
        """Writes down what workers have still to claim, or that there is nothing more of it."""
        self._owing[id(job)] = job
        kept = self._jobs.get(id(job))
        if kept is None:
            return
        try:
            kept.write_owed(arrays)
        except OSError as problem:
            log.error("what workers owe is not journalled", job=job.name, reason=str(problem))

    def settle(self, kept_of: Callable[[int], Mapping[str, FloatArray]]) -> None:
        """Deletes what `note_owed` wrote of jobs whose workers have claimed all of it.

        Args:
            kept_of: Returns what is still to be claimed, by the id of the job.
        """
        for key, job in list(self._owing.items()):
            if not kept_of(key):
                self.note_owed(job, {})
                del self._owing[key]

    def owed(self, job: Job) -> dict[str, FloatArray]:
        """Returns what `note_owed` wrote; nothing if that cannot be read."""
        self._owing[id(job)] = job
        kept = self._jobs.get(id(job))
        try:
            return {} if kept is None else kept.read_owed()
        except ValueError as problem:
            log.error("what workers owed cannot be used", job=job.name, reason=str(problem))
            return {}

    def forget(self, key: int) -> None:
        """Deletes what is kept of the job with this id."""
        self._without.discard(key)
        self._owing.pop(key, None)
        for entry in [entry for entry in self._roots if entry[0] == key]:
            del self._roots[entry]
        kept = self._jobs.pop(key, None)
        if kept is not None:
            kept.remove()

    def forget_lost(self, name: str) -> None:
        """Deletes what is left of a job that could not be gone on with."""
        if self._vault is not None:
            self._vault.forget(name)

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
        if self._vault is None:
            return jobs
        for folder in self._vault.found():
            seen = {digest(job.name) for job in jobs}
            if folder.name.rpartition("-")[2] in seen:
                self._vault.remove_folder(folder)  # An older one of this name.
                continue
            try:
                kept = JobVault(folder)
                meta = kept.read_job()
                tables = kept.read_tables(meta["num_tables"])
                jobs.append(self._take_up(kept, meta, tables, now_s, allocate))
            except UNUSABLE as problem:
                key, name, reason = self._vault.give_up(folder, problem)
                if reason:
                    self._shard.lifetimes.lost[key] = (name, reason)
        return jobs

    def _take_up(
        self,
        kept: JobVault,
        meta: Meta,
        tables: list[Meta],
        now_s: float,
        allocate: Callable[[Job, Table, Room], None],
    ) -> Job:
        """Makes a job of its journal, once all of that is found to be usable."""
        name, members = meta["name"], records.members_of(meta, now_s)
        job = self._shard.restore(
            name,
            meta["num_workers"],
            members,
            meta["min_workers"],
            has_ended=meta["ended"],
            is_restored=meta["restored"],
            spent={int(rank): tuple(spent) for rank, spent in meta["spent"].items()},
        )
        job.life.number = meta["life"]
        try:
            for name_, number, ranks, *rest in meta["barriers"]:
                job.barriers.by_name[name_] = Barrier(number, set(ranks), *rest)
            rooms = [self._room_of(kept, job, entry) for entry in tables]
        except UNUSABLE:
            del self._shard.jobs[name]
            self._roots = {entry: r for entry, r in self._roots.items() if entry[0] != id(job)}
            raise
        self._jobs[id(job)] = kept
        for table, room in rooms:
            allocate(job, table, room)
        return job

    def _room_of(self, kept: JobVault, job: Job, entry: Meta) -> tuple[Table, Room]:
        """Returns a table with its memory, which holds what the records say."""
        table, _ = self._shard.define(job, TableSpec.from_json(entry["spec"]))
        roots = {int(index): root for index, root in entry["roots"].items()}
        self._roots[id(job), table.index] = roots
        table.epoch = entry["epoch"]
        table.former = None if entry["former"] is None else make_rule(*entry["former"])
        table.participants.aside |= {
            int(rank): tuple(change) for rank, change in entry["aside"].items()
        }
        table.changed |= {int(rank): tuple(c) for rank, c in entry["changed"].items()}
        layout = WeightsMap(list(table.specs.values()))
        weights = kept.open_weights(table.index, layout.nbytes, len(table.specs))
        room = self._open(kept, table, weights, roots, layout)
        is_half_restored = job.life.is_restored and not job.membership.members
        for index, journal in room.journals.items():
            if journal.is_new and (is_half_restored or room.stamps[index].max() > 0):
                raise ValueError(
                    f"slice {index} of table {table.spec.name!r} has no record: it is damaged, or "
                    "the shard was killed while the job was restored"
                )
            _check(journal, table, index, layout.versions(room.weights, index), room.stamps[index])
        return table, room

    def _describe_table(self, job: Job, table: Table) -> Meta:
        former = table.former
        return {
            "spec": table.spec.to_json(),
            "roots": self._roots[id(job), table.index],
            "epoch": table.epoch,
            "former": None if former is None else [former.name, former.arguments()],
            "aside": table.participants.aside,
            "changed": table.changed,
        }

    def _open(
        self,
        kept: JobVault,
        table: Table,
        weights: WeightsFile,
        roots: dict[int, int],
        layout: WeightsMap,
    ) -> Room:
        room = Room(weights=weights.segment)
        for index, spec in table.specs.items():
            longest = table.spec.compressor.payload_nbytes_max(spec.numel)
            room.journals[index] = SliceJournal(
                kept.arena, roots[index], spec.numel, longest, len(spec.segments)
            )
            room.stamps[index] = weights.stamps(layout.position(index))
        return room


def _check(
    journal: SliceJournal, table: Table, index: int, versions: IntArray, stamps: IntArray
) -> None:
    """Checks that what a record names is there.

    Raises:
        ValueError: It is not; says what is there instead.
    """
    if journal.is_new:
        return
    record = journal.record
    what = f"slice {index} of table {table.spec.name!r}"
    numbers = (len(record.state), len(record.counts))
    wanted = (len(table.optimizer.state_names), len(table.specs[index].segments))
    if numbers != wanted:
        raise ValueError(f"{what} has {numbers} arrays and counts of its optimizer, not {wanted}")
    if record.version >= 0 and record.weights in NUMBERS:
        found = {int(stamped[record.weights - 1]) for stamped in (versions, stamps)}
        if found != {record.version}:
            there = " and ".join(str(version) for version in sorted(found))
            raise ValueError(
                f"the weights of {what} are of version {there}, its journal is of version "
                f"{record.version}"
            )


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

    open_steps = open_steps_of(journal, table.spec.compressor, token_of)
    for rank, steps in counted.items():
        newest = max(steps.ahead, default=steps.clock - 1) + 1
        job.steps[rank] = max(job.steps.get(rank, 0), newest)
    if record.epoch == table.epoch or table.former is None:
        actions = clock.resume(record.version, counted, open_steps)
    else:  # Killed over a change of the mode, which this slice had not come to.
        clock.rule = table.former
        table.participants.aside |= dict.fromkeys(job.membership.expected(), ())
        actions = clock.resume(record.version, counted, open_steps) + clock.change(table.spec.rule)
        table.participants.aside.clear()
    return [(address, action) for action in actions]


def open_steps_of(
    journal: SliceJournal, compressor: Compressor, token_of: Callable[[Push, Payload], Token]
) -> dict[int, OpenStep]:
    """Returns what a former process had counted that is in no update yet, by open step.

    Args:
        journal: Of the slice.
        compressor: Of its pushes.
        token_of: Returns what stands for a push whose payload waits to be added.
    """
    open_steps: dict[int, OpenStep] = {}
    for bin_ in journal.record.bins:
        added = [(journal.push_of(entry), entry.weight) for entry in bin_.added]
        open_steps[bin_.bin] = OpenStep(bin_.bin, added=added)
    for entry in journal.record.held:
        push = journal.push_of(entry)
        cell = journal.pool.at(entry.place)
        payload = Payload(
            data=cell.data[: entry.nbytes],
            compressor=compressor if entry.is_compressed else RAW,
            cell=cell,
        )
        open_step = open_steps.setdefault(entry.step, OpenStep(entry.step))
        open_step.held[push.worker] = (push, token_of(push, payload))
    return open_steps


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
        "num_tables": len(job.tables),
        "ended": job.state is State.ENDED,
        "restored": job.life.is_restored,
        "life": job.life.number,
        "members": records.members_to_json(job),
        "spent": dict(job.membership.spent),
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
