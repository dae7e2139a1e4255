"""The proof of the kill loop: it finds each push that is lost, counted twice or torn."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.survival import proof
from benchmarks.survival.proof import ACKNOWLEDGED, REFUSED, SENT, UNIT, Notebook, num_slices_of
from pscore.pb.ps.v1 import data_pb2

NUMEL, WORKERS = 64, 2


class Books:
    """Two workers' files, and the weights of one slice."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{rank}.book" for rank in range(WORKERS)]
        self.books = [
            Notebook(path, rank, WORKERS, by_step=False) for rank, path in enumerate(self.paths)
        ]
        self.weights = np.zeros(NUMEL, np.float32)

    def push(self, rank: int, ticket: int, *kinds: int, times: int = 1, value: float = 1.0) -> None:
        for kind in (SENT, *kinds):
            self.books[rank].note(kind, 0, ticket, ticket)
        self.weights[proof.elements(NUMEL, WORKERS, rank, ticket)] += times * value

    def cut(self, loaded: np.ndarray) -> proof.Era:
        """Ends an era: the weights go back to those of a checkpoint."""
        self.weights = loaded.copy()
        ends = [path.stat().st_size for path in self.paths]
        return proof.Era(ends=ends, loaded=[loaded.copy()])

    def check(self, *eras: proof.Era, by_step: bool = False) -> proof.Proof:
        return proof.check(self.paths, [self.weights], by_step=by_step, eras=eras)


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def test_pushes_that_are_acknowledged_and_present_once_are_exact(books: Books) -> None:
    books.push(0, 0, ACKNOWLEDGED)
    books.push(1, 0, ACKNOWLEDGED)
    books.push(0, 1)
    books.push(1, 1, times=0)
    found = books.check()
    assert found.is_exact
    assert (found.pushes, found.open_in, found.open_out) == (2, 1, 1)


@pytest.mark.parametrize(
    ("kinds", "times", "lost", "double"),
    [((ACKNOWLEDGED,), 0, 1, 0), ((ACKNOWLEDGED,), 2, 0, 1), ((), 2, 0, 1), ((), 3, 0, 2)],
)
def test_lost_and_double_pushes_are_found(
    books: Books, kinds: tuple[int, ...], times: int, lost: int, double: int
) -> None:
    books.push(0, 0, ACKNOWLEDGED)
    books.push(0, 3, *kinds, times=times)
    found = books.check()
    assert (found.lost, found.double, found.torn) == (lost, double, 0)
    assert "ticket 3 of worker 0" in found.told[0]


def test_a_push_that_is_in_one_half_only_is_found(books: Books) -> None:
    books.push(1, 2, ACKNOWLEDGED)
    books.weights[proof.elements(NUMEL, WORKERS, 1, 2)[1]] = 0.0
    assert books.check().torn == 1


def test_values_that_were_never_sent_are_found(books: Books) -> None:
    books.weights[proof.elements(NUMEL, WORKERS, 1, 9)] = 1.0
    assert books.check().double == 1
    assert books.check(by_step=True).double == 1


def test_shares_of_a_step_are_exact(books: Books) -> None:
    books.push(0, 0, ACKNOWLEDGED, value=UNIT / 2)
    books.push(1, 0, ACKNOWLEDGED, value=UNIT / 2)
    books.push(0, 1, ACKNOWLEDGED, value=UNIT)
    books.push(1, 1, REFUSED, times=0)
    books.push(1, 2)
    books.weights[proof.elements(NUMEL, WORKERS, 1, 2)] = UNIT
    found = books.check(by_step=True)
    assert found.is_exact, found.told
    assert (found.pushes, found.open_in) == (3, 1)


@pytest.mark.parametrize(
    ("first", "second", "lost", "double"),
    [
        (0.0, UNIT, 1, 0),  # The step closed without one that was acknowledged.
        (UNIT, UNIT, 0, 2),  # Two updates of one step.
        (2 * UNIT / 3, UNIT / 3, 0, 2),  # One of them twice in the sum.
        (0.0, 0.0, 2, 0),
    ],
)
def test_shares_that_are_wrong_are_found(
    books: Books, first: float, second: float, lost: int, double: int
) -> None:
    books.push(0, 0, ACKNOWLEDGED, value=first)
    books.push(1, 0, ACKNOWLEDGED, value=second)
    found = books.check(by_step=True)
    assert (found.lost, found.double) == (lost, double)


