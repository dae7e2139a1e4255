"""To the unit, for `ssgd` with momentum on the shards: which pushes the weights hold, how often.

The first elements of each slice are a ledger: each push has a ticket there (proof.py), and its
gradient is zero in the rest of the ledger. Momentum m repeats a ticket, so with the rate lr its sum
g has moved the weights by

    lr * g * (1 + m + ... + m^(k-1))

when k updates have been made from its own on. Divided by that, the ledger is one without momentum.
Every worker makes each step once, so the number of a ticket is that of its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.survival.proof import COPIES, Notebook, Proof, check
from pscore.partition import Layout

LEDGER = "ledger.npy"


class LedgerNotebook(Notebook):
    """A worker's file; its tickets lie in the ledger of each slice."""

    def __init__(self, path: Path, rank: int, num_workers: int, steps: int) -> None:
        """Begins a file, with room for so many steps."""
        super().__init__(path, rank, num_workers, by_step=True)
        self._numel = ledger_numel(num_workers, steps)

    def mark(self, index: int, ticket: int, grad: Any) -> None:
        """Puts a ticket into the gradient of a slice."""
        ledger = grad[: self._numel]
        if len(ledger) < self._numel:
            raise ValueError(f"slice {index} is shorter than its ledger of {self._numel} elements")
        ledger[:] = 0.0
        super().mark(index, ticket, ledger)


def ledger_numel(num_workers: int, steps: int) -> int:
    """Returns the elements of a ledger."""
    return COPIES * num_workers * steps


def keep_ledgers(folder: Path, layout: Layout, named: Mapping[str, Any], numel: int) -> None:
    """Writes the ledgers of all slices.

    Args:
        folder: Gets the file.
        layout: Places of the parameters and slices.
        named: The global weights of each parameter, on the CPU.
        numel: Elements of a ledger.
    """
    flat = np.zeros(layout.numel, np.float32)
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
        flat[offset : offset + tensor.numel] = named[tensor.name].detach().numpy().reshape(-1)
    np.save(folder / LEDGER, np.stack([flat[one.start :][:numel] for one in layout.slices]))


def check_ledgers(
    folder: Path, books: Sequence[Path], steps: int, lr: float, momentum: float
) -> Proof:
    """Compares the workers' files with the ledgers that `keep_ledgers` has written."""
    moved = lr * np.cumsum(momentum ** np.arange(steps, dtype=np.float64))[::-1]
    ledgers = np.load(folder / LEDGER).reshape(-1, COPIES * len(books), steps) / moved
    return check(books, [one.reshape(-1) for one in ledgers], by_step=True)
