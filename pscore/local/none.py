"""No local update: a worker continues with the weights of the last pull until the next one.

For comparison with the other local updates: delayed SGD as it is analysed by Alekh Agarwal and John
Duchi, "Distributed Delayed Stochastic Optimization", NeurIPS 2011.

    w = w
"""

from __future__ import annotations

from typing import Any

from pscore.local.base import LocalSlice, LocalUpdate


class NoLocalUpdate(LocalUpdate):
    """Leaves the weights as they are."""

    name = "none"

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Leaves the weights unchanged."""
