"""The slices and files of this process's shard, as another process follows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pscore.memory.segment import WeightsMap
from psserver.durability.journal_dir import JOB, LOST, PUBLISHED, RESIDUALS, ignore
from psserver.standby.pieces import SentSpan
from psserver.standby.spans import SliceSpans, Span, arena_head, digest_of_span
from psserver.standby.stream import JournalStream, Sender

if TYPE_CHECKING:
    from psserver.durability.journal_dir import JournalDir
    from psserver.engine.engine import Engine
    from psserver.engine.job import RunningJob, RunningTable
    from psserver.engine.slice_queue import SliceQueue


class FollowedSlice:
    """A slice that was there before another process began to follow."""

    def __init__(self, queue: SliceQueue, spans: SliceSpans, stream: JournalStream) -> None:
        """Sends nothing yet; called by the event loop's thread."""
        self._queue, self._spans, self._stream = queue, spans, stream
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[int] = self._loop.create_future()

    def ship(self, kept: Callable[[], None]) -> bool:
        """Sends the slice as it is now (`slice_queue.Ship`)."""
        if self._first.done():
            return self._stream.ship(self._spans, kept)
        nbytes = sum(span.nbytes for span in self._spans.find())

        def kept_first() -> None:
            self.note_first(nbytes)
            kept()

        return self._stream.ship(self._spans, kept_first)

    def note_first(self, nbytes: int) -> None:
        """Ends the wait of `send`; may be called by any thread, and again."""
        self._loop.call_soon_threadsafe(self._set, nbytes)

    async def send(self) -> int:
        """Sends it, and from then on all its changes; returns its bytes once they are there."""
        self._queue.follow(self.ship)
        return await self._first

    def _set(self, nbytes: int) -> None:
        if not self._first.done():
            self._first.set_result(nbytes)


class FollowedShard:
    """All slices of a shard in a stream, and its small files."""

    def __init__(self, engine: Engine, journals: JournalDir) -> None:
        """Follows nothing yet; must be made before the shard has a table."""
        self._engine, self._journals = engine, journals
        self._stream: JournalStream | None = None
        self._copied: FollowedSlice | None = None  # The last one of `slices`.
        former = engine.on_table

        def on_table(job: RunningJob, running: RunningTable) -> None:
            former(job, running)
            self._begin_table(job, running)

        engine.on_table = on_table

    def follow(self, send: Sender, failed: Callable[[], None]) -> JournalStream:
        """Opens a stream of all changes of small files and new tables."""
        folder, engine = self._journals.folder, self._engine
        with engine.lock:
            stream = JournalStream(folder, engine.lock, send, failed)
            self._stream, self._journals.on_change = stream, stream.note
            for path in self._small_files():
                stream.note(path)
        return stream

    @property
    def stream(self) -> JournalStream | None:
        """The stream; None: no other process follows."""
        return self._stream

    def slices(self, stream: JournalStream) -> Iterator[FollowedSlice]:
        """Yields the slices that are there now, unless the stream ends or their job is freed."""
        with self._engine.lock:
            found = [
                (job, FollowedSlice(queue, spans, stream))
                for job in self._engine.jobs.values()
                for running in job.tables.values()
                for queue, spans in self._spans_of(job, running)
            ]
        for job, one in found:
            with self._engine.lock:
                if self._stream is not stream:
                    return
                self._copied = one
                is_there = self._engine.jobs.get(job.name) is job
            if is_there:
                yield one

    def unfollow(self) -> None:
        """Ends the stream: all that waits goes on. May be called by any thread, and again."""
        with self._engine.lock:
            stream, self._stream = self._stream, None
            copied, self._copied = self._copied, None
            self._journals.on_change = ignore
            for job in self._engine.jobs.values():
                for running in job.tables.values():
                    for queue in running.queues.values():
                        queue.follow(None)
        if copied is not None:
            copied.note_first(0)
        if stream is not None:
            stream.stop()

    def sent_spans(self) -> list[SentSpan]:
        """Returns all that counts, with its hashes; nothing may change the journals."""
        folder = self._journals.folder
        with self._engine.lock:
            small = self._small_files()
            spans = [
                Span(path=path.relative_to(folder).as_posix(), offset=0, nbytes=path.stat().st_size)
                for path in small
            ]
            spans += [arena_head(path.parent.name) for path in small if path.name == JOB]
            for job in self._engine.jobs.values():
                for running in job.tables.values():
                    for _, found in self._spans_of(job, running):
                        spans += found.find()
        return [SentSpan(span=span, digest=digest_of_span(folder, span)) for span in spans]

    def _begin_table(self, job: RunningJob, running: RunningTable) -> None:
        """Sends a new table with the files that name it; called under the engine's lock."""
        stream = self._stream
        if stream is None:
            return
        if job.recorder.folder is None:
            stream.fail(f"there is no room to journal job {job.name!r}")
            return
        for path in _weights_without_slices(job, running):
            stream.note(path)
        for queue, spans in self._spans_of(job, running):
            queue.follow(partial(stream.ship, spans))

    def _spans_of(
        self, job: RunningJob, running: RunningTable
    ) -> Iterator[tuple[SliceQueue, SliceSpans]]:
        folder, table = job.recorder.folder, running.table
        layout = WeightsMap(list(table.specs.values()))
        for index, queue in running.queues.items():
            journal = queue.store.journal
            if folder is not None and journal is not None:
                own = (folder.name, table.index, index, layout, journal)
                yield queue, SliceSpans(self._journals.folder, *own)

    def _small_files(self) -> list[Path]:
        """Returns the small files of all jobs; of those that are lost, the name and the reason."""
        running = {job.recorder.folder for job in self._engine.jobs.values()}
        found: list[Path] = []
        for folder in self._journals.found():
            names = [JOB, LOST]
            if folder in running:
                names += [RESIDUALS, PUBLISHED, *(path.name for path in folder.glob("[0-9]*.json"))]
            found += [folder / name for name in names if (folder / name).exists()]
        for job in self._engine.jobs.values():
            for table in job.tables.values():
                found += _weights_without_slices(job, table)
        return found


def _weights_without_slices(job: RunningJob, running: RunningTable) -> list[Path]:
    """Returns the file of a table's weights if no slice of the table lies on this shard."""
    folder = job.recorder.folder
    if folder is None or running.queues:
        return []
    return [path for path in [folder / f"{running.table.index}.weights"] if path.exists()]
