"""Everyone takes from everyone: W_ij = 1/n, so one step makes the exact mean.

As in Xiangru Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
arXiv:1705.09056, the fully connected graph. It costs n - 1 models a step and worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from pscore.graphs.base import Edge, circulant


def edges(members: Sequence[int], step: int) -> list[Edge]:
    """Returns the edges among `members`, which are ranks in order; the same at every `step`."""
    return circulant(members, range(1, len(members)), 1 / max(1, len(members)))
