"""Each counter of the proof for momentum notices an error that is planted into the updates."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.survival.momentum_proof import (
    LedgerNotebook,
    check_ledgers,
    keep_ledgers,
    ledger_numel,
)
from benchmarks.survival.proof import ACKNOWLEDGED, SENT, Proof
from pscore.partition import make_layout
from pscore.types import TensorSpec

WORKERS, STEPS, NUMEL = 2, 30, 5000
LR, MOMENTUM = 0.1, 0.9
NAMES = ("first", "last")
Plant = Callable[[int, int, list[np.ndarray]], list[np.ndarray]]


def train(folder: Path, plant: Plant, *, loses_momentum: bool = False) -> Proof:
    """Trains with torch's optimizer.

    Args:
        plant: Gets number of a step, a slice, and the gradients of the workers; returns those that
            are added.
        loses_momentum: Whether momentum is lost in the middle.
    """
    specs = [TensorSpec(name=name, shape=(NUMEL,), dtype="float32") for name in NAMES]
    layout = make_layout(specs, num_shards=2)
    numel = ledger_numel(WORKERS, STEPS)
    paths = [folder / f"{rank}.book" for rank in range(WORKERS)]
    books = [LedgerNotebook(path, rank, WORKERS, STEPS) for rank, path in enumerate(paths)]
    flat = torch.nn.Parameter(torch.zeros(layout.numel))
    optimizer = torch.optim.SGD([flat], lr=LR, momentum=MOMENTUM)
    drawn = np.random.default_rng(0)
    for step in range(STEPS):
        flat.grad = torch.zeros_like(flat)
        for spec in layout.slices:
            grads = []
            for book in books:
                grad = drawn.normal(size=spec.stop - spec.start).astype(np.float32)
                book.note(SENT, spec.index, step, step)
                book.mark(spec.index, step, grad)
                book.note(ACKNOWLEDGED, spec.index, step, step)
                grads.append(grad)
            total = sum(plant(step, spec.index, grads)) / WORKERS
            flat.grad[spec.start : spec.stop] = torch.from_numpy(total)
        if loses_momentum and step == STEPS // 2:
            optimizer.state.clear()
        optimizer.step()
    whole = flat.detach()
    named = {
        name: whole[offset : offset + NUMEL]
        for name, offset in zip(NAMES, layout.offsets, strict=True)
    }
    keep_ledgers(folder, layout, named, numel)
    return check_ledgers(folder, paths, STEPS, LR, MOMENTUM)


def forget(step: int, index: int, grads: list[np.ndarray]) -> list[np.ndarray]:
    return [grads[0], 0 * grads[1]] if (step, index) == (7, 1) else grads


def repeat(step: int, index: int, grads: list[np.ndarray]) -> list[np.ndarray]:
    return [*grads, grads[0]] if (step, index) == (7, 0) else grads


def tear(step: int, index: int, grads: list[np.ndarray]) -> list[np.ndarray]:
    if (step, index) != (7, 0):
        return grads
    half = grads[1].copy()
    half[: ledger_numel(WORKERS, STEPS) // 2] = 0.0
    return [grads[0], half]


def test_all_pushes_are_found_once(tmp_path: Path) -> None:
    found = train(tmp_path, lambda step, index, grads: grads)
    assert found.is_exact, found.told
    assert found.pushes == WORKERS * STEPS * 2


def test_a_push_that_is_forgotten_is_lost_and_its_step_is_partial(tmp_path: Path) -> None:
    found = train(tmp_path, forget)
    assert (found.lost, found.torn, found.partial) == (1, 0, 1)


def test_a_push_that_is_added_twice_is_found(tmp_path: Path) -> None:
    found = train(tmp_path, repeat)
    assert (found.lost, found.torn, found.partial) == (0, 0, 0)
    assert found.double == 1


def test_a_push_that_is_added_in_part_is_torn(tmp_path: Path) -> None:
    assert train(tmp_path, tear).torn == 1


def test_momentum_that_is_lost_is_found(tmp_path: Path) -> None:
    assert train(tmp_path, lambda step, index, grads: grads, loses_momentum=True).double > 0


def test_a_slice_without_room_for_a_ledger_is_refused(tmp_path: Path) -> None:
    book = LedgerNotebook(tmp_path / "0.book", 0, WORKERS, STEPS)
    with pytest.raises(ValueError, match="shorter than its ledger"):
        book.mark(3, 0, np.zeros(10, np.float32))
