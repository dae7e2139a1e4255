"""Writes a shard's jobs to its journals, and restores them after its process was killed.

All of a journal is checked before a job is made of it: hashes of small files, the check of each
record, length and seal of the large ones, and that the weights are of the version that the record
names (sealed.py). If any part is wrong the whole job is refused, since its slices would be of
different times. Its last checkpoint is the next best; without one, a person must decide.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from pscore.errors import LimitError, PacelineError
from pscore.json_text import count_of
from pscore.memory.segment import Segment, WeightsMap
from pscore.rules import make_rule
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, IntArray
from psserver.decisions.auto_mode import ModeChoice
from psserver.decisions.barriers import Barrier
from psserver.decisions.job_state import State
from psserver.decisions.lifetime import digest
from psserver.decisions.membership import WORKERS_MAX
from psserver.decisions.shard import Job, Shard
from psserver.decisions.table import Table
from psserver.durability import records
from psserver.durability.journal_dir import JobJournal, JournalDir
from psserver.durability.sealed import Meta, WeightsFile
from psserver.slices.journal import ROOT_NBYTES, SliceJournal, digest_of
from psserver.slices.pool import NUMBERS
from psserver.stores import kind_of

log = structlog.get_logger()
EPOCH_BITS = 40  # A drawn first epoch: the chance that a former process had it is nil.
# Raised by reading a damaged journal, or a whole one of another version of this program.
UNUSABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, PacelineError,
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class TableMemory:
    """The memory of a table's numbers."""

    weights: Segment
    journals: dict[int, SliceJournal] = field(default_factory=dict)  # By slice; none on the heap.
    stamps: dict[int, IntArray] = field(default_factory=dict)  # Versions of its two buffers.


