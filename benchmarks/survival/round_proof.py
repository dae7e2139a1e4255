"""To the unit, for rounds with a quorum and momentum: which moves the weights hold, how often.

The model has a parameter that no loss depends on, the ledger. Every move of a learner gets a ticket
in each slice: two elements of the ledger, one in each half of the slice's part, that no other move
touches. There its move is UNIT, elsewhere in the ledger it is zero. A learner writes down each
ticket before it is sent, and again with the answer, which names the version of the slice, and so
the round that the move has entered.

A round of k moves, of equal weight each, moves the elements of each of them by UNIT / k, and
momentum m repeats that: with the outer rate lr and torch's Nesterov momentum the weights have moved

    c(j) * UNIT / k,     c(j) = lr * (1 + m * sum_{i <= j} m^i)

when j more rounds have closed. So the weights of all tickets of a round say how many moves are in
its mean. An acknowledged move must be in the round that its answer names, once; one that was never
acknowledged at most once, in a later round or none; and all moves together must be the k of each
round. A move that was counted in two rounds, or twice in one, does not fit its round, and one that
nobody sent leaves a seat in a round empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.survival.proof import (
    ACKNOWLEDGED,
    COPIES,
    REFUSED,
    SENT,
    Entry,
    Notebook,
    elements,
    read,
)
from pscore.partition import Layout

LEDGER = "ledger"
UNIT = 1.0
NEAR = 0.01  # Part by which the weight of a move may differ: rounding of many float32 steps.


class Part(NamedTuple):
    """The part of the ledger that lies in a slice, in elements from the slice's start."""

    start: int
    numel: int


class Outer(NamedTuple):
    """The outer optimizer."""

    lr: float
    momentum: float

    def moved(self, later: int) -> float:
        """Returns c: how far a mean of 1 has moved the weights when more rounds have closed."""
        m = self.momentum
        return self.lr * (1.0 + m * sum(m**i for i in range(min(later, 2000) + 1)))


def parts(layout: Layout) -> list[Part]:
    """Returns the part of the ledger in each slice.

    Raises:
        ValueError: A slice has none, and could not be proved.
    """
    index = next(i for i, tensor in enumerate(layout.tensors) if tensor.name == LEDGER)
    begin, end = layout.offsets[index], layout.offsets[index] + layout.tensors[index].numel
    found = []
    for spec in layout.slices:
        start, stop = max(begin, spec.start), min(end, spec.stop)
        if stop <= start:
            raise ValueError(f"slice {spec.index} has no part of the ledger: make it longer")
        found.append(Part(start - spec.start, stop - start))
    return found


def cut(ledger: np.ndarray, lengths: Sequence[Part]) -> list[np.ndarray]:
    """Returns the ledger's elements by slice."""
    return np.split(ledger, np.cumsum([part.numel for part in lengths])[:-1])


class RoundNotebook(Notebook):
    """A learner's file: a move has the same ticket in all slices."""

    def __init__(self, path: Path, rank: int, num_learners: int, ledger: Sequence[Part]) -> None:
        """Continues the file of a killed process.

        Args:
            path: The file.
            rank: Rank of the learner.
            num_learners: Learners of the job.
            ledger: The part of the ledger in each slice.
        """
        super().__init__(path, rank, num_learners, by_step=True)
        self._ledger = ledger
        first = max(self._next.values(), default=0)
        self._next = dict.fromkeys(range(len(ledger)), first)

    def mark(self, index: int, ticket: int, grad: Any) -> None:
        start, numel = self._ledger[index]
        if ticket >= numel // COPIES // self._num_workers:
            raise ValueError(f"no room for {ticket + 1} moves in a ledger of {numel} elements")
        own = grad[start : start + numel]
        own[:] = 0.0
        for element in elements(numel, self._num_workers, self._rank, ticket):
            own[element] = UNIT


Move = tuple[int, int]  # Learner and ticket.


@dataclass(slots=True)
class RoundProof:
    """The account of all moves that the weights give; counted by slice."""

    rounds: int = 0  # Rounds of a slice that have closed.
    acknowledged: int = 0  # Moves.
    late: int = 0  # Of these, those that entered a later round than theirs.
    lost: int = 0  # Acknowledged, and not in the round that the answer names.
    double: int = 0  # In the weights, and more often than sent, or by nobody.
    torn: int = 0  # In one half of the slice and not, or differently, in the other.
    open_in: int = 0  # Never acknowledged, and in the weights: their learner or shard had died.
    open_out: int = 0  # Never acknowledged, and not in the weights.
    partial: int = 0  # Moves in some slices only: their learner was killed while it sent them.
    skipped: int = 0  # Rounds without an acknowledged move: a slice went on to that of the others.
    counted: list[tuple[float, int]] = field(default_factory=list)  # Whole moves: time and learner.
    told: list[str] = field(default_factory=list)  # The first few findings, in words.

    @property
    def is_exact(self) -> bool:
        """Whether nothing was lost, counted twice or torn."""
        return self.lost == self.double == self.torn == 0

    def say(self, text: str) -> None:
        """Keeps a finding, if there are not many yet."""
        if len(self.told) < 8:
            self.told.append(text)


