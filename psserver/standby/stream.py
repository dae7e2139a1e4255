"""The stream of changes from a shard's journals to another process, in the order of their making.

A change of a slice is put here by its queue, which then waits (engine/slice_queue.py); a change of
a small file by the code that wrote it, under the engine's lock. A thread sends all that has been
put since the last time as one group, and tells the queues once the other process has it. So the
other process has a state that a kill of this one could have left, and has all that was answered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pscore.errors import PacelineError, ThreadError
from pscore.threads import OwnedThread
from psserver.durability.journal_dir import JOB
from psserver.standby.spans import JournalPiece, SliceSpans, SpanReader, arena_head, read_small

CALL_NBYTES = 8 << 20  # Pieces of one call.
SIGN_S = 1.0  # Seconds without a change after which an empty call looks for the other process.
Sender = Callable[[list[JournalPiece], bool], None]


@dataclass(slots=True)
class Change:
    """One entry of the stream: a slice or a small file."""

    spans: SliceSpans | None = None
    path: Path | None = None
    kept: Callable[[], None] | None = None  # Called once the other process has it.


class JournalStream:
    """Changes that leave, group by group.

    Attributes:
        sent_nbytes: Bytes that were sent.
        problem: Why nothing is sent any more; empty until then.
        is_whole: Whether the other process has everything: from then on a group counts as a whole.
    """

    def __init__(
        self,
        folder: Path,
        lock: AbstractContextManager[object],
        send: Sender,
        failed: Callable[[], None],
    ) -> None:
        """Starts without changes.

        Args:
            lock: The engine's: all that was put while it was held leaves in one group.
            send: Sends pieces, and returns once the other process has them. The second argument
                says whether they count together with those of the next call.
            failed: Called once, by any thread, when nothing can be sent any more. Changes wait
                from then on until `stop`.
        """
        self._folder, self._engine_lock, self._send, self._failed = folder, lock, send, failed
        self._reader = SpanReader(folder)
        self._changed = threading.Condition()
        self._left: list[Change] = []
        self._sending: list[Change] = []  # Changes that were taken from there.
        self._is_sending, self._is_over = False, False
        self._since_s = 0.0  # Time of the oldest change that the other process lacks, if any.
        self.sent_nbytes, self.problem, self.is_whole = 0, "", False
        self._thread = OwnedThread(self._run, "standby", self._note_bug)
        self._thread.start()

    def put(self, change: Change) -> bool:
        """Appends a change; returns False if the stream is over. May be called by any thread."""
        with self._changed:
            if self._is_over:
                return False
            if self._is_idle:
                self._since_s = time.monotonic()
            self._left.append(change)
            self._changed.notify_all()
            return True

    def ship(self, spans: SliceSpans, kept: Callable[[], None]) -> bool:
        """Appends a slice as it is now (`Ship`); one without a journal ends the stream."""
        if not spans.journal.is_on:
            self.fail("a slice is not journalled for lack of space")
        return self.put(Change(spans=spans, kept=kept))

    def note(self, path: Path) -> None:
        """Appends a small file, or a folder that is gone; called under the engine's lock."""
        self.put(Change(path=path))

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was put has been sent; returns whether it has."""
        with self._changed:
            self._changed.wait_for(lambda: self.problem or self._is_idle, timeout_s)
            return self._is_idle and not self.problem

    def await_kept(self) -> None:
        """Waits until all that was put has been sent, or the stream is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or (self._is_idle and not self.problem))

    def fail(self, reason: str) -> None:
        """Sends nothing more; changes wait for `stop`. May be called by any thread."""
        with self._changed:
            if self.problem:
                return
            self.problem = reason
            self._changed.notify_all()
        self._failed()

    def stop(self) -> None:
        """Ends the stream: all that waits goes on without the other process."""
        with self._changed:
            self.problem = self.problem or "it was stopped"
            self._is_over = True
            left, self._left = self._left, []
            self._changed.notify_all()
        for change in left:
            if change.kept is not None:
                change.kept()

    @property
    def lag_s(self) -> float:
        """Seconds since a change that the other process lacks, at most; 0: it lacks none."""
        with self._changed:
            return 0.0 if self._is_idle else time.monotonic() - self._since_s

    @property
    def _is_idle(self) -> bool:
        return not (self._left or self._is_sending)

    # ----- its thread

    def _run(self) -> None:
        while True:
            try:
                small = self._take()
                if small is None:
                    return
                self._send_all(self._sending, small)
            except (PacelineError, OSError) as problem:
                self._give_back(str(problem) or type(problem).__name__)
                return
            sent, self._sending = self._sending, []
            for change in sent:
                if change.kept is not None:
                    change.kept()
            with self._changed:
                self._is_sending, self._since_s = False, time.monotonic()
                self._changed.notify_all()

    def _give_back(self, reason: str) -> None:
        """Keeps changes that were not sent until `stop`, which may have come already."""
        with self._changed:
            self._left[:0] = self._sending
            self._is_sending = False
        self.fail(reason)
        if self._is_over:
            self.stop()

    def _take(self) -> list[JournalPiece] | None:
        """Removes all changes, and returns the small files; None: nothing is sent any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self.problem, SIGN_S)
        with self._engine_lock, self._changed:
            if self.problem:
                return None
            paths = dict.fromkeys(one.path for one in self._left if one.path is not None)
            found = [read_small(self._folder, path) for path in paths]
            self._sending, self._left = self._left, []
            self._is_sending = True
        return [piece for piece in found if piece is not None]

    def _send_all(self, changes: Iterable[Change], small: list[JournalPiece]) -> None:
        call: list[JournalPiece] = []
        nbytes = 0
        for piece in self._pieces(changes, small):
            if nbytes + len(piece.data) > CALL_NBYTES:
                self._send(call, self.is_whole)
                call, nbytes = [], 0
            call.append(piece)
            nbytes += len(piece.data)
            self.sent_nbytes += len(piece.data)
        self._send(call, False)

    def _pieces(
        self, changes: Iterable[Change], small: list[JournalPiece]
    ) -> Iterator[JournalPiece]:
        for piece in small:
            yield piece
            job, _, name = piece.path.partition("/")
            if name == JOB and not piece.is_gone:
                with contextlib.suppress(FileNotFoundError):  # The job has just been freed.
                    yield from self._reader.changed([arena_head(job)])
        for change in changes:
            if change.spans is not None:
                with contextlib.suppress(FileNotFoundError):
                    yield from self._reader.changed(change.spans.find())

    def _note_bug(self, error: ThreadError) -> None:
        self._give_back(str(error))
