"""To the unit: which pushes a worker has sent, which were acknowledged, and which the weights hold.

Every push of a slice gets a ticket of its own: two elements of the slice, one in each half, that no
other push touches. Its gradient is zero but there. A worker writes down each ticket before it is
sent and again when the acknowledgement has come, into a file that outlives the process. In the end
the weights say of each ticket how often it was added: an acknowledged one must be there once, one
that was sent and not acknowledged at most once, and both halves must agree.

In an asynchronous mode a push adds 1. In `ssgd` the n pushes of a step make one update, their mean:
each adds UNIT / n, so the n of a step must be equal and their sum UNIT. A step that a worker has
sent whole, and of which every push was answered, is in all slices or in none.

After a power cut the shards continue from a checkpoint, which is older than the newest pushes. The
books are then checked in two parts: up to the cut against the weights that were loaded, where the
newest pushes may be missing, but none from the middle and none from some slices only; and behind
the cut with the additions since.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RECORD = struct.Struct("<BxHIQqd")
SENT, ACKNOWLEDGED, REFUSED = 0, 1, 2  # REFUSED: answered, and not counted: it was too late.
COPIES = 2
UNIT = 5040.0  # Divided by every number of workers up to ten it is a whole number.
NEAR = 0.25


class Entry(NamedTuple):
    """A worker's record of one push."""

    kind: int
    slice: int
    ticket: int
    step: int  # On the wire.
    version: int  # Of the slice when the push was counted; -1: not known.
    time_s: float  # Of the machine's monotonic clock.


def read(path: Path, offset: int = 0, end: int | None = None) -> Iterator[Entry]:
    """Reads the entries from byte `offset` to `end`; half a record at the end is left out."""
    if path.exists():
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(-1 if end is None else end - offset)
        whole = len(data) - len(data) % RECORD.size
        yield from map(Entry._make, RECORD.iter_unpack(data[:whole]))


def elements(numel: int, num_workers: int, rank: int, ticket: int) -> list[int]:
    """Returns where a ticket lies in its slice; tickets beyond the room start over."""
    room = numel // COPIES // num_workers
    return [(copy * num_workers + rank) * room + ticket % room for copy in range(COPIES)]


def num_slices_of(folder: Path) -> Path:
    """Returns the file in which the workers note the number of slices."""
    return folder / "num_slices"


class Notebook:
    """One worker's file: its pushes and their answers; continues the file of a killed process.

    The file is not synced: it has to outlive the process, not the machine.
    """

    def __init__(self, path: Path, rank: int, num_workers: int, *, by_step: bool) -> None:
        self._next: dict[int, int] = {}
        for entry in read(path):
            self._next[entry.slice] = max(self._next.get(entry.slice, 0), entry.ticket + 1)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        whole = os.fstat(self._fd).st_size // RECORD.size * RECORD.size
        os.ftruncate(self._fd, whole)
        self._path, self._rank, self._num_workers = path, rank, num_workers
        self._value = -UNIT if by_step else -1.0

    def attach(self, exchange: Any) -> None:
        """Puts a ticket into each push of an `Exchange` from now on; notes how many slices it has.

        A job's first worker chooses their length, by whether it shares memory with the shards.
        """
        push_plain = exchange.push
        draft = self._path.with_suffix(".draft")
        draft.write_text(str(len(exchange.layout.slices)))
        draft.rename(num_slices_of(self._path.parent))

        def push(index: int, push: Any, grad: Any, **options: Any) -> None:
            ticket = self._next.get(index, 0)
            self._next[index] = ticket + 1
            self.mark(index, ticket, grad)
            self.note(SENT, index, ticket, push.step)
            push_plain(index, push, grad, **options)
            done = exchange._pushes[index]  # Where the acknowledgement will be.
            done.add_done_callback(lambda future: self._answered(future, index, ticket, push.step))

        exchange.push = push

    def note(self, kind: int, index: int, ticket: int, step: int, version: int = -1) -> None:
        """Writes one entry down, in one call: a process that is killed has written it or not."""
        os.write(self._fd, RECORD.pack(kind, index, ticket, step, version, time.monotonic()))

    def mark(self, index: int, ticket: int, grad: Any) -> None:
        """Puts a ticket into the gradient of a slice."""
        for element in elements(len(grad), self._num_workers, self._rank, ticket):
            grad[element] = self._value

    def _answered(self, future: Future[Any], index: int, ticket: int, step: int) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        from pscore.pb.ps.v1 import data_pb2

        reply = future.result()
        is_late = reply.verdict == data_pb2.Verdict.VERDICT_TOO_LATE
        is_first = reply.verdict == data_pb2.Verdict.VERDICT_ACCEPTED
        kind = REFUSED if is_late else ACKNOWLEDGED
        self.note(kind, index, ticket, step, reply.version if is_first else -1)