class JobRecorder:
    """The journal of one job, kept up to date. Called under the engine's lock."""

    def __init__(
        self, job: Job, folder: JournalDir | None, journal: JobJournal | None = None
    ) -> None:
        """Writes nothing yet.

        Args:
            folder: The shard's journals; None: this job is not journalled.
            journal: The job's own, if a former process has made it.
        """
        self._job = job
        self._folder = folder
        self._journal = journal
        self._roots: dict[int, dict[int, int]] = {}  # By table: the root of each slice.
        self._has_residuals = journal is not None  # Perhaps, in the journal.
        self._is_behind = False  # The job's newest record had no room on the disk.
        self._tables_behind: dict[int, Table] = {}  # By index, likewise.

    @property
    def folder(self) -> Path | None:
        """The folder of the job's journal; None: it has none."""
        return None if self._journal is None else self._journal.folder

    def note(self) -> None:
        """Records the job's workers and barriers; called when they change."""
        if self._folder is None:
            return
        try:
            if self._journal is None:
                self._journal = self._folder.make(self._job.name)
            self._journal.write_job(_describe(self._job))
            self._is_behind = False
        except OSError as problem:
            if self._is_behind:  # It has been logged.
                return
            self._is_behind = True
            log.error("membership is not journalled", job=self._job.name, reason=str(problem))

    def note_table(self, table: Table) -> None:
        """Records the mode of a table; called when it changes."""
        if self._journal is None:
            return
        try:
            self._journal.write_table(table.index, self._describe_table(table))
            self._tables_behind.pop(table.index, None)
        except OSError as problem:
            if table.index in self._tables_behind:
                return
            self._tables_behind[table.index] = table
            log.error("mode is not journalled", job=self._job.name, reason=str(problem))

    def note_again(self) -> None:
        """Writes the records that had no room on the disk; called now and then."""
        if self._is_behind:
            self.note()
        for table in list(self._tables_behind.values()):
            self.note_table(table)

    def note_residuals(self, arrays: Mapping[str, FloatArray]) -> None:
        """Records the residuals that wait for workers of a restored job; none deletes them."""
        self._has_residuals = bool(arrays)
        if self._journal is None:
            return
        try:
            self._journal.write_residuals(arrays)
        except OSError as problem:
            log.error("residuals are not journalled", job=self._job.name, reason=str(problem))

    def drop_residuals(self) -> None:
        """Deletes the recorded residuals, if there may be any."""
        if self._has_residuals:
            self.note_residuals({})

    def read_residuals(self) -> dict[str, FloatArray]:
        """Returns the arrays of `note_residuals`; raises ValueError if they cannot be read."""
        return {} if self._journal is None else self._journal.read_residuals()

    def note_published(self, meta: Meta) -> None:
        """Records what is published of the job; raises OSError if the disk is full."""
        if self._journal is not None:
            self._journal.write_published(meta)

    def read_published(self) -> Meta:
        """Returns the record of `note_published`; empty without a whole one."""
        return {} if self._journal is None else self._journal.read_published()

    def make_memory(
        self, table: Table, free_one: Callable[[], bool] = lambda: False
    ) -> TableMemory:
        """Returns memory for a new table: in the journal, or on the heap if that has no room.

        Args:
            free_one: Frees the memory of an ended job; returns whether there was one.

        Raises:
            LimitError: There is no memory anywhere.
        """
        layout = WeightsMap(list(table.specs.values()))
        while self._journal is not None:
            try:
                return self._make_in(self._journal, table, layout)
            except OSError as problem:
                if free_one():
                    continue
                folder = self._journal.folder
                self.close()
                log.warning(
                    "no space to journal a job: it would be lost with this process",
                    job=self._job.name,
                    table=table.spec.name,
                    folder=str(folder),
                    reason=str(problem),
                )
        self._folder = None  # A journal of some tables could not be resumed.
        try:
            return TableMemory(weights=Segment.create(layout.nbytes))
        except OSError as problem:
            raise LimitError(
                f"no memory for the {table.nbytes} bytes of the weights of {table.spec.name!r}: "
                f"{problem}"
            ) from problem

    def _make_in(self, journal: JobJournal, table: Table, layout: WeightsMap) -> TableMemory:
        weights = journal.make_weights(table.index, layout.nbytes, len(table.specs))
        journal.arena.reserve(kind_of(table.spec.content.name).arena_nbytes(table))
        roots = {index: journal.arena.allocate(ROOT_NBYTES) for index in table.specs}
        memory = _memory_in(journal, table, weights, roots, layout)
        self._roots[table.index] = roots
        journal.write_table(table.index, self._describe_table(table))
        journal.write_job(_describe(self._job))
        return memory

    def open_memory(self, table: Table, entry: Meta) -> TableMemory:
        """Returns the memory of a recorded table.

        Raises:
            ValueError: It does not hold the numbers that the records name.
            OSError: A file is missing.
        """
        assert self._journal is not None
        roots = {int(index): root for index, root in entry["roots"].items()}
        self._roots[table.index] = roots
        layout = WeightsMap(list(table.specs.values()))
        weights = self._journal.open_weights(table.index, layout.nbytes, len(table.specs))
        memory = _memory_in(self._journal, table, weights, roots, layout)
        job = self._job
        is_half_restored = job.life.is_restored and not job.membership.members
        for index, journal in memory.journals.items():
            stamps = memory.stamps[index]
            if journal.is_new and (is_half_restored or stamps.max() > 0):
                raise ValueError(
                    f"slice {index} of table {table.spec.name!r} has no record: it is damaged, or "
                    "the shard was killed while the job was restored"
                )
            buffers = layout.buffers(memory.weights, index)
            _check(journal, table, index, buffers, layout.versions(memory.weights, index), stamps)
        return memory

    def _describe_table(self, table: Table) -> Meta:
        former = table.former
        return {
            "spec": table.spec.to_json(),
            "roots": self._roots[table.index],
            "epoch": table.epoch,
            "former": None if former is None else [former.name, former.arguments()],
            "aside": table.participants.aside,
            "changed": table.changed,
        }

    def close(self) -> None:
        """Deletes the job's journal, and records nothing more."""
        journal, self._journal, self._folder = self._journal, None, None
        if journal is not None:
            journal.remove()


