"""Moves of the weights in a round, in modes whose workers run the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pscore.errors import GradientError
from pscore.local.base import LocalSlice


def write_moves(
    parts: Sequence[LocalSlice], reference: Sequence[torch.Tensor], moves: Sequence[torch.Tensor]
) -> int | None:
    """Writes the weights of the last pull minus the current ones into `moves`.

    Args:
        parts: The slices.
        reference: Weights of the last pull of each slice, `(numel,) float32`.
        moves: Memory for the result, likewise.

    Returns:
        The first slice whose moves hold NaN or Inf, or None; later slices are not written.
    """
    for index, part in enumerate(parts):
        torch.sub(reference[index], part.weights, out=moves[index])
        if not bool(torch.isfinite(moves[index]).all()):
            return index
    return None


def not_finite(index: int, step: int) -> GradientError:
    """Returns the error for a slice whose weights hold NaN or Inf."""
    return GradientError(
        f"the weights of slice {index} hold NaN or Inf at step {step}, at the end of a round; "
        "nothing of it was pushed, and the weights are those of its begin again (the state of the "
        "wrapped optimizer may hold NaN too)"
    )
