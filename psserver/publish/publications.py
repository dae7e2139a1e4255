"""All that one shard publishes, and its readers. A reader has no rank and no lease.

The number of a lineage is the time of its start in milliseconds since 1970, larger than that of any
lineage before. It is kept in the journal of the job: a killed shard continues the lineages of the
jobs that it resumes, and so does the process to which a shard moves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, cast

import numpy as np
import structlog

from pscore.errors import ConfigError
from pscore.json_text import count_of
from pscore.net.shared_rate import SharedRate
from pscore.publish import codec
from pscore.publish.codec import Form
from pscore.publish.possible import PUBLISH_EVERY_MAX
from pscore.table_names import GROWN
from psserver.durability.recovery import JobRecorder
from psserver.engine.engine import Engine
from psserver.engine.job import RunningJob, RunningTable
from psserver.publish.publication import Publication
from psserver.publish.tables import Published, PublishedTables

log = structlog.get_logger()

TABLE = "model"  # The table of an optimizer; a model that has grown has others, `model+1`.
ALL = "*"  # Stands for all jobs.
Kept = dict[str, Any]  # By table: its lineage, `every`, and that of the settings.


class Publications(PublishedTables[Publication]):
    """The publications of one shard."""

    def __init__(
        self,
        engine: Engine,
        every: Mapping[str, int],
        *,
        executor: Executor | None = None,
        rate: int = 0,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Publishes the tables of the engine from now on.

        Args:
            engine: The shard, before anything else happens to it.
            every: By job, or `ALL`: updates from one version to the next.
            executor: Compiles the loops of publications, at once if `every` names a job, else
                before the first; None: the first does.
            rate: Most bytes per second to all readers on other hosts; 0: no limit.
            now_s: The time in seconds since 1970.
        """
        super().__init__(engine.lock, engine.now, engine.shard.index, SharedRate(rate))
        self._executor = executor
        self._engine = engine
        self._every = dict(every)
        self._now_s = now_s
        self._kept: dict[str, tuple[JobRecorder, Kept]] = {}  # By job: its journal has that.
        self._is_kept = True  # Whether there was room for it the last time.
        self._newest_lineage = 0
        engine.on_table = self._on_table
        if self._every:
            self._warm_up()

    def begin(self) -> None:
        """Publishes the jobs that the engine has resumed from its journals."""
        with self._engine.lock:
            for found in self._published.values():
                found.publication.begin(at_multiples=True)

    def publish(self, job: RunningJob, index: int, every: int) -> None:
        """Publishes a table; again with the same `every` changes nothing.

        Args:
            every: Updates from one version to the next; seconds in an asynchronous mode.

        Raises:
            ConfigError: `every` is out of range, or the shards do not hold the model.
            UnknownJobError: The job has no such table.
        """
        count_of(every, "publish_every", least=1, most=PUBLISH_EVERY_MAX)
        with self._engine.lock:
            running = job.table(index)
            found = self._published.get((job.name, running.table.spec.name))
            if found is not None and found.publication.running is running:
                if found.publication.every == every:
                    return
                running.observers.remove(found.publication.after)
            added = self._add(job, running, every)
            added.publication.begin(at_multiples=running.table.step > 0)
            self._write()

    def _given(self, job: str) -> int:
        return self._every.get(job, self._every.get(ALL, 0))

    def _on_table(self, job: RunningJob, running: RunningTable) -> None:
        name = running.table.spec.name
        lineage, former, settings = _numbers_of(self._kept_of(job).get(name))
        self._newest_lineage = max(self._newest_lineage, lineage)
        every = 0 if name.partition(GROWN)[0] != TABLE else self._given(job.name)
        if former and settings == self._given(job.name):  # A worker may have asked for it.
            every = former
        if not every:
            return
        try:
            found = self._add(job, running, every)
        except ConfigError as problem:
            log.warning("not published", job=job.name, reason=str(problem))
            return
        if every == former:  # Else its numbers have another meaning now.
            found.publication.resume(lineage)
        self._write()

    def _add(self, job: RunningJob, running: RunningTable, every: int) -> Published[Publication]:
        publication = Publication(
            running,
            every,
            self._new_lineage(),
            on_version=lambda: self.on_version(),
            new_lineage=self._new_lineage,
            on_lineage=self._write,
        )
        self._warm_up()
        running.observers.append(publication.after)
        self._kept_of(job)
        found = self._published[job.name, running.table.spec.name] = Published(publication)
        log.info("published", job=job.name, table=running.table.spec.name, every=every)
        return found

    def _warm_up(self) -> None:
        """Compiles the loops, once."""
        if self._executor is not None:
            self._executor.submit(warm_up)
            self._executor = None

    def _new_lineage(self) -> int:
        self._newest_lineage = max(int(1e3 * self._now_s()), self._newest_lineage + 1)
        return self._newest_lineage

    def tick(self) -> None:
        """Publishes by time where that is due, forgets silent readers and tables that are gone.

        The owner calls it about once a second.
        """
        with self._engine.lock:
            for key, found in list(self._published.items()):
                if not self._is_here(key[0], found):
                    del self._published[key]
                    continue
                publication = found.publication
                publication.begin(at_multiples=False)
                publication.tick(self._now_s())
            self._write()
            names = {job for job, _ in self._published}
            self._kept = {job: kept for job, kept in self._kept.items() if job in names}
        self.forget_silent()

    def _get(self, job: str, table: str) -> Published[Publication] | None:
        """Returns a table; one that has grown since, when that has a version, which is newer."""
        found = self._published.get((job, table))
        grown = int(found is not None and self._is_here(job, found)) - 1
        for (owner, name), other in self._published.items():
            stem, _, number = name.partition(GROWN)
            is_one = owner == job and stem == table and int(number or 0) > grown
            if is_one and other.publication.newest and self._is_here(job, other):
                found, grown = other, int(number or 0)
        return None if grown < 0 else found

    def _is_here(self, job: str, found: Published[Publication]) -> bool:
        running = self._engine.jobs.get(job)
        table = found.publication.running
        return running is not None and running.tables.get(table.table.index) is table

    # ----- why a reader waits

    def _why_none(self, job: str, table: str) -> str:
        running = self._engine.jobs.get(job)
        where = f"on shard {self._engine.shard.index}"
        if running is None:
            return f"there is no job {job!r} {where} yet"
        found = running.job.tables.get(table)
        if found is None:
            return f"job {job!r} has no table {table!r} {where} yet"
        return (
            f"table {table!r} of job {job!r} is not published {where}: start the shards with "
            f"--publish {job}:every=1"
        )

    # ----- lineages in the journals

    def _kept_of(self, job: RunningJob) -> Kept:
        """Returns what the journal of a job has, which is read once: all of its tables need it."""
        if self._kept.get(job.name, (None,))[0] is not job.recorder:
            self._kept[job.name] = job.recorder, job.recorder.read_published()
        return self._kept[job.name][1]

    def _write(self) -> None:
        """Writes the lineages, if they have changed; without room again at the next tick."""
        new: dict[str, Kept] = {}
        for (job, table), found in self._published.items():
            publication = found.publication
            entry = [publication.kept_lineage, publication.every, self._given(job)]
            new.setdefault(job, {})[table] = entry
        try:
            for job, tables in new.items():
                recorder, kept = self._kept[job]
                if kept | tables != kept:
                    recorder.note_published(kept | tables)
                    self._kept[job] = recorder, kept | tables
        except OSError as problem:
            if self._is_kept:
                log.error("lineages are not kept in the journals", reason=str(problem))
            self._is_kept = False
        else:
            self._is_kept = True


def _numbers_of(kept: object) -> tuple[int, int, int]:
    """Returns lineage, `every` and settings of a resumed table; zeros where there is no record."""
    with contextlib.suppress(ValueError, TypeError, ConfigError):
        lineage, every, settings = cast("list[int]", kept)
        return (
            count_of(lineage, "a lineage"),
            count_of(every, "publish_every", least=1, most=PUBLISH_EVERY_MAX),
            count_of(settings, "publish"),
        )
    return 0, 0, 0


def warm_up() -> None:
    """Compiles the loops of publications."""
    weights = np.linspace(-1.0, 1.0, 64, dtype=np.float32)
    bits = codec.round_to_bf16(weights)
    for step in (0.0, 1e-2, 1.0):
        codec.move(bits, weights + np.float32(step))
    for form, write in codec.WRITERS.items():
        assert form is not Form.DENSE
        write(np.zeros(8, dtype=np.int16), np.zeros(64, dtype=np.uint8))
