"""Slice queues: the actions of each slice in order, those of different slices side by side.

A queue owns one `Store`. Actions of large slices run on an executor, whose threads release the
GIL in their loops, or on the thread that has just received the gradient (requests.py). Actions of
small slices run at once on the caller's thread (placement.py). Results go back through
`Completion`.

While another process follows the shard (psserver/standby), a queue sends what its actions have
changed, and stops: the answers leave, and the next actions run, once the other process has that.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Protocol

import numpy as np

from pscore.rules.base import Rule
from psserver.decisions.orders import Acknowledge, Action, Add, Answer, Hold, Load, Skip, Update
from psserver.decisions.progress import Token
from psserver.engine.placement import Placement
from psserver.slices.base import Mark, Payload, Store

DEFAULTS = Placement()
NEVER = -2  # No number of a record.


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOut:
    """Copy all arrays of the slice, as they are between two actions, and call `take` with them."""

    take: Callable[[dict[str, np.ndarray]], None]
    mark: Mark | None = None  # The mark of an earlier copy: the changes since then will do.


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMore:
    """Copy the next portion of a copy that has begun."""

    take: Callable[[dict[str, np.ndarray]], None]
    portions: Iterator[dict[str, np.ndarray] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowStore:
    """Call `see` with the slice's numbers, as they are between two actions."""

    see: Callable[[Store], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRule:
    """Apply another rule from the next action on."""

    rule: Rule
    epoch: int  # Rule changes so far, including this one.
    clocks: Mapping[int, int]  # Next step of each worker, by rank.


@dataclass(frozen=True, slots=True)
class CountBefore:
    """Count all minibatches before one."""

    minibatch: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Hash the weights and the optimizer's state, so that the journal's next reader can check."""


@dataclass(frozen=True, slots=True)
class JournalAgain:
    """Journal the slice again, if its journal had ended and there is room now."""


@dataclass(frozen=True, slots=True)
class BeginShipping:
    """Send all that the journal of the slice needs."""


Work = (
    Action
    | CopyOut
    | CopyMore
    | ShowStore
    | SwitchRule
    | CountBefore
    | Seal
    | JournalAgain
    | BeginShipping
)
Send = Callable[[], None]  # Sends an answer that is ready.
# Sends the slice as its journal has it now to another process, and calls the argument once that has
# it; nothing changes the slice until then. False: none follows any more, and nothing is sent.
Ship = Callable[[Callable[[], None]], bool]


class Completion(Protocol):
    """Holds the payloads of requests and makes their answers; called from any thread."""

    def payload(self, token: Token) -> Payload:
        """Returns the payload of a push; the same one until `done`."""

    def keep(self, token: Token, payload: Payload) -> None:
        """Replaces the payload of a push, whose memory may then be reused."""

    def done(self, token: Token) -> None:
        """Drops the payload of a push."""

    def make_acknowledgement(self, action: Acknowledge) -> Send:
        """Returns the answer to a push."""

    def make_answer(self, action: Answer, store: Store) -> Send:
        """Returns the answer to a pull; it may read the store's arrays until its next order."""

    def broke(self, problem: BaseException) -> None:
        """Reports that an action raised, which only a bug can cause; the slice stays stuck."""


class SliceQueue:
    """The actions of one slice, in order."""

    def __init__(
        self,
        store: Store,
        completion: Completion,
        executor: Executor | None,
        placement: Placement = DEFAULTS,
    ) -> None:
        """Starts idle.

        Args:
            store: The slice's numbers; only this queue touches them.
            executor: Does the work of large slices; None: `submit` does it before it returns.
        """
        self.store = store
        self._completion = completion
        self._queue: deque[Work] = deque()
        self._lock = threading.Lock()
        self._is_busy = self._is_copying = False
        self._ship: Ship | None = None
        self._shipped = NEVER  # Number of the journal's record that the follower has.
        self._executor = executor if store.numel > placement.inline_numel_max else None

    @property
    def is_busy(self) -> bool:
        """Whether actions are queued or running."""
        return self._is_busy

    def submit(self, actions: Sequence[Work]) -> None:
        """Appends actions, and starts their execution if the queue was idle."""
        if self.append(actions):
            self._start()

    def append(self, actions: Sequence[Work]) -> bool:
        """Appends actions; returns whether the queue was idle, so that the caller must `run` it."""
        with self._lock:
            self._queue.extend(actions)
            if self._is_busy or not self._queue:
                return False
            self._is_busy = True
            return True

    def follow(self, ship: Ship | None) -> None:
        """Sends the slice to another process, and all further changes; None: to none any more."""
        with self._lock:
            self._ship, self._shipped = ship, NEVER
            if ship is None:
                return
            if self._is_busy:
                self._queue.append(BeginShipping())
                return
            self._is_busy = True
        if self._has_it([]):
            self.run()

    def run(self) -> None:
        """Executes all queued actions on this thread, until the queue is empty or has to wait."""
        finished = False
        try:
            while batch := self._take():
                if self._ship is None:
                    self._put_off(execute(batch, self.store, self._completion))
                elif not self._execute_followed(batch):
                    break
                if self._is_copying and self._goes_on():
                    break
            finished = True
        finally:
            if not finished and (problem := sys.exception()) is not None:
                self._completion.broke(problem)

    def _put_off(self, copies: list[Work]) -> None:
        """Queues the next portions of copies, behind the actions that have come meanwhile."""
        self._is_copying = bool(copies)
        if copies:
            with self._lock:
                self._queue.extend(copies)

    def _goes_on(self) -> bool:
        """Leaves the rest of the queue to the executor: this thread may have to receive."""
        if self._executor is None:
            return False
        try:
            self._executor.submit(self.run)
        except RuntimeError:  # It is shut down: the process ends.
            return False
        return True

    def _execute_followed(self, batch: list[Work]) -> bool:
        """Executes actions while another process follows; returns False if the queue has to wait.

        An answer may read the slice as it is, so no change is made behind one before it has left.
        """
        first = next((i for i, work in enumerate(batch) if isinstance(work, Answer)), len(batch))
        stop = first
        while stop < len(batch) and isinstance(batch[stop], Answer):
            stop += 1
        with self._lock:
            self._queue.extendleft(reversed(batch[stop:]))
        answers: list[Send] = []
        self._put_off(execute(batch[:stop], self.store, self._completion, answers.append))
        return self._has_it(answers)

    def _has_it(self, answers: list[Send]) -> bool:
        """Sends answers if the other process has all changes; else the changes, and returns False.

        The answers then leave later.
        """
        ship, journal = self._ship, self.store.journal
        if ship is not None and journal is not None:
            is_new = journal.number != self._shipped or not journal.is_on
            self._shipped = journal.number
            if is_new and ship(partial(self._go_on, answers)):
                return False
        for send in answers:
            send()
        return True

    def _go_on(self, answers: list[Send]) -> None:
        """Sends answers whose changes the other process has, and executes the next actions."""
        for send in answers:
            send()
        self._start()

    def _start(self) -> None:
        if self._executor is None:
            self.run()
        else:
            self._executor.submit(self.run)

    def _take(self) -> list[Work]:
        """Returns all queued actions; without any, the queue is idle from then on."""
        with self._lock:
            batch = list(self._queue)
            self._queue.clear()
            self._is_busy = bool(batch)
            return batch


def execute(
    actions: Sequence[Work],
    store: Store,
    completion: Completion,
    send: Callable[[Send], None] = call,
) -> list[Work]:
    """Executes actions of one slice in order; an update and the additions before it run as one.

    So a gradient is read once, for addition and step. Acknowledgements between them are sent after
    the update: their receivers need them only to reuse the gradient's memory.

    Returns:
        The next portions of copies that are not whole.
    """
    run: list[Add | Acknowledge] = []
    more: list[Work] = []
    for action in actions:
        if isinstance(action, Add) or (run and isinstance(action, Acknowledge)):
            run.append(action)
            continue
        if isinstance(action, Update) and run:
            _update_with(run, action, store, completion, send)
        else:
            for earlier in run:
                _do(earlier, store, completion, send)
            if isinstance(action, CopyOut | CopyMore):
                more += _copy(action, store)
            else:
                _do(action, store, completion, send)
        run = []
    for earlier in run:
        _do(earlier, store, completion, send)
    return more


def _update_with(
    run: Sequence[Add | Acknowledge],
    update: Update,
    store: Store,
    completion: Completion,
    send: Callable[[Send], None],
) -> None:
    """Makes an update together with the additions to its open step at the end of `run`."""
    begin = 0
    for position, action in enumerate(run):
        if isinstance(action, Add) and action.open_step != update.open_step:
            begin = position + 1
    adds = [action for action in run[begin:] if isinstance(action, Add)]
    for earlier in run[:begin] if adds else (*run, update):
        _do(earlier, store, completion, send)
    if not adds:
        return
    store.add_and_update([(add, completion.payload(add.token)) for add in adds], update)
    for add in adds:
        completion.done(add.token)
    for action in run[begin:]:
        if not isinstance(action, Add):
            _do(action, store, completion, send)


def _do(action: Work, store: Store, completion: Completion, send: Callable[[Send], None]) -> None:
    """Executes one action, but for copies."""
    if isinstance(action, Acknowledge):
        store.note_late(action)
        send(completion.make_acknowledgement(action))
    elif isinstance(action, Answer):
        send(completion.make_answer(action, store))
    elif isinstance(action, Add):
        store.add(action, completion.payload(action.token))
        completion.done(action.token)
    elif isinstance(action, Update):
        store.update(action)
    elif isinstance(action, Hold):
        completion.keep(action.token, store.hold(action, completion.payload(action.token)))
    elif isinstance(action, Load):
        store.load(action, completion.payload(action.token))
        completion.done(action.token)
    elif isinstance(action, Skip):
        store.skip(action)
    else:
        _do_other(action, store)


def _do_other(action: Work, store: Store) -> None:
    """Executes an action that no clock has decided; `BeginShipping` only marks a place."""
    if isinstance(action, ShowStore):
        action.see(store)
    elif isinstance(action, SwitchRule):
        store.change(action.rule, action.epoch, action.clocks)
    elif isinstance(action, CountBefore) and store.progress is not None:
        store.progress.count_before(action.minibatch)
    elif isinstance(action, Seal):
        store.seal()
    elif isinstance(action, JournalAgain):
        store.journal_again()


def _copy(action: CopyOut | CopyMore, store: Store) -> list[Work]:
    """Copies a portion; returns the next one, or none if the copy is whole."""
    if isinstance(action, CopyOut):
        action = CopyMore(take=action.take, portions=store.export(action.mark))
    arrays = next(action.portions)
    if arrays is None:
        return [action]
    action.take(arrays)
    return []
