"""The round of a mode whose workers run the wrapped optimizer: local steps, then one push."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from pscore.errors import GradientError
from pscore.local.base import LocalSlice
from pscore.partition import Layout
from pscore.types import Role
from psworker.model.finite import first_not_finite


class Round:
    """The open round of one worker; with fragments, that of each fragment."""

    def __init__(self, layout: Layout, weights: torch.Tensor, *, role: Role | None) -> None:
        """Opens the first round.

        Args:
            weights: `(layout.numel,) float32` on the model's device.
            role: The push that ends a round; only one of moves needs a reference.
        """
        self.role = role  # The push that ends a round; None: the mode has no rounds.
        self.is_last = False  # Whether this worker makes no further step.
        self._open = [_Open()]  # By fragment.
        self._weights = weights
        self._spans = [slice(spec.start, spec.stop) for spec in layout.slices]
        # The weights at the start of the round: those of the last pull, or of an overlap.
        self._reference = torch.empty_like(weights) if role is Role.DELTA else None

    @property
    def num_inner(self) -> int:
        """Steps of the user's own optimizer since the round of the oldest fragment has begun."""
        return max(each.num_inner for each in self._open)

    @property
    def open_samples(self) -> float:
        """Sum of the weights of these steps."""
        return max(self._open, key=lambda each: each.num_inner).samples

    @property
    def num_inner_of(self) -> list[int]:
        """The same, of each fragment."""
        return [each.num_inner for each in self._open]

    @property
    def pushed_role(self) -> Role:
        """The push that ends this round."""
        assert self.role is not None
        return Role.LAST_MODEL if self.is_last and self.role is Role.MODEL else self.role

    def mean_samples(self, fragment: int) -> float:
        """Returns the mean weight of a round's steps; without one, of the round before."""
        return self._open[fragment].mean_samples

    def add_step(self, samples: float, num: int = 1) -> None:
        """Counts steps of the wrapped optimizer, each with its weight in the mean."""
        for each in self._open:
            each.num_inner += num
            each.samples += num * samples

    def divide(self, num_fragments: int) -> None:
        """Opens the first round of each fragment."""
        self._open = [_Open() for _ in range(num_fragments)]

    def begin(self, fragments: Collection[int] | None = None) -> None:
        """Opens the next round of some fragments; None: of all."""
        self.is_last = False
        for fragment in range(len(self._open)) if fragments is None else fragments:
            self._open[fragment] = _Open(former=self._open[fragment].mean_samples)

    def reset(self) -> None:
        """Opens all rounds again, from the weights of their starts if these are known."""
        if self._reference is not None:
            self._weights.copy_(self._reference)
        self.begin()

    def origin(self, index: int) -> torch.Tensor | None:
        """Returns the weights of one slice from which its move is measured."""
        return None if self._reference is None else self._reference[self._spans[index]]

    def shift(self, change: torch.Tensor) -> None:
        """Adds a change of the weights that is no move, `(layout.numel,)`, to the reference."""
        if self._reference is not None:
            self._reference.add_(change)

    def record_slice(self, index: int, weights: torch.Tensor) -> None:
        """Records the weights of one slice as those of its last pull."""
        if self._reference is not None:
            self._reference[self._spans[index]].copy_(weights)

    def follow(self, own: Collection[int]) -> None:
        """Records the weights of all slices but `own` as those of their last pulls."""
        for index, span in enumerate(self._spans):
            if index not in own:
                self.record_slice(index, self._weights[span])

    def write(
        self, parts: Sequence[LocalSlice], values: Sequence[torch.Tensor], indices: Iterable[int]
    ) -> int | None:
        """Writes the moves of the weights since the start of the round, or the weights.

        If one holds NaN or Inf, all rounds are reset. On a device this waits for the weights, once
        in a round.

        Args:
            values: Memory for the result, `(numel,) float32` each.

        Returns:
            The first slice whose values hold NaN or Inf, or None.
        """
        reference, written = self._reference, list(indices)
        for index in written:
            if reference is None:
                values[index].copy_(parts[index].weights)
            else:
                torch.sub(reference[self._spans[index]], parts[index].weights, out=values[index])
        first = first_not_finite([values[index] for index in written])
        if first is None:
            return None
        self.reset()
        return written[first]


@dataclass(slots=True)
class _Open:
    """The open round of one fragment."""

    num_inner: int = 0
    samples: float = 0.0  # Sum so far.
    former: float = 1.0  # Mean of the last round that had a step.

    @property
    def mean_samples(self) -> float:
        """Mean weight of its steps; without one, of the steps of the round before."""
        return self.samples / self.num_inner if self.num_inner else self.former


def not_finite(index: int, step: int) -> GradientError:
    """Returns the error for a slice whose weights hold NaN or Inf."""
    return GradientError(
        f"the weights of slice {index} hold NaN or Inf at step {step}, at the end of a round; "
        "nothing of it was pushed, and the weights are reset to those of its beginning "
        "(the state of the "
        "wrapped optimizer may hold NaN too)"
    )