def check(books: Sequence[Path], ledger: Sequence[np.ndarray], outer: Outer) -> RoundProof:
    """Compares the learners' files with the ledger's part in each slice, which began with zeros."""
    proof = RoundProof()
    entries = [list(read(path)) for path in books]
    inside: list[set[Move]] = []
    for index, weights in enumerate(ledger):
        of_slice = [[entry for entry in book if entry.slice == index] for book in entries]
        inside.append(_check_slice(proof, index, of_slice, weights.astype(np.float64), outer))
    whole = set.intersection(*inside)
    proof.partial = len(set.union(*inside) - whole)
    times = {(rank, e.ticket): e.time_s for rank, book in enumerate(entries) for e in book}
    proof.counted = sorted((times[move], move[0]) for move in whole)
    return proof


def _check_slice(
    proof: RoundProof,
    index: int,
    books: Sequence[Sequence[Entry]],
    weights: np.ndarray,
    outer: Outer,
) -> set[Move]:
    """Compares the records of one slice with its weights; returns the moves that are in."""
    grid = _grid(proof, index, weights, len(books))
    sent: dict[Move, int] = {}
    answers: dict[Move, Entry] = {}
    for rank, entries in enumerate(books):
        for entry in entries:
            if entry.kind == SENT:
                sent[rank, entry.ticket] = entry.step
            else:
                answers[rank, entry.ticket] = entry
    rounds: dict[int, list[Move]] = {}
    for move, answer in answers.items():
        if answer.kind == ACKNOWLEDGED:
            proof.acknowledged += 1
            proof.late += answer.version > answer.step
            if answer.version >= 0:
                rounds.setdefault(max(answer.step, answer.version), []).append(move)
    last = max(rounds, default=-1)
    proof.rounds += last + 1
    shares = {r: grid / (UNIT * outer.moved(last - r)) for r in rounds}
    inside: set[Move] = set()
    seats = {}
    for number, moves in rounds.items():
        values = {move: float(shares[number][move]) for move in moves}
        seats[number] = _seats(proof, (index, number), values, inside)
    others = set(sent) - {move for moves in rounds.values() for move in moves}
    _place(proof, index, {m: (sent[m], answers.get(m)) for m in others}, shares, seats, inside)
    _check_rest(proof, index, grid, sent, seats)
    return inside


def _grid(proof: RoundProof, index: int, weights: np.ndarray, learners: int) -> np.ndarray:
    """Returns how far each ticket's weights have moved, `(learners, room)`."""
    room = len(weights) // COPIES // learners
    grid = -weights[: COPIES * learners * room].reshape(COPIES, learners, room)
    torn = np.abs(grid - grid[0]).max(axis=0) > NEAR * np.abs(grid[0]) + 1e-6
    proof.torn += int(torn.sum())
    for rank, ticket in np.argwhere(torn)[:4]:
        values = grid[:, rank, ticket].tolist()
        proof.say(f"slice {index}: ticket {ticket} of learner {rank} is torn: {values}")
    first: np.ndarray = grid[0]
    return first


def _seats(
    proof: RoundProof, where: tuple[int, int], values: Mapping[Move, float], inside: set[Move]
) -> list[int]:
    """Compares the moves of a round with each other; returns k, and the seats that they leave."""
    found = [value for value in values.values() if value > 0.0]
    if not found:
        proof.lost += len(values)
        proof.say(f"slice {where[0]}: round {where[1]} is not in the weights")
        return [0, 0]
    k = round(1.0 / float(np.median(found)))
    left = k
    for move, value in values.items():
        times = round(value * k)
        fits = abs(value * k - times) <= NEAR
        left -= times
        inside |= {move} if times else set()
        if not fits or times != 1:
            proof.lost += times < 1
            proof.double += times >= 1
            proof.say(f"slice {where[0]}: {move} is {value * k:.3f} times in round {where[1]}")
    return [k, left]


def _place(
    proof: RoundProof,
    index: int,
    moves: Mapping[Move, tuple[int, Entry | None]],
    shares: Mapping[int, np.ndarray],
    seats: dict[int, list[int]],
    inside: set[Move],
) -> None:
    """Finds the round of each move of which no answer names it."""
    for move, (step, answer) in sorted(moves.items(), key=lambda item: item[1][0]):
        at = next(
            (
                number
                for number in sorted(seats)
                if number >= step
                and seats[number][1] > 0
                and abs(float(shares[number][move]) * seats[number][0] - 1.0) <= NEAR
            ),
            None,
        )
        if at is not None:
            seats[at][1] -= 1
            inside.add(move)
        is_empty = not any(share[move] for share in shares.values())
        is_acknowledged = answer is not None and answer.kind == ACKNOWLEDGED
        is_refused = answer is not None and answer.kind == REFUSED
        proof.open_in += at is not None and answer is None
        proof.open_out += is_empty and answer is None
        proof.lost += is_empty and is_acknowledged
        proof.double += (at is None or is_refused) and not is_empty
        if at is None and (is_acknowledged or not is_empty):
            proof.say(f"slice {index}: {move} of step {step} fits no round")


def _check_rest(
    proof: RoundProof,
    index: int,
    grid: np.ndarray,
    sent: Mapping[Move, int],
    seats: Mapping[int, Sequence[int]],
) -> None:
    """Every seat is taken, and no ticket moved that was never sent."""
    left = grid.copy()
    for move in sent:
        left[move] = 0.0
    unknown = int((left != 0.0).sum())
    empty = sum(abs(free) for _, free in seats.values())
    proof.double += unknown + empty
    proof.skipped += len(set(range(max(seats, default=-1) + 1)) - set(seats))
    if unknown or empty:
        proof.say(
            f"slice {index}: {unknown} tickets moved that were never sent, {empty} moves in means "
            f"are nobody's"
        )
