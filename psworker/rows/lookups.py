"""The rows that one forward pass looks up, as a small matrix that autograd sees.

The ids of a batch are reduced to the distinct ones; their rows are pulled into a matrix, a leaf of
the graph, and torch's own functions look the batch up in it. So the gradient of the matrix is that
of the rows, with the gradients of repeated ids added.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

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
    """The rows that the ids of a batch need.

    Attributes:
        ids: `(u,) uint64`, strictly ascending, without the padding. The order is the same for any
            number of shards: the bits of torch's sums depend on a row's place in memory.
        counts: `(u,) int64`, the number of times that each occurs in the batch.
        rows: `(u + 1, dim) float32`; the last row is zero, for the padding.
        places: The row of each id of the batch, int64, in the shape of the batch.
    """

    ids: IdArray
    counts: IntArray
    rows: torch.Tensor
    places: torch.Tensor

    @property
    def padding(self) -> int:
        """The row that is zero and has no gradient."""
        return len(self.ids)


def ascend(distinct: IntArray, padding: int | None) -> IntArray:
    """Returns the positions of ids in their order as unsigned numbers, without the padding.

    Args:
        distinct: `(u,) int64`, strictly ascending.
        padding: The id that is left out; None: none is.
    """
    order: IntArray = np.arange(len(distinct))
    if len(distinct) and distinct[0] < 0:  # As unsigned numbers they are the largest.
        order = np.roll(order, -int(np.count_nonzero(distinct < 0)))
    return order if padding is None else order[distinct[order] != padding]


def find(
    batch: torch.Tensor, dim: int, padding: int | None, source: RowSource, *, is_look: bool
) -> Lookup:
    """Returns the rows of a batch of ids.

    Args:
        batch: Ids, int64, on the CPU; of any shape.
        dim: Elements of a row.
        padding: The id whose row is zero; None: there is none.
        source: The place from which rows come.
        is_look: Whether nothing is trained on them.

    Raises:
        PacelineError: A shard refused something, or does not answer.
    """
    found, inverse, counts = torch.unique(batch, return_inverse=True, return_counts=True)
    distinct, times = found.numpy(), counts.numpy()
    order = ascend(distinct, padding)
    ids = distinct[order].view(np.uint64)
    place = np.full(len(distinct), len(ids))
    place[order] = np.arange(len(ids))
    rows = torch.empty(len(ids) + 1, dim)
    rows[-1] = 0.0
    source.read(ids, rows[:-1].numpy(), is_look=is_look)
    return Lookup(ids, times[order], rows, torch.from_numpy(place)[inverse])
