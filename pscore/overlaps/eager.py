"""Eager: the worker's own fresh move, and those of the others of the round before.

Satyen Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo",
arXiv:2502.12996.

    end of round r:          G_i = (1/N) D_i^r + (1/N) sum_{j != i} D_j^{r-1}
                             (s_i, V_i) <- outer(s_i, V_i; G_i)
    W^{r+1} lands:           D^r follows from it; the worker's weights do not change

Each worker runs an outer optimizer of its own, whose weights are its origins. The part of a round's
mean that its steps left out comes one round later, so that it stays near the shards' weights, which
the job's checkpoints hold.

Differs from the paper: the abstract was read, and a digest for the equation. The shards step with
the exact mean, and the workers compute the others' moves from the shards' weights. In the first
round with an overlap the others' moves of the round before are in the weights already, and count as
zero.
"""

from __future__ import annotations

from typing import Any

from pscore.local.base import LocalSlice, optimizer_state
from pscore.overlaps.base import Overlap, step_outer

OWN, OTHERS = "own move", "others"


class Eager(Overlap):
    """An outer optimizer on each worker, with the others' moves one round late."""

    name = "eager"
    follows = True
    takes_all = True

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes this worker's own outer step."""
        share = 1.0 / part.num_workers
        guess = grad * share
        if OTHERS in part.state:
            guess.add_(part.state[OTHERS])
        self._keep(part, OWN, grad)
        momentum = self._momentum(part)
        step_outer(part, part.origin, guess, momentum, part.weights)
        part.origin.copy_(part.weights)

    def land(self, part: LocalSlice, pulled: Any, mean: Any) -> None:
        """Keeps the others' part of the mean for the next round's end."""
        if mean is None:  # An update was missed: the worker starts over from the shards' weights.
            part.weights.add_(pulled - part.origin)
            part.origin.copy_(pulled)
            for name in (OTHERS, *self._names(part)):
                part.state.pop(name, None)
            return
        self._keep(part, OTHERS, mean.sub(part.state[OWN], alpha=1.0 / part.num_workers))

    def _momentum(self, part: LocalSlice) -> list[Any]:
        """Returns V_i, which begins as the shards' V."""
        for name, shards in zip(self._names(part), optimizer_state(part), strict=True):
            if name not in part.state:
                part.state[name] = shards.clone()
        return [part.state[name] for name in self._names(part)]

    @staticmethod
    def _names(part: LocalSlice) -> list[str]:
        return [f"own {name}" for name in part.optimizer.state_names]
