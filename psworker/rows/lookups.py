"""The rows that one forward pass looks up, as a small matrix that autograd sees.

The ids of a batch are reduced to the distinct ones; their rows are pulled into a matrix, a leaf of
the graph, and torch's own functions look the batch up in it. So the gradient of the matrix is that
of the rows, with the gradients of repeated ids added.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pscore.rows.batches import add_rows, distinct
from pscore.types import FloatArray, IntArray

IdArray = npt.NDArray[np.uint64]


class RowSource(Protocol):
    """The place from which rows of one table come: the shards, or the function of their start."""

    def read(self, ids: IdArray, out: FloatArray, *, is_look: bool) -> None:
        """Copies the rows of `ids` into `out`.

        Args:
            ids: `(u,) uint64`, strictly ascending.
            out: `(u, dim) float32`.
            is_look: Whether nothing is trained on them.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """


class Lookup(NamedTuple):
    """The rows that the ids of a batch need."""

    # `(u,) uint64`, strictly ascending, without the padding. The order is the same for any number
    # of shards: the bits of torch's sums depend on a row's place in memory.
    ids: IdArray
    counts: IntArray  # `(u,) int64`, the number of times that each occurs in the batch.
    rows: torch.Tensor  # `(u + 1, dim) float32`; the last row is zero, for the padding.
    places: torch.Tensor  # The row of each id of the batch, int64, in the shape of the batch.

    @property
    def padding(self) -> int:
        """The row that is zero and has no gradient."""
        return len(self.ids)


def find(
    batch: torch.Tensor, dim: int, padding: int | None, source: RowSource, *, is_look: bool
) -> Lookup:
    """Returns the rows of a batch of ids.

    Args:
        batch: Ids, int64, on the CPU; of any shape.
        padding: The id whose row is zero; None: there is none.

    Raises:
        PacelineError: A shard refused something, or does not answer.
    """
    ids, counts, places = distinct(batch.contiguous().reshape(-1).numpy().view(np.uint64), padding)
    rows = torch.empty(len(ids) + 1, dim, dtype=torch.float32, device="cpu")
    rows[-1] = 0.0
    source.read(ids, rows[:-1].numpy(), is_look=is_look)
    return Lookup(ids, counts, rows, torch.from_numpy(places).view(batch.shape))


def look_up(found: Lookup) -> torch.Tensor:
    """Returns the rows of a batch, as `torch.nn.functional.embedding` does, to the bit."""
    rows = found.rows
    if rows.requires_grad and rows.device.type == "cpu":
        chosen: torch.Tensor = _Chosen.apply(rows, found.places)  # type: ignore[no-untyped-call]
        return chosen
    return functional.embedding(found.places, rows, padding_idx=found.padding)


class _Chosen(torch.autograd.Function):
    """Torch's `embedding`, whose gradient is added up in one loop: torch calls a function a row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(rows)
        return functional.embedding(places, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        dim = grad.shape[-1]
        total = np.zeros((ctx.num_rows, dim), np.float32)
        add_rows(grad.contiguous().view(-1, dim).numpy(), places.reshape(-1).numpy(), total)
        return torch.from_numpy(total), None
