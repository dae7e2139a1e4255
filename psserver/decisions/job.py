"""One shard's record of a job: its workers, its tables, its progress and its state.

restored      it comes from a checkpoint, and no worker has joined yet
live          workers take part
interrupted   all workers were lost before the last of them reported the end of its part
ended         the last worker has reported its end; or all are lost and no update was ever made
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pscore.errors import UnknownJobError
from pscore.table_names import GROWN, next_name
from psserver.decisions.auto_mode import ModeChoice
from psserver.decisions.barriers import Barriers
from psserver.decisions.directory import Directory
from psserver.decisions.job_state import State
from psserver.decisions.membership import Membership
from psserver.decisions.table import Table

TABLES_NAMED = 2  # In a sentence.


@dataclass(slots=True, kw_only=True)
class JobCounters:
    """Counts of a job's pushes, updates and bytes on this shard since it began."""

    num_pushes: int = 0
    num_updates: int = 0
    pushed_nbytes: int = 0
    pulled_nbytes: int = 0
    raw_pushed_nbytes: int = 0  # The pushed bytes, if none had been compressed.
    raw_pulled_nbytes: int = 0


@dataclass(slots=True, kw_only=True)
class Life:
    """The time of a job from its start, or from the join of the workers that continued it."""

    number: int = 1
    first_step: int = 0
    is_restored: bool = False  # From a checkpoint, at any step.
    is_anew: bool = False  # The former job of this name had ended here.
    idle_s: float | None = None  # Time at which it was first seen without workers.
    news: str = ""  # For each worker, when it joins for the first time.
    told: dict[int, int] = field(default_factory=dict)  # By rank: the incarnation that got it.

    def news_for(self, rank: int, incarnation: int) -> str:
        """Returns the news for a worker that joins; empty if its rank has had them before.

        Args:
            incarnation: Incarnation of the worker: a join that is sent twice is answered twice.
        """
        return self.news if self.told.setdefault(rank, incarnation) == incarnation else ""


@dataclass(slots=True, kw_only=True)
class Job:
    """The workers that train together, and their tables."""

    name: str
    membership: Membership
    tables: dict[str, Table] = field(default_factory=dict)
    barriers: Barriers = field(default_factory=Barriers)
    steps: dict[int, int] = field(default_factory=dict)  # Steps that each worker has pushed.
    met: set[int] = field(default_factory=set)  # Ranks that have joined at least once.
    counters: JobCounters = field(default_factory=JobCounters)
    life: Life = field(default_factory=Life)
    choice: ModeChoice = field(default_factory=ModeChoice)  # The mode, if workers left it open.
    directories: dict[int, Directory] = field(default_factory=dict)  # By table.
    # The first epoch of directories; another process has others, which workers compare.
    first_epoch: int = 0

    def directory(self, table: int) -> Directory:
        """Returns the directory of a table's peers that are live.

        Raises:
            UnknownJobError: The job has no such table.
        """
        new = Directory(epoch=self.first_epoch)
        directory = self.directories.setdefault(self.table(table).index, new)
        directory.keep(self.incarnations)
        return directory

    def expected_peers(self, table: int) -> list[int]:
        """Returns the ranks that the first meeting of a table's peers waits for.

        Those that exchange nothing any more are not among them, nor those that wait to begin: they
        meet the others behind the step that these have yet to push.

        Raises:
            UnknownJobError: The job has no such table.
        """
        directory, beginning = self.directory(table), self.table(table).beginning
        others = [rank for rank in self.membership.expected() if rank not in beginning]
        live = self.incarnations
        return [rank for rank in others if not directory.has_parted(live.get(rank, 0))]

    @property
    def incarnations(self) -> dict[int, int]:
        """The incarnations of the live workers, by rank."""
        members = self.membership.members
        return {rank: members[rank].incarnation for rank in self.membership.live()}

    def table(self, index: int) -> Table:
        """Returns a table by its index; raises UnknownJobError if the job has no such table."""
        for table in self.tables.values():
            if table.index == index:
                return table
        raise UnknownJobError(f"job {self.name!r} has no table {index}")

    @property
    def has_windows(self) -> bool:
        """Whether rounds of some table may close with a quorum, when a window is over."""
        return any(table.spec.rule.window_s is not None for table in self.tables.values())

    @property
    def memory_nbytes(self) -> int:
        """Bytes that its tables take."""
        return sum(table.memory_nbytes for table in self.tables.values())

    @property
    def step(self) -> int:
        """Steps of training behind the newest slice; a round has several, and is one update."""
        return max((table.spec.step_at(table.step) for table in self.tables.values()), default=0)

    @property
    def progress(self) -> dict[str, int]:
        """The step of each table whose loss would matter.

        It has updates, was restored, or has the state of one that the workers have left for it: the
        former one says so, or a push, which a new process of this shard knows too.
        """
        followers = {next_name(name) for name, table in self.tables.items() if table.was_left}
        followers |= {
            name for name, table in self.tables.items() if GROWN in name and table.has_pushes
        }
        return {
            name: table.spec.step_at(table.step)
            for name, table in self.tables.items()
            if table.step > 0
            or ((self.life.is_restored or name in followers) and table.clocks and table.has_weights)
        }

    @property
    def has_progress(self) -> bool:
        """Whether it holds an update, a restored checkpoint, or a table that follows one."""
        return self.life.is_restored or bool(self.progress)

    @property
    def is_in_first_step(self) -> bool:
        """Whether no worker can have seen an update of all shards: one here may be of step 0."""
        return not self.life.is_restored and all(table.step <= 1 for table in self.tables.values())

    @property
    def state(self) -> State:
        """Whether workers take part, may continue it, or have ended it."""
        members = self.membership
        if not members.members:
            return State.RESTORED if self.life.is_restored else State.LIVE
        if not members.is_idle:
            return State.LIVE
        return State.INTERRUPTED if self.has_progress and not members.has_ended else State.ENDED

    @property
    def is_over(self) -> bool:
        """Whether it has ended: a worker that does not belong to it starts a new job."""
        return self.state is State.ENDED

    @property
    def may_continue(self) -> bool:
        """Whether it has no workers, and has not ended: its next workers continue it."""
        return self.state in (State.INTERRUPTED, State.RESTORED)

    def end_in_words(self) -> str:
        """Returns its end in words: `ended at step 70 (table 'model' of 4 tensors in ssgd)`.

        A job that could have continued was `freed at step 70, and had not ended (...)`.
        """
        listed = [
            f"table {table.spec.name!r} of {len(table.spec.tensors)} tensors in {table.spec.rule}"
            for table in self.tables.values()
        ]
        more = f" and {len(listed) - TABLES_NAMED} more" if len(listed) > TABLES_NAMED else ""
        end = "ended at step {}"
        if self.may_continue:
            end = "was freed at step {}, and had not ended"
        return f"{end.format(self.step)} ({', '.join(listed[:TABLES_NAMED])}{more})"

    def hint(self) -> str:
        """Returns advice for a worker that does not fit."""
        if self.state is not State.INTERRUPTED and not self.life.first_step:
            return "; start all workers of a job alike, or take another job name"
        return (
            f"; the job was interrupted at step {self.life.first_step or self.step}: start its "
            "workers as they were, or take another job name, or run `psserver forget "
            f"{self.name}` to start over"
        )
