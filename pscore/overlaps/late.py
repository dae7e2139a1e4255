"""Late: each round starts from the global weights without the round before.

The delay of one round that several papers compare with: "naive" in Satyen Kale et al., "Eager
Updates For Overlapped Communication and Computation in DiLoCo", arXiv:2502.12996.

    end of round r:          s_i = W^r                     W^{r+1} is still on its way
    W^{r+1} lands:           nothing changes until the round ends

Every step of the shards is taken with moves that were measured one round before: with an outer
momentum of 0.9 that is unstable at the rates that are usual without the delay.

Differs from the source: the abstract was read only; the form is the one that
`docs/rules/overlap.md` states.
"""

from __future__ import annotations

from typing import Any

from pscore.local.base import LocalSlice
from pscore.overlaps.base import LANDED, Overlap


class Late(Overlap):
    """The next round starts from the weights that landed last."""

    name = "late"

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Starts from the newest weights that have landed: W^r, without this round."""
        newest = part.state.get(LANDED)
        if newest is None:  # The first round with an overlap: its origin is the newest.
            newest = part.origin
        part.weights.copy_(newest)
        part.origin.copy_(newest)

    def land(self, part: LocalSlice, pulled: Any, mean: Any) -> None:
        """Keeps the weights for the start of the next round."""
        self._keep(part, LANDED, pulled)