Begin = Callable[[Job, JobRecorder, list[tuple[Table, TableMemory]]], None]


class Recovery:
    """The journals of one shard. Called under the engine's lock."""

    def __init__(self, folder: JournalDir | None, shard: Shard) -> None:
        """Keeps the jobs of `shard` in `folder`, or nowhere."""
        self._folder = folder
        self._shard = shard

    def recorder(self, job: Job) -> JobRecorder:
        """Returns the recorder of a new job."""
        return JobRecorder(job, self._folder)

    def remove_lost(self, name: str) -> None:
        """Deletes the journal of a job that could not be resumed."""
        if self._folder is not None:
            self._folder.remove_job(name)

    @property
    def num_recoveries(self) -> int:
        """Number of times that a process of this shard has continued jobs of a former one."""
        return 0 if self._folder is None else self._folder.num_recoveries

    def note_recovered(self) -> None:
        """Counts that jobs of a former process were continued."""
        if self._folder is not None:
            self._folder.note_recovered()

    def journal_nbytes(self) -> int:
        """Returns the bytes that the journals take on disk or in memory; needs no lock."""
        return 0 if self._folder is None else self._folder.nbytes()

    def remove(self) -> None:
        """Deletes all journals."""
        if self._folder is not None:
            self._folder.remove()

    def recover(self, now_s: float, begin: Begin) -> None:
        """Restores every job of a former process.

        Args:
            now_s: The time; every live worker has a new lease from then on.
            begin: Called with a job, its recorder and the memory of its tables; resumes it.
        """
        if self._folder is None:
            return
        names: list[str] = []
        for path in self._folder.found():
            if path.name.rpartition("-")[2] in map(digest, names):
                self._folder.remove_folder(path)  # An older one of this name.
                continue
            try:
                names.append(self._recover(path, now_s, begin))
            except UNUSABLE as problem:
                key, name, reason = self._folder.give_up(path, problem)
                if reason:
                    self._shard.lifetimes.lost[key] = (name, reason)

    def _recover(self, path: Path, now_s: float, begin: Begin) -> str:
        """Makes a job of its journal, if all of that is usable; returns its name."""
        assert self._folder is not None
        journal = JobJournal(path, self._folder.note)
        meta = journal.read_job()
        tables = journal.read_tables(meta["num_tables"])
        num_workers = count_of(meta["num_workers"], "the number of workers", most=WORKERS_MAX)
        job = self._shard.restore(
            meta["name"],
            num_workers,
            records.members_of(meta, now_s),
            count_of(meta["min_workers"], "the least number of workers", most=num_workers),
            has_ended=meta["ended"],
            is_restored=meta["restored"],
            spent={
                int(rank): records.incarnations_of(spent) for rank, spent in meta["spent"].items()
            },
        )
        recorder = JobRecorder(job, self._folder, journal)
        try:
            job.choice = ModeChoice(*map(str, meta.get("choice", ())))
            job.life.number = count_of(meta["life"], "the life of the job", most=records.UINT32_MAX)
            for name, number, ranks, is_open, largest, *former in meta["barriers"]:
                round_ = count_of(number, f"the round of barrier {name!r}")
                # The record has no number of each rank; those who ask again get the largest.
                arrived = dict.fromkeys(ranks, largest)
                job.barriers.by_name[name] = Barrier(round_, arrived, is_open, *former)
            for name, rank, count in meta.get("skipped", ()):
                job.barriers.skipped[str(name), int(rank)] = count_of(count, "rounds left out")
            for name, rank in meta.get("excused", ()):
                job.barriers.by_name[name].excused.add(int(rank))
            job.barriers.holds = bool(meta.get("holds"))
            job.first_epoch = secrets.randbits(EPOCH_BITS)
            begin(job, recorder, [self._open(job, recorder, *entry) for entry in tables.items()])
        except UNUSABLE:
            del self._shard.jobs[job.name]
            raise
        return job.name

    def _open(
        self, job: Job, recorder: JobRecorder, number: int, entry: Meta
    ) -> tuple[Table, TableMemory]:
        """Returns a recorded table with its memory."""
        table, _ = self._shard.define(job, TableSpec.from_json(entry["spec"]), number=number)
        what = f"the number of changes of the mode of table {table.spec.name!r}"
        table.epoch = count_of(entry["epoch"], what, most=records.INT32_MAX)
        table.former = None if entry["former"] is None else make_rule(*entry["former"])
        table.participants.aside |= {
            int(rank): tuple(change) for rank, change in entry["aside"].items()
        }
        for rank, member in job.membership.members.items():
            # Another worker has its place since: the record of a table is older than the job's.
            if table.participants.aside.get(rank, (member.incarnation,))[0] != member.incarnation:
                table.participants.forget(rank)
        table.changed |= {int(rank): tuple(c) for rank, c in entry["changed"].items()}
        return table, recorder.open_memory(table, entry)