@dataclass(slots=True)
class Proof:
    """The account of all pushes that the weights give."""

    pushes: int = 0  # Acknowledged, counted by slice.
    lost: int = 0  # Acknowledged, and not in the weights.
    double: int = 0  # More often in the weights than they were sent.
    torn: int = 0  # In one half of the slice and not, or differently, in the other.
    partial: int = 0  # Steps of a worker in some slices and not in others, all of them answered.
    open_in: int = 0  # Never acknowledged, and in the weights: their worker or shard had died.
    open_out: int = 0  # Never acknowledged, and not in the weights.
    rolled_back: int = 0  # Acknowledged after the checkpoint that a power cut went back to.
    told: list[str] = field(default_factory=list)  # The first few findings, in words.

    @property
    def is_exact(self) -> bool:
        """Whether nothing was lost, counted twice, torn or counted in part."""
        return self.lost == self.double == self.torn == self.partial == 0

    def say(self, text: str) -> None:
        """Keeps a finding, if there are not many yet."""
        if len(self.told) < 8:
            self.told.append(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """A stretch of the books that ends with a power cut."""

    ends: list[int]  # Byte of each worker's book up to which it reaches.
    loaded: list[np.ndarray]  # Weights of each slice with which the shards came back.


def check(
    books: Sequence[Path], slices: Sequence[np.ndarray], *, by_step: bool, eras: Sequence[Era] = ()
) -> Proof:
    """Compares the workers' files with the weights of each slice, which began with zeros."""
    proof = Proof()
    begins, base = [0] * len(books), [np.zeros_like(weights) for weights in slices]
    for era in eras:
        parts = zip(books, begins, era.ends, strict=True)
        entries = [list(read(path, begin, end)) for path, begin, end in parts]
        _check_era(proof, entries, base, era.loaded, by_step=by_step, is_cut=True)
        begins, base = era.ends, era.loaded
    entries = [list(read(path, begin)) for path, begin in zip(books, begins, strict=True)]
    _check_era(proof, entries, base, slices, by_step=by_step, is_cut=False)
    return proof


def _check_era(
    proof: Proof,
    books: Sequence[Sequence[Entry]],
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    *,
    by_step: bool,
    is_cut: bool,
) -> None:
    """Compares the records of one period with the weights' gain in it."""
    counted: dict[Push, bool] = {}
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        entries = [[entry for entry in book if entry.slice == index] for book in books]
        room = len(new) // COPIES // len(books)
        grid = (new.astype(np.float64) - old)[: COPIES * len(books) * room]
        grid = grid.reshape(COPIES, len(books), room)
        differs = np.abs(grid - grid[0]).max(axis=0) > 1e-3
        proof.torn += int(differs.sum())
        for rank, ticket in np.argwhere(differs)[:4]:
            values = grid[:, rank, ticket].tolist()
            proof.say(f"slice {index}: ticket {ticket} of worker {rank} is torn: {values}")
        if by_step:
            _check_steps(proof, index, entries, grid[0], counted, is_cut=is_cut)
        else:
            _check_units(proof, index, entries, grid[0], is_cut=is_cut)
    if by_step:
        _check_whole(proof, books, counted, range(len(after)))


def _check_units(
    proof: Proof, index: int, books: Sequence[Sequence[Entry]], found: np.ndarray, *, is_cut: bool
) -> None:
    """An asynchronous mode: the weights hold how often each ticket was added."""
    for rank, entries in enumerate(books):
        sent, answered = np.zeros(found.shape[1], int), np.zeros(found.shape[1], int)
        for entry in entries:
            if entry.kind == SENT:
                sent[entry.ticket % len(sent)] += 1
            elif entry.kind == ACKNOWLEDGED:
                answered[entry.ticket % len(sent)] += 1
        counts = np.rint(found[rank]).astype(int)
        proof.torn += int((np.abs(found[rank] - counts) > 1e-3).sum())
        missing, double = np.maximum(answered - counts, 0), np.maximum(counts - sent, 0)
        lost = _lost_before_the_last(entries, counts) if is_cut else missing
        proof.rolled_back += int((missing - lost).sum())
        proof.pushes += int(answered.sum())
        proof.lost += int(lost.sum())
        proof.double += int(double.sum())
        proof.open_in += int(np.maximum(np.minimum(counts, sent) - answered, 0).sum())
        proof.open_out += int(np.maximum(sent - np.maximum(counts, answered), 0).sum())
        for ticket in np.flatnonzero(lost + double)[:4]:
            proof.say(
                f"slice {index}: ticket {ticket} of worker {rank} was sent {sent[ticket]} and "
                f"acknowledged {answered[ticket]} times, the weights hold {counts[ticket]}"
            )


def _lost_before_the_last(entries: Sequence[Entry], counts: np.ndarray) -> np.ndarray:
    """Counts by room the acknowledged tickets that are missing although a later one is there."""
    room, lost = len(counts), np.zeros(len(counts), int)
    acknowledged = {entry.ticket for entry in entries if entry.kind == ACKNOWLEDGED}
    sent: dict[int, list[int]] = {}
    for entry in entries:
        if entry.kind == SENT:
            sent.setdefault(entry.ticket % room, []).append(entry.ticket)
    last = max(
        (tickets[: counts[at]][-1] for at, tickets in sent.items() if counts[at] > 0), default=-1
    )
    for at, tickets in sent.items():
        missing = acknowledged.intersection(tickets[max(0, counts[at]) :])
        lost[at] = sum(ticket < last for ticket in missing)
    return lost


Ticket = tuple[int, int]  # Worker and number.
Push = tuple[int, int, int]  # Slice, worker and ticket.


def _check_steps(
    proof: Proof,
    index: int,
    books: Sequence[Sequence[Entry]],
    found: np.ndarray,
    counted: dict[Push, bool],
    *,
    is_cut: bool,
) -> None:
    """A mode by step: the pushes of one step are equal shares of one unit, or not there."""
    steps: dict[int, list[Ticket]] = {}
    answers: dict[Ticket, int] = {}
    for rank, entries in enumerate(books):
        for entry in entries:
            if entry.kind != SENT:
                answers[rank, entry.ticket] = entry.kind
            elif entry.ticket < found.shape[1]:
                steps.setdefault(entry.step, []).append((rank, entry.ticket))
            else:
                raise ValueError(f"no room for {entry.ticket} pushes: raise --numel")
    proof.pushes += sum(kind == ACKNOWLEDGED for kind in answers.values())
    last = max(
        (step for step, tickets in steps.items() if any(abs(found[t]) > NEAR for t in tickets)),
        default=-1,
    )
    for step, tickets in steps.items():
        inside = [ticket for ticket in tickets if abs(found[ticket]) > NEAR]
        for ticket in tickets:
            counted[(index, *ticket)] = ticket in inside
            if is_cut and step > last and answers.get(ticket) == ACKNOWLEDGED:
                proof.rolled_back += 1
                continue
            _check_ticket(proof, (index, *ticket), answers.get(ticket), is_in=ticket in inside)
        _check_shares(proof, index, step, [float(found[ticket]) for ticket in inside])
    left = found.copy()
    for ticket in itertools.chain(*steps.values()):
        left[ticket] = 0.0
    unknown = int((np.abs(left) > NEAR).sum())
    proof.double += unknown
    if unknown:
        proof.say(f"slice {index}: {unknown} elements hold what nobody sent")


def _check_shares(proof: Proof, index: int, step: int, values: Sequence[float]) -> None:
    """The pushes of one step that are in the weights are equal shares of UNIT."""
    wrong = sum(abs(value * len(values) - UNIT) > len(values) for value in values)
    proof.double += wrong
    if wrong:
        proof.say(f"slice {index}: step {step} holds {values}, not shares of {UNIT:g}")


def _check_ticket(
    proof: Proof, name: tuple[int, int, int], answer: int | None, *, is_in: bool
) -> None:
    """Compares the answer to one push with whether it is in the weights."""
    if answer is None:
        proof.open_in += is_in
        proof.open_out += not is_in
    elif is_in != (answer == ACKNOWLEDGED):
        proof.lost += not is_in
        proof.double += is_in
        told = "refused, and counted" if is_in else "acknowledged, and is lost"
        proof.say(f"slice {name[0]}: ticket {name[2]} of worker {name[1]} was {told}")


def _check_whole(
    proof: Proof,
    books: Sequence[Sequence[Entry]],
    counted: Mapping[Push, bool],
    slices: Iterable[int],
) -> None:
    """Each step that a worker sent whole, and had answered whole, is in all slices or in none.

    A worker that was killed within a step begins it anew with other tickets: of each slice the last
    ticket of a step is looked at.
    """
    for rank, entries in enumerate(books):
        tickets: dict[int, dict[int, int]] = {}  # By step and slice.
        answered: set[tuple[int, int]] = set()
        for entry in entries:
            if entry.kind == SENT:
                tickets.setdefault(entry.step, {})[entry.slice] = entry.ticket
            else:
                answered.add((entry.slice, entry.ticket))
        for step, of_slice in tickets.items():
            pushes = [(index, of_slice.get(index, -1)) for index in slices]
            if not all(push in answered for push in pushes):
                continue
            inside = [index for index, ticket in pushes if counted[index, rank, ticket]]
            if 0 < len(inside) < len(pushes):
                proof.partial += 1
                proof.say(f"step {step} of worker {rank} is in slices {inside} only")
