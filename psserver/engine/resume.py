"""Resumes jobs from their journals after the shard's process was killed."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from pscore.compressors.base import Compressor
from pscore.errors import UnknownJobError
from pscore.types import Push
from psserver.decisions.open_step import OpenStep
from psserver.decisions.progress import Token
from psserver.decisions.shard import Actions, Address
from psserver.decisions.table import Table
from psserver.engine.engine import Engine
from psserver.engine.job import Request, RunningJob, RunningTable
from psserver.slices.base import Payload, Store
from psserver.slices.journal import SliceJournal
from psserver.slices.sums import RAW
from psserver.stores import kind_of

log = structlog.get_logger()


def recover(engine: Engine, inspect: Callable[[Store], None] | None = None) -> list[str]:
    """Resumes the jobs in the journals at the exact step of the crash; returns their names.

    Args:
        engine: A new one, before anything else happens to it.
        inspect: Called with each slice as its journal left it, before it resumes.
    """
    with engine.lock:
        engine.recovery.recover(engine.now(), engine.begin_recovered)
        for job in engine.jobs.values():
            for running in job.tables.values():
                for index, queue in running.queues.items():
                    if inspect is not None:
                        inspect(queue.store)
                    _resume_slice(engine, job, running, index)
                kind_of(running.table.spec.content.name).warm_up(running.table.optimizer)
            try:
                job.residuals.recover(job.recorder.read_residuals())
            except (ValueError, UnknownJobError) as problem:
                log.error("residuals cannot be used", job=job.name, reason=str(problem))
        if engine.jobs:
            engine.recovery.note_recovered()
        return list(engine.jobs)


def _resume_slice(engine: Engine, job: RunningJob, running: RunningTable, index: int) -> None:
    table, store = running.table, running.queues[index].store
    is_behind = store.journal is not None and store.journal.record.epoch < table.epoch
    engine.requests.execute(job, resume(job, table, index, store))
    if is_behind:
        running.switch_rule(index)


def resume(running: RunningJob, table: Table, index: int, store: Store) -> Actions:
    """Resumes the clock of a slice from its journal; returns the actions that were still due."""
    journal = store.journal
    if journal is None or journal.is_new or store.progress is None:
        return []
    job, clock = running.job, table.clocks[index]
    address = Address(job.name, table.index, index)
    record, counted = journal.record, store.progress.copy()
    clock.minibatches = store.progress.copy_minibatches()

    def token_of(push: Push, payload: Payload) -> Request:
        return Request(running, address, clock, push.worker, NullReply(), payload)

    open_steps = open_steps_of(journal, table.spec.compressor, token_of)
    for rank, steps in counted.items():
        job.steps[rank] = max(job.steps.get(rank, 0), steps.num_counted)
    if record.epoch == table.epoch or table.former is None:
        actions = clock.resume(record.version, counted, open_steps)
    else:  # Killed during a change of the mode, before this slice had made it.
        table.participants.aside |= dict.fromkeys(job.membership.expected(), ())
        actions = clock.resume(record.version, counted, open_steps, rule=table.former)
        actions += clock.change(table.spec.rule)
        table.participants.aside.clear()
    return [(address, action) for action in actions]


def open_steps_of(
    journal: SliceJournal, compressor: Compressor, token_of: Callable[[Push, Payload], Token]
) -> dict[int, OpenStep]:
    """Returns the counted pushes that are in no update yet, by open step.

    Args:
        token_of: Returns a token for a push whose payload has not been added yet.
    """
    open_steps: dict[int, OpenStep] = {}
    for pending in journal.record.open_steps:
        added = [(journal.push_of(entry), entry.weight) for entry in pending.added]
        open_steps[pending.key] = OpenStep(pending.key, added=added)
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


class NullReply:
    """Discards answers to requests that the former process has answered already."""

    def pushed(self, reply: object) -> None:
        """Sends nothing."""

    def pulled(self, reply: object, arrays: object, release: Callable[[], None] | None) -> None:
        """Sends nothing."""
        if release is not None:
            release()