def _memory_in(
    journal: JobJournal,
    table: Table,
    weights: WeightsFile,
    roots: Mapping[int, int],
    layout: WeightsMap,
) -> TableMemory:
    memory = TableMemory(weights=weights.segment)
    for index, spec in table.specs.items():
        kind = kind_of(table.spec.content.name)
        memory.journals[index] = kind.open_journal(journal.arena, roots[index], table, spec)
        memory.stamps[index] = weights.stamps(layout.position(index))
    return memory


def _check(
    journal: SliceJournal,
    table: Table,
    index: int,
    buffers: Sequence[FloatArray],
    versions: IntArray,
    stamps: IntArray,
) -> None:
    """Checks that the weights and arrays are those that a slice's record names.

    Raises:
        ValueError: They are not; the message names what was found instead.
    """
    if journal.is_new:
        return
    record = journal.record
    what = f"slice {index} of table {table.spec.name!r}"
    numbers = (len(record.state), len(record.counts))
    wanted = (len(table.optimizer.state_names), len(table.specs[index].segments))
    if numbers != wanted:
        raise ValueError(f"{what} has {numbers} arrays and counts of its optimizer, not {wanted}")
    if record.HasField("digest"):
        number = record.weights
        weights = buffers[number - 1] if number in NUMBERS else journal.pool.at(number).array
        if (
            digest_of([weights, *(journal.pool.at(place).array for place in record.state)])
            != record.digest
        ):
            raise ValueError(
                f"the weights or the optimizer's state of {what} are not those that were hashed "
                f"after update {record.version}: bits have changed"
            )
    if record.version >= 0 and record.weights in NUMBERS:
        found = {int(stamped[record.weights - 1]) for stamped in (versions, stamps)}
        if found != {record.version}:
            there = " and ".join(str(version) for version in sorted(found))
            raise ValueError(
                f"the weights of {what} are of version {there}, its journal is of version "
                f"{record.version}"
            )


def _describe(job: Job) -> Meta:
    return {
        "name": job.name,
        "num_workers": job.membership.num_workers,
        "min_workers": job.membership.min_workers,
        "num_tables": len(job.tables),
        "ended": job.state is State.ENDED,
        "restored": job.life.is_restored,
        "life": job.life.number,
        "choice": [job.choice.mode, job.choice.text],
        "members": records.members_to_json(job),
        "spent": dict(job.membership.spent),
        "barriers": [
            [
                *(name, one.number, sorted(one.arrived), one.is_open),
                *(one.largest, one.former, one.former_number),
            ]
            for name, one in job.barriers.by_name.items()
        ],
        "skipped": [[*place, count] for place, count in job.barriers.skipped.items()],
        "excused": [
            [name, rank] for name, one in job.barriers.by_name.items() for rank in one.excused
        ],
        "holds": job.barriers.holds,
    }
