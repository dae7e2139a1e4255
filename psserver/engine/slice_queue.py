"""Lanes: each slice's actions one after the other, many slices at once, off the event loop.

A lane owns one `SliceStore`. Actions of large slices run on a pool of threads, whose loops let the
GIL go, or on the thread that has just received the gradient (requests.py); those of small ones run
at once on the caller's thread, where a switch of threads would cost more than the work. Results go
back through the callbacks that the engine gives.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pscore.rules.base import Rule
from psserver.decisions.orders import Acknowledge, Action, Add, Answer, Hold, Load, Skip, Update
from psserver.decisions.progress import Token
from psserver.slices.store import Payload, SliceStore

INLINE_NUMEL_MAX = 1 << 15  # 128 KiB: about 20 microseconds of work, less than a switch of threads.


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Hand copies of all arrays of the slice, as they are between two actions, to `take`."""

    take: Callable[[dict[str, np.ndarray]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Go on under another rule."""

    rule: Rule
    epoch: int  # Changes so far, with this one.
    clocks: Mapping[int, int]  # Of each worker, by rank.


Work = Action | Copy | Change


class Desk(Protocol):
    """Where a lane finds payloads and leaves answers; called from any thread."""

    def payload(self, token: Token) -> Payload:
        """Returns the payload of a push; the same one until `done`."""

    def keep(self, token: Token, payload: Payload) -> None:
        """Has this payload from now on in the place of the push's own."""

    def done(self, token: Token) -> None:
        """Forgets a payload."""

    def acknowledge(self, action: Acknowledge) -> None:
        """Answers a push."""

    def answer(self, action: Answer, store: SliceStore) -> None:
        """Answers a pull from the store's arrays, before it returns."""

    def broke(self, problem: BaseException | None) -> None:
        """Learns that an action failed, which only a bug can cause; the slice is stuck."""


class Lane:
    """The actions of one slice, in order."""

    def __init__(self, store: SliceStore, desk: Desk, executor: Executor | None) -> None:
        """Starts idle.

        Args:
            store: The slice's numbers; only this lane touches them.
            desk: Payloads and answers.
            executor: Does the work of large slices; None: `submit` does it before it returns.
        """
        self.store = store
        self._desk = desk
        self._queue: deque[Work] = deque()
        self._lock = threading.Lock()
        self._is_busy = False
        self._executor = executor if store.numel > INLINE_NUMEL_MAX else None

    @property
    def is_busy(self) -> bool:
        """Whether actions are queued or being carried out."""
        return self._is_busy

    def submit(self, actions: Sequence[Work]) -> None:
        """Queues actions behind those already there."""
        if not self.queue(actions):
            return
        if self._executor is None:
            self.run()
        else:
            self._executor.submit(self.run)

    def queue(self, actions: Sequence[Work]) -> bool:
        """Queues actions; returns whether the lane was idle, and the caller has to `run` it."""
        with self._lock:
            self._queue.extend(actions)
            if self._is_busy or not self._queue:
                return False
            self._is_busy = True
            return True

    def run(self) -> None:
        """Carries out what is queued, on this thread."""
        finished = False
        try:
            while batch := self._take():
                carry_out(batch, self.store, self._desk)
            finished = True
        finally:
            if not finished:
                self._desk.broke(sys.exception())

    def _take(self) -> list[Work]:
        """Returns all that is queued; if that is nothing, the lane is idle."""
        with self._lock:
            batch = list(self._queue)
            self._queue.clear()
            self._is_busy = bool(batch)
            return batch


def carry_out(actions: Sequence[Work], store: SliceStore, desk: Desk) -> None:
    """Carries out actions of one slice in order; an update and the additions before it in one.

    Acknowledgements between them come behind it: nobody waits for one but to use the gradient's
    memory again, and so that memory is read once, for addition and step.
    """
    run: list[Add | Acknowledge] = []
    for action in actions:
        if isinstance(action, Add) or (run and isinstance(action, Acknowledge)):
            run.append(action)
            continue
        if isinstance(action, Update) and run:
            _update_with(run, action, store, desk)
        else:
            _one_by_one(run, store, desk)
            CARRIERS[type(action)](action, store, desk)
        run = []
    _one_by_one(run, store, desk)


def _update_with(
    run: Sequence[Add | Acknowledge], update: Update, store: SliceStore, desk: Desk
) -> None:
    """Makes an update together with the additions to its bin that end `run`."""
    begin = 0
    for position, action in enumerate(run):
        if isinstance(action, Add) and action.bin != update.bin:
            begin = position + 1
    adds = [action for action in run[begin:] if isinstance(action, Add)]
    if not adds:
        _one_by_one([*run, update], store, desk)
        return
    _one_by_one(run[:begin], store, desk)
    store.add_and_update([(add, desk.payload(add.token)) for add in adds], update)
    for add in adds:
        desk.done(add.token)
    _one_by_one([action for action in run[begin:] if not isinstance(action, Add)], store, desk)


def _one_by_one(actions: Sequence[Work], store: SliceStore, desk: Desk) -> None:
    for action in actions:
        CARRIERS[type(action)](action, store, desk)


def _add(action: Add, store: SliceStore, desk: Desk) -> None:
    store.add(action, desk.payload(action.token))
    desk.done(action.token)


def _load(action: Load, store: SliceStore, desk: Desk) -> None:
    store.load(action, desk.payload(action.token))
    desk.done(action.token)


def _hold(action: Hold, store: SliceStore, desk: Desk) -> None:
    desk.keep(action.token, store.hold(action, desk.payload(action.token)))


def _update(action: Update, store: SliceStore, desk: Desk) -> None:
    store.update(action)


def _skip(action: Skip, store: SliceStore, desk: Desk) -> None:
    store.skip(action)


def _acknowledge(action: Acknowledge, store: SliceStore, desk: Desk) -> None:
    store.refuse(action)
    desk.acknowledge(action)


def _answer(action: Answer, store: SliceStore, desk: Desk) -> None:
    desk.answer(action, store)


def _copy(action: Copy, store: SliceStore, desk: Desk) -> None:
    action.take(store.export())


def _change(action: Change, store: SliceStore, desk: Desk) -> None:
    store.change(action.rule, action.epoch, action.clocks)


CARRIERS: dict[type[Work], Callable[..., None]] = {
    Copy: _copy,
    Change: _change,
    Add: _add,
    Load: _load,
    Hold: _hold,
    Update: _update,
    Skip: _skip,
    Acknowledge: _acknowledge,
    Answer: _answer,
}
