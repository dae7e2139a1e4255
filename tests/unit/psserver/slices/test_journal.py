"""A process killed at any commit, before it or after it: the next one has all that was answered."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pscore.compressors.none import NoCompression
from pscore.optimizers.adam import Adam
from pscore.optimizers.sgd import SGD
from pscore.rules import ASGD, DCASGD, SSGD
from pscore.rules.base import Rule
from pscore.types import FloatArray, Push, Role, SliceSpec, TensorSegment, Verdict
from psserver.decisions.orders import Acknowledge, Action, Answer, Skip
from psserver.decisions.progress import Token
from psserver.decisions.slice_clock import SliceClock
from psserver.engine.resume import open_steps_of
from psserver.engine.slice_queue import execute
from psserver.slices.arena import Arena
from psserver.slices.base import Payload, Store
from psserver.slices.journal import ROOT_NBYTES, SliceJournal
from psserver.slices.store import SliceStore
from pssim.faulty import poison_unreferenced
from tests.participants import Listed

RAW = NoCompression()
NUMEL = 32
SEGMENT = TensorSegment(tensor=0, group=0, start=0, stop=NUMEL, tensor_start=0)
SPEC = SliceSpec(index=0, shard=0, start=0, stop=NUMEL, segments=(SEGMENT,))
HYPER = {
    "sgd": np.array([[0.5, 0.9, 0.0, 0.01, 0.0, 0.0]]),
    "adam": np.array([[0.1, 0.9, 0.999, 1e-8, 0.0, 0.0]]),
}
WORKERS, STEPS = 3, 4
EXPECTED = list(range(WORKERS))


class KilledError(Exception):
    """The process is gone."""


class Process:
    """One life of a slice: clock, store, and the queue between them."""

    def __init__(self, arena: Arena | None, rule: Rule, optimizer: str, root: int) -> None:
        self.payloads: dict[Token, Payload] = {}
        self.answered: dict[Token, Verdict] = {}
        self.clock = SliceClock(rule, Listed(lambda: EXPECTED, WORKERS))
        self.commits_left: int | None = None
        self.dies_before = False
        plugin = SGD() if optimizer == "sgd" else Adam()
        if arena is None:
            self.store = SliceStore(SPEC, rule, plugin)
            return
        places = [root + ROOT_NBYTES, root + ROOT_NBYTES + 4 * NUMEL]
        buffers = [arena.floats_at(place, NUMEL) for place in places]
        versions = np.zeros(2, dtype=np.int64)
        journal = SliceJournal(arena, root, NUMEL, 4 * NUMEL, 1)
        was_there = not journal.is_new
        self.store = SliceStore(SPEC, rule, plugin, buffers, versions, journal)
        commit = journal.commit

        def dying() -> None:
            if self.commits_left == 0 and self.dies_before:
                raise KilledError
            commit()
            if self.commits_left == 0:
                raise KilledError
            if self.commits_left is not None:
                self.commits_left -= 1

        journal.commit = dying  # type: ignore[method-assign]
        if was_there:
            poison_unreferenced(self.store)
            self._resume(journal)

    def _resume(self, journal: SliceJournal) -> None:
        def token_of(push: Push, payload: Payload) -> Token:
            token = ("held", push.worker, push.step)
            self.payloads[token] = payload
            return token

        open_steps = open_steps_of(journal, RAW, token_of)
        assert self.store.progress is not None
        self.clock.minibatches = self.store.progress.copy_minibatches()
        counted = self.store.progress.copy()
        self.execute(self.clock.resume(journal.record.version, counted, open_steps))

    def send(self, token: Token, push: Push, values: FloatArray) -> None:
        data = values.copy().view(np.uint8)
        self.payloads[token] = Payload(data=data, compressor=RAW, is_borrowed=True)
        self.execute(self.clock.push(push, token))

    def execute(self, actions: list[Action]) -> None:
        execute(actions, self.store, self)

    def payload(self, token: Token) -> Payload:
        return self.payloads[token]

    def keep(self, token: Token, payload: Payload) -> None:
        self.payloads[token].data.fill(0xFF)  # The worker's memory is its own again.
        self.payloads[token] = payload

    def done(self, token: Token) -> None:
        del self.payloads[token]

    def make_acknowledgement(self, action: Acknowledge) -> Callable[[], None]:
        return lambda: self.answered.update({action.token: action.verdict})

    def make_answer(self, action: Answer, store: Store) -> Callable[[], None]:
        raise AssertionError("nobody asks")

    def broke(self, problem: BaseException | None) -> None:
        raise AssertionError(problem)


def values(worker: int, step: int) -> FloatArray:
    return np.random.default_rng((worker, step)).standard_normal(NUMEL, dtype=np.float32)


def messages(optimizer: str) -> list[tuple[Token, Push, FloatArray]]:
    """Weights, then every push; the last rank's first, so that the others' are held."""
    load = Push(worker=0, step=-1, base_version=0, role=Role.WEIGHTS)
    sent: list[tuple[Token, Push, FloatArray]] = [("load", load, values(9, 9))]
    for step in range(STEPS):
        for worker in reversed(range(WORKERS)):
            push = Push(
                worker=worker,
                step=step,
                base_version=0,
                samples=1.0 + worker,
                hyper=HYPER[optimizer],
            )
            sent.append(((worker, step), push, values(worker, step)))
    return sent


def calm(rule: Rule, optimizer: str) -> SliceStore:
    process = Process(None, rule, optimizer, 0)
    for token, push, grad in messages(optimizer):
        process.send(token, push, grad)
    return process.store


def numbers(store: SliceStore) -> list[list[float]]:
    return [array.tolist() for array in (store.weights, *store.state)]


@pytest.mark.parametrize("dies_before", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "rule", [SSGD(), SSGD(backup=1), ASGD(), DCASGD(variance_control=0.0)], ids=str
)
def test_killed_at_any_commit(
    rule: Rule, optimizer: str, dies_before: bool, tmp_path: Path
) -> None:
    expected = numbers(calm(rule, optimizer))
    kills = 0
    for at in range(100):
        path = tmp_path / str(at)
        arena = Arena(path, seal=1)
        root = arena.allocate(ROOT_NBYTES + 8 * NUMEL)
        process = Process(arena, rule, optimizer, root)
        process.commits_left, process.dies_before = at, dies_before
        pending = messages(optimizer)
        while pending:
            token, push, grad = pending[0]
            try:
                process.send(token, push, grad)
            except KilledError:
                kills += 1
                process = Process(Arena(path), rule, optimizer, root)
                if token in process.answered:
                    pending.pop(0)
                continue  # Sent again: it was not answered.
            assert token in process.answered
            pending.pop(0)
        assert numbers(process.store) == expected, f"killed at commit {at}"
        if process.commits_left is not None:  # It came to its end before.
            break
    assert kills > WORKERS * STEPS / 2


def test_a_version_that_was_given_for_steps_left_out_is_there_after_a_kill(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", seal=1)
    root = arena.allocate(ROOT_NBYTES + 8 * NUMEL)
    process = Process(arena, SSGD(), "sgd", root)
    for token, push, grad in messages("sgd")[:WORKERS]:
        process.send(token, push, grad)
    before = numbers(process.store)
    process.store.skip(Skip(former=1, version=7))
    again = Process(Arena(tmp_path / "a"), SSGD(), "sgd", root)
    assert (again.clock.version, numbers(again.store)) == (7, before)


def test_a_full_disk_ends_the_journal_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(tmp_path / "arena", seal=1)
    root = arena.allocate(ROOT_NBYTES + 8 * NUMEL)
    process = Process(arena, SSGD(), "sgd", root)
    sent = messages("sgd")
    for message in sent[:3]:
        process.send(*message)

    def full(nbytes: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena, "allocate", full)
    for message in sent[3:]:
        process.send(*message)
    assert numbers(process.store) == numbers(calm(SSGD(), "sgd"))
    with pytest.raises(ValueError, match="no space left to journal a slice"):
        SliceJournal(Arena(arena.path), root, NUMEL, 4 * NUMEL, 1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("rule", [SSGD(), SSGD(backup=1), ASGD(), DCASGD()], ids=str)
@pytest.mark.parametrize("first_full", [0, 1])
def test_a_slice_is_journalled_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, optimizer: str, first_full: int
) -> None:
    """The disk is full from a message on, and free again some messages later."""
    expected = numbers(calm(rule, optimizer))
    sent = messages(optimizer)
    returns = []
    for free_from in range(first_full + 1, len(sent)):
        path = tmp_path / f"{free_from}"
        arena = Arena(path, seal=1)
        root = arena.allocate(ROOT_NBYTES + 8 * NUMEL)
        process = Process(arena, rule, optimizer, root)
        journal = process.store.journal
        assert journal is not None
        with monkeypatch.context() as patch:
            for message in sent[:first_full]:
                process.send(*message)
            patch.setattr(Arena, "allocate", full)
            patch.setattr(Arena, "reserve", full)
            for message in sent[first_full:free_from]:
                process.send(*message)
                process.store.journal_again()
        was_off = not journal.is_on
        process.store.journal_again()
        process.send(*sent[free_from])
        process.store.journal_again()
        if was_off and not journal.is_on:
            assert journal.record.held, "only a payload that is held may stay on the heap"
            continue
        returns.append(was_off)
        process = Process(Arena(path), rule, optimizer, root)  # It was killed.
        for message in sent[free_from + 1 :]:
            process.send(*message)
        assert numbers(process.store) == expected
    assert any(returns)


def test_a_journal_ends_once_where_there_is_room_between_the_steps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the open step's gradients are applied, the arrays of the rest fit into the arena."""
    arena = Arena(tmp_path / "arena", seal=1)
    root = arena.allocate(ROOT_NBYTES + 8 * NUMEL)
    process = Process(arena, SSGD(), "sgd", root)
    journal = process.store.journal
    assert journal is not None
    was_on = []
    with monkeypatch.context() as patch:
        for number, message in enumerate(messages("sgd")):
            if number == 1:
                patch.setattr(Arena, "allocate", full)
            process.send(*message)
            process.store.journal_again()
            was_on.append(journal.is_on)
    assert was_on == sorted(was_on, reverse=True)
    assert not was_on[-1]
    process.store.journal_again()
    assert journal.is_on


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_file_that_is_no_arena_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(b"something else" * 1000)
    with pytest.raises(ValueError, match="not an arena"):
        Arena(path)