def test_a_worker_that_comes_back_continues_in_its_book(tmp_path: Path) -> None:
    path = tmp_path / "0.book"
    futures: list[Future[data_pb2.PushReply]] = []

    def push(index: int, push: object, grad: object) -> None:
        futures.append(Future())
        exchange._pushes[index] = futures[-1]

    layout = SimpleNamespace(slices=[None])
    exchange = SimpleNamespace(push=push, _pushes={}, layout=layout)
    grads = []
    for life in range(2):
        exchange.push = push
        Notebook(path, 0, WORKERS, by_step=False).attach(exchange)
        assert num_slices_of(path.parent).read_text() == "1"
        grads.append(np.zeros(NUMEL, np.float32))
        exchange.push(0, SimpleNamespace(step=life), grads[-1])
        with path.open("ab") as file:
            file.write(b"half of an entry"[: 5 * (1 - life)])
    assert not (grads[0] * grads[1]).any()  # Elements of their own.
    verdict = data_pb2.VERDICT_TOO_LATE
    futures[0].set_exception(OSError())
    futures[1].set_result(data_pb2.PushReply(verdict=verdict))
    assert [entry.kind for entry in proof.read(path)] == [SENT, SENT, REFUSED]


def test_pushes_after_the_checkpoint_of_a_power_cut_are_rolled_back_and_not_lost(
    books: Books,
) -> None:
    books.push(0, 0, ACKNOWLEDGED)
    books.push(1, 0, ACKNOWLEDGED)
    checkpoint = books.weights.copy()
    books.push(0, 1, ACKNOWLEDGED)
    books.push(0, 2, ACKNOWLEDGED)
    era = books.cut(checkpoint)
    books.push(0, 3, ACKNOWLEDGED)
    found = books.check(era)
    assert found.is_exact, found.told
    assert (found.pushes, found.rolled_back) == (5, 2)


def test_a_checkpoint_that_misses_a_push_from_the_middle_has_lost_it(books: Books) -> None:
    for ticket in range(3):
        books.push(0, ticket, ACKNOWLEDGED)
    books.weights[proof.elements(NUMEL, WORKERS, 0, 1)] = 0.0
    found = books.check(books.cut(books.weights))
    assert (found.lost, found.rolled_back) == (1, 0)


def test_pushes_lost_in_a_power_cut_and_later_ones_are_distinguished(books: Books) -> None:
    books.push(0, 0, ACKNOWLEDGED)
    checkpoint = books.weights.copy()
    books.push(0, 1, ACKNOWLEDGED)
    era = books.cut(checkpoint)
    books.weights[proof.elements(NUMEL, WORKERS, 0, 1)] = 1.0  # Comes back from nowhere.
    assert books.check(era).double == 1


def test_a_cut_takes_the_newest_steps_of_a_mode_by_step(books: Books) -> None:
    for ticket in range(2):
        books.push(0, ticket, ACKNOWLEDGED, value=UNIT / 2)
        books.push(1, ticket, ACKNOWLEDGED, value=UNIT / 2)
    checkpoint = books.weights.copy()
    books.push(0, 2, ACKNOWLEDGED, value=UNIT)
    found = books.check(books.cut(checkpoint), by_step=True)
    assert found.is_exact, found.told
    assert found.rolled_back == 1
    checkpoint[proof.elements(NUMEL, WORKERS, 1, 0)] = 0.0
    assert books.check(books.cut(checkpoint), by_step=True).lost == 1


@pytest.mark.parametrize(
    ("second", "kinds", "partial"), [(UNIT, (ACKNOWLEDGED,), 0), (0.0, (REFUSED,), 1), (0.0, (), 0)]
)
def test_a_step_that_is_in_one_slice_and_not_in_another_is_found(
    tmp_path: Path, second: float, kinds: tuple[int, ...], partial: int
) -> None:
    book = Notebook(tmp_path / "0.book", 0, 1, by_step=True)
    weights = [np.zeros(NUMEL, np.float32) for _ in range(2)]
    for index, (value, answers) in enumerate([(UNIT, (ACKNOWLEDGED,)), (second, kinds)]):
        for kind in (SENT, *answers):
            book.note(kind, index, 0, 0)
        weights[index][proof.elements(NUMEL, 1, 0, 0)] = value
    found = proof.check([tmp_path / "0.book"], weights, by_step=True)
    assert (found.partial, found.lost, found.double) == (partial, 0, 0)
