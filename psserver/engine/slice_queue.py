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


class Completion(Protocol):
    """Holds the payloads of requests and sends their answers; called from any thread."""

    def payload(self, token: Token) -> Payload:
        """Returns the payload of a push; the same one until `done`."""

    def keep(self, token: Token, payload: Payload) -> None:
        """Replaces the payload of a push, whose memory may then be reused."""

    def done(self, token: Token) -> None:
        """Drops the payload of a push."""

    def acknowledge(self, action: Acknowledge) -> None:
        """Answers a push."""

    def answer(self, action: Answer, store: Store) -> None:
        """Answers a pull from the store's arrays, before it returns."""

    def broke(self, problem: BaseException | None) -> None:
        """Reports that an action raised, which only a bug can cause; the slice stays stuck."""


class DeferringCompletion(Completion, Protocol):
    """A completion whose answers can be made before they are sent."""

    def make_acknowledgement(self, action: Acknowledge) -> Send:
        """Returns the answer to a push."""

    def make_answer(self, action: Answer, store: Store) -> Send:
        """Returns the answer to a pull; it may read the store's arrays until its next order."""


class Follower(Protocol):
    """Another process that gets all changes of one slice."""

    def ship(self, kept: Callable[[], None]) -> bool:
        """Sends the slice as its journal has it now, and calls `kept` once the other has it.

        Nothing changes the slice until then. Returns False, and sends nothing, if no other process
        follows any more.
        """


class Outbox:
    """A completion whose answers wait."""

    def __init__(self, completion: DeferringCompletion) -> None:
        self._completion = completion
        self._sends: list[Send] = []
        self.payload, self.keep = completion.payload, completion.keep
        self.done, self.broke = completion.done, completion.broke

    def acknowledge(self, action: Acknowledge) -> None:
        """Keeps the answer to a push."""
        self._sends.append(self._completion.make_acknowledgement(action))

    def answer(self, action: Answer, store: Store) -> None:
        """Keeps the answer to a pull."""
        self._sends.append(self._completion.make_answer(action, store))

    def release(self) -> None:
        """Sends all answers."""
        for send in self._sends:
            send()


class SliceQueue:
    """The actions of one slice, in order."""

    def __init__(
        self,
        store: Store,
        completion: DeferringCompletion,
        executor: Executor | None,
        placement: Placement = DEFAULTS,
    ) -> None:
        """Starts idle.

        Args:
            store: The slice's numbers; only this queue touches them.
            completion: Payloads and answers of requests.
            executor: Does the work of large slices; None: `submit` does it before it returns.
        """
        self.store = store
        self._completion = completion
        self._queue: deque[Work] = deque()
        self._lock = threading.Lock()
        self._is_busy = self._is_copying = False
        self._follower: Follower | None = None
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

    def follow(self, follower: Follower | None) -> None:
        """Sends the slice to another process, and all further changes; None: to none any more."""
        with self._lock:
            self._follower, self._shipped = follower, NEVER
            if follower is None:
                return
            if self._is_busy:
                self._queue.append(BeginShipping())
                return
            self._is_busy = True
        if self._has_it(Outbox(self._completion)):
            self.run()

    def run(self) -> None:
        """Executes all queued actions on this thread, until the queue is empty or has to wait."""
        finished = False
        try:
            while batch := self._take():
                if self._follower is None:
                    self._put_off(execute(batch, self.store, self._completion))
                elif not self._execute_followed(batch):
                    break
                if self._is_copying and self._goes_on():
                    break
            finished = True
        finally:
            if not finished:
                self._completion.broke(sys.exception())

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
        outbox = Outbox(self._completion)
        self._put_off(execute(batch[:stop], self.store, outbox))
        return self._has_it(outbox)

    def _has_it(self, outbox: Outbox) -> bool:
        """Sends answers if the other process has all changes, else the changes first.

        Returns:
            Whether the answers have left.
        """
        follower, journal = self._follower, self.store.journal
        if follower is not None and journal is not None:
            is_new = journal.number != self._shipped or not journal.is_on
            self._shipped = journal.number
            if is_new and follower.ship(partial(self._go_on, outbox)):
                return False
        outbox.release()
        return True

    def _go_on(self, outbox: Outbox) -> None:
        """Sends answers whose changes the other process has, and executes the next actions."""
        outbox.release()
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


