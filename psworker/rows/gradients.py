"""The gradient of a table's rows in the step under way, from all of its lookups.

The placeholder of the table has a gradient without elements as long as there is one of the rows.
So `zero_grad` of the model or of any optimizer that holds the placeholder clears them too.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch

from pscore.errors import GradientError
from pscore.types import FloatArray, IntArray
from psworker.rows.lookups import IdArray, Lookup


class RowGradient(NamedTuple):
    """The gradient of some rows of a table; all others are zero."""

    ids: IdArray  # `(u,) uint64`.
    counts: IntArray  # `(u,) int64`, the number of times that each occurs in the batches.
    values: FloatArray  # `(u, dim) float32`.

    @classmethod
    def of_none(cls, dim: int) -> Self:
        """Returns the gradient of no row of a table whose rows have `dim` elements."""
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros((0, dim), np.float32))

    def take(self, places: IntArray | slice) -> RowGradient:
        """Returns the rows at some places."""
        if isinstance(places, slice):
            return RowGradient(self.ids[places], self.counts[places], self.values[places])
        values = np.take(self.values, places, axis=0)  # Faster than by index.
        return RowGradient(self.ids[places], self.counts[places], values)


class RowGradients:
    """Collects the gradients of the lookups of one table until they are cleared."""

    def __init__(self) -> None:
        self._found: list[RowGradient] = []
        self._mark: torch.Tensor | None = None  # The gradient of the placeholder.
        self._mark_version = 0

    def add(self, placeholder: torch.nn.Parameter, lookup: Lookup, grad: torch.Tensor) -> None:
        """Adds the gradient of a lookup, which autograd has made.

        Args:
            grad: `(u + 1, dim)`, the gradient of its rows.
        """
        self._forget_cleared(placeholder)
        if self._mark is None:
            placeholder.grad = self._mark = torch.zeros_like(placeholder)
            self._mark_version = self._mark._version
        values = grad[:-1].to("cpu", torch.float32).numpy()
        self._found.append(RowGradient(lookup.ids, lookup.counts, values))

    def read(self, placeholder: torch.nn.Parameter, name: str) -> RowGradient | None:
        """Returns the gradient of the rows that were looked up; None if there was no backward.

        Raises:
            GradientError: It holds NaN or Inf, or the script has changed the placeholder's.
        """
        self._forget_cleared(placeholder)
        if self._mark is None:
            return None
        if self._mark._version != self._mark_version:
            raise GradientError(
                f"the gradient of row table {name!r} was changed in place (clip_grad_norm_, "
                "GradScaler, or zero_grad(set_to_none=False)), which does not reach its rows; pass "
                "psworker.dense_parameters(model) there, and call zero_grad() of the "
                "DistributedOptimizer"
            )
        if len(self._found) > 1:
            self._found = [_merge(self._found)]
        gradient = self._found[0]
        if not np.isfinite(gradient.values).all():
            row = int(np.argwhere(~np.isfinite(gradient.values))[0, 0])
            raise GradientError(
                f"the gradient of row table {name!r} holds NaN or Inf at id "
                f"{int(gradient.ids[row].view(np.int64))}; nothing of this step was pushed"
            )
        return gradient

    def clear(self, placeholder: torch.nn.Parameter) -> None:
        """Clears all gradients."""
        placeholder.grad = None
        self._forget_cleared(placeholder)

    def _forget_cleared(self, placeholder: torch.nn.Parameter) -> None:
        if placeholder.grad is None or placeholder.grad is not self._mark:
            self._found.clear()
            self._mark = None


def _merge(found: list[RowGradient]) -> RowGradient:
    """Adds gradients of several lookups, in the order in which backward has made them."""
    ids, inverse = np.unique(np.concatenate([each.ids for each in found]), return_inverse=True)
    values = torch.zeros(len(ids), found[0].values.shape[1], dtype=torch.float32, device="cpu")
    counts = np.zeros(len(ids), np.int64)
    start = 0
    for each in found:
        places = inverse[start : start + len(each.ids)]
        values.index_add_(0, torch.from_numpy(places), torch.from_numpy(each.values))
        counts[places] += each.counts
        start += len(each.ids)
    return RowGradient(ids, counts, values.numpy())
