"""The proof of rounds under kills: it finds each move that is lost, counted twice or torn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.chaos import Setup
from benchmarks.survival import round_proof
from benchmarks.survival.proof import ACKNOWLEDGED, SENT, elements
from benchmarks.survival.round_proof import UNIT, Outer, Part, RoundNotebook, RoundProof

LEARNERS, NUMEL, OUTER = 3, 120, Outer(0.7, 0.9)


class Shard:
    """One slice under torch's Nesterov momentum, in float64, and the learners' files."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{rank}.moves" for rank in range(LEARNERS)]
        ledger = [Part(0, NUMEL)]
        self.books = [
            RoundNotebook(path, rank, LEARNERS, ledger) for rank, path in enumerate(self.paths)
        ]
        self.tickets = [0] * LEARNERS
        self.round = 0
        self.weights, self.momentum = np.zeros(NUMEL), np.zeros(NUMEL)

    def push(self, rank: int, *, step: int | None = None, version: int | None = None) -> np.ndarray:
        """Sends a move, and has it acknowledged in a version; -1: as repeated, -2: not at all."""
        ticket = self.tickets[rank]
        self.tickets[rank] += 1
        step = self.round if step is None else step
        self.books[rank].note(SENT, 0, ticket, step)
        version = self.round if version is None else version
        if version > -2:
            self.books[rank].note(ACKNOWLEDGED, 0, ticket, step, version)
        move = np.full(NUMEL, 0.0)
        self.books[rank].mark(0, ticket, move)
        return move

    def close(self, *moves: np.ndarray) -> None:
        mean = np.mean(moves, axis=0)
        self.momentum = OUTER.momentum * self.momentum + mean
        self.weights -= OUTER.lr * (mean + OUTER.momentum * self.momentum)
        self.round += 1

    def full(self, *more: np.ndarray) -> None:
        """A round of all learners, and of further moves."""
        self.close(*(self.push(rank) for rank in range(LEARNERS)), *more)

    def check(self) -> RoundProof:
        weights = self.weights.astype(np.float32)
        return round_proof.check(self.paths, [weights], OUTER)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path)


def test_how_far_a_mean_moves_the_weights_follows_torch_s_nesterov_momentum() -> None:
    assert Outer(0.5, 0.0).moved(7) == 0.5
    assert OUTER.moved(0) == pytest.approx(0.7 * 1.9)
    assert OUTER.moved(1) == pytest.approx(0.7 * (1 + 0.9 + 0.81))
    assert OUTER.moved(10_000) == pytest.approx(0.7 / (1 - 0.9))


def test_moves_on_time_late_repeated_and_of_killed_learners_are_exact(shard: Shard) -> None:
    shard.full()
    late = shard.push(2, step=1, version=2)
    shard.close(shard.push(0), shard.push(1))
    shard.full(late)
    shard.close(shard.push(0), shard.push(1), shard.push(2, version=-1))
    shard.push(1, version=-2)  # Its learner was killed before it left.
    shard.full(shard.push(2, version=-2))  # This one had left.
    shard.full()
    found = shard.check()
    assert found.is_exact, found.told
    assert (found.rounds, found.acknowledged, found.late) == (6, 18, 1)
    assert (found.open_in, found.open_out, found.partial) == (1, 1, 0)
    assert len(found.counted) == 19


def test_an_acknowledged_move_that_is_not_in_the_weights_is_lost(shard: Shard) -> None:
    shard.full()
    shard.push(2)
    shard.close(shard.push(0), shard.push(1))
    shard.full()
    found = shard.check()
    assert (found.lost, found.double) == (1, 0)


def test_a_round_that_a_shard_has_forgotten_is_lost(shard: Shard) -> None:
    shard.full()
    for rank in range(LEARNERS):
        shard.push(rank)
    shard.round += 1
    shard.full()
    assert shard.check().lost == LEARNERS


def test_a_repeated_move_that_is_nowhere_is_lost(shard: Shard) -> None:
    shard.push(2, version=-1)
    shard.close(shard.push(0), shard.push(1))
    assert shard.check().lost == 1


def test_a_move_twice_in_a_round_is_double(shard: Shard) -> None:
    shard.full()
    first = shard.push(0)
    shard.close(first, first, shard.push(1), shard.push(2))
    shard.full()
    found = shard.check()
    assert (found.lost, found.double) == (0, 1), found.told


def test_a_move_in_two_rounds_is_double(shard: Shard) -> None:
    first = shard.push(0)
    shard.close(first, shard.push(1), shard.push(2))
    shard.full(first)
    assert shard.check().double > 0


def test_a_move_that_nobody_sent_is_double(shard: Shard) -> None:
    foreign = np.zeros(NUMEL)
    foreign[elements(NUMEL, LEARNERS, 1, 9)] = UNIT
    shard.full(foreign)
    shard.full()
    assert shard.check().double > 0


def test_a_round_with_a_move_too_many_is_not_exact(shard: Shard) -> None:
    shard.full(np.zeros(NUMEL))
    shard.full()
    assert shard.check().double == 1


def test_a_move_in_one_half_of_the_slice_is_torn(shard: Shard) -> None:
    shard.full()
    shard.weights[0] = 0.0
    assert shard.check().torn == 1


def test_a_move_in_one_slice_only_is_partial(tmp_path: Path) -> None:
    book = RoundNotebook(tmp_path / "0.moves", 0, 1, [Part(0, 8), Part(0, 8)])
    ledger = [np.zeros(8), np.zeros(8)]
    for index in range(2):
        book.note(SENT, index, 0, 0)
        book.note(ACKNOWLEDGED, index, 0, 0, 0)
        ledger[index][elements(8, 1, 0, 0)] = -OUTER.moved(1)
        book.note(SENT, index, 1, 1)
    book.note(SENT, 0, 2, 1)
    book.note(ACKNOWLEDGED, 0, 2, 1, 1)
    book.note(SENT, 1, 2, 1)
    book.note(ACKNOWLEDGED, 1, 2, 1, 1)
    ledger[0][elements(8, 1, 0, 1)] = -OUTER.moved(0) / 2
    ledger[0][elements(8, 1, 0, 2)] = -OUTER.moved(0) / 2
    ledger[1][elements(8, 1, 0, 2)] = -OUTER.moved(0)
    found = round_proof.check([tmp_path / "0.moves"], ledger, OUTER)
    assert found.is_exact, found.told
    assert (found.partial, len(found.counted)) == (1, 2)


def test_the_ledger_has_a_part_with_room_in_every_slice() -> None:
    setup = Setup(seconds=30.0)
    numel, parts = setup.ledger()
    assert sum(part.numel for part in parts) == numel
    assert len(parts) >= setup.shards
    needed = 2 * setup.learners * 30  # Two halves, a round a second.
    assert min(part.numel for part in parts) >= needed


def test_a_ledger_without_room_is_refused(tmp_path: Path) -> None:
    book = RoundNotebook(tmp_path / "0.moves", 0, 1, [Part(0, 4)])
    with pytest.raises(ValueError, match="no room for 3 moves in a ledger of 4 elements"):
        book.mark(0, 2, np.zeros(4))