def execute(actions: Sequence[Work], store: Store, completion: Completion) -> list[Work]:
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
            _update_with(run, action, store, completion)
        else:
            _one_by_one(run, store, completion)
            if isinstance(action, CopyOut | CopyMore):
                more += _copy(action, store)
            else:
                HANDLERS[type(action)](action, store, completion)
        run = []
    _one_by_one(run, store, completion)
    return more


def _update_with(
    run: Sequence[Add | Acknowledge], update: Update, store: Store, completion: Completion
) -> None:
    """Makes an update together with the additions to its open step at the end of `run`."""
    begin = 0
    for position, action in enumerate(run):
        if isinstance(action, Add) and action.open_step != update.open_step:
            begin = position + 1
    adds = [action for action in run[begin:] if isinstance(action, Add)]
    if not adds:
        _one_by_one([*run, update], store, completion)
        return
    _one_by_one(run[:begin], store, completion)
    store.add_and_update([(add, completion.payload(add.token)) for add in adds], update)
    for add in adds:
        completion.done(add.token)
    _one_by_one(
        [action for action in run[begin:] if not isinstance(action, Add)], store, completion
    )


def _one_by_one(actions: Sequence[Work], store: Store, completion: Completion) -> None:
    for action in actions:
        HANDLERS[type(action)](action, store, completion)


def _add(action: Add, store: Store, completion: Completion) -> None:
    store.add(action, completion.payload(action.token))
    completion.done(action.token)


def _load(action: Load, store: Store, completion: Completion) -> None:
    store.load(action, completion.payload(action.token))
    completion.done(action.token)


def _hold(action: Hold, store: Store, completion: Completion) -> None:
    completion.keep(action.token, store.hold(action, completion.payload(action.token)))


def _update(action: Update, store: Store, completion: Completion) -> None:
    store.update(action)


def _skip(action: Skip, store: Store, completion: Completion) -> None:
    store.skip(action)


def _acknowledge(action: Acknowledge, store: Store, completion: Completion) -> None:
    store.note_late(action)
    completion.acknowledge(action)


def _answer(action: Answer, store: Store, completion: Completion) -> None:
    completion.answer(action, store)


def _copy(action: CopyOut | CopyMore, store: Store) -> list[Work]:
    """Copies a portion; returns the next one, or none if the copy is whole."""
    if isinstance(action, CopyOut):
        action = CopyMore(take=action.take, portions=store.export(action.mark))
    arrays = next(action.portions)
    if arrays is None:
        return [action]
    action.take(arrays)
    return []


def _show_store(action: ShowStore, store: Store, completion: Completion) -> None:
    action.see(store)


def _switch_rule(action: SwitchRule, store: Store, completion: Completion) -> None:
    store.change(action.rule, action.epoch, action.clocks)


def _count_before(action: CountBefore, store: Store, completion: Completion) -> None:
    if store.progress is not None:
        store.progress.count_before(action.minibatch)


def _seal(action: Seal, store: Store, completion: Completion) -> None:
    store.seal()


def _journal_again(action: JournalAgain, store: Store, completion: Completion) -> None:
    store.journal_again()


def _begin_shipping(action: BeginShipping, store: Store, completion: Completion) -> None:
    """Does nothing: the queue ships behind it."""


HANDLERS: dict[type[Work], Callable[..., None]] = {
    ShowStore: _show_store,
    SwitchRule: _switch_rule,
    CountBefore: _count_before,
    Seal: _seal,
    JournalAgain: _journal_again,
    BeginShipping: _begin_shipping,
    Add: _add,
    Load: _load,
    Hold: _hold,
    Update: _update,
    Skip: _skip,
    Acknowledge: _acknowledge,
    Answer: _answer,
}
