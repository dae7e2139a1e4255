"""Mirror: the next round starts at the shards' own outer step, taken with the worker's own move.

Paceline's own; there is no paper. (W, V) is the state of the shards before the round's update.

    end of round r:          s_i = outer(W, V; D_i - c (D_i^{r-1} - D^{r-1}))
    W^{r+1} lands:           x_i <- x_i + (W^{r+1} - s_i);   s_i <- W^{r+1}

The outer step is linear in the move, so that the weighted mean of the workers' starts is W^{r+1}:
there is no bias, with any momentum. Spread is left, s_i - W^{r+1} = -lr (1 + m) (D_i - D)
with Nesterov, which ends when the answer lands and the worker is translated by the difference. The
move of the next round, s_i - x_i, is not changed by the translation. V is followed from the weights
that land (`Optimizer.infer`), so no more bytes travel than in a round that blocks.

The control c takes out differences between workers that last (unlike data): c = 1 replaces the
worker's part of the last round by the mean's. The mean of the starts stays exact with any c.

With the plain mean as the outer step (`local`) s_i is x_i: the worker continues, and is translated
when the mean lands. That is the form of Shuheng Shen et al., "Faster Distributed Deep Net Training:
Computation and Communication Decoupled Stochastic Gradient Descent", arXiv:1906.12043 (recalled).
"""

from __future__ import annotations

from typing import Any

from pscore.local.base import LocalSlice, optimizer_state
from pscore.overlaps.base import LANDED, Overlap, step_outer

OWN, APART = "own move", "apart"


class Mirror(Overlap):
    """The shards' outer step, guessed from the worker's own move.

    Args:
        control: c, 0 to 1; above 0 costs memory for two moves.
    """

    name = "mirror"
    follows = True

    def __init__(self, control: float = 0.0) -> None:
        self.control = control

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes the shards' step with this worker's move."""
        guess = grad
        if self.control:
            if APART in part.state:
                guess = grad.sub(part.state[APART], alpha=self.control)
            self._keep(part, OWN, grad)
        before = part.state.get(LANDED, part.origin)
        momentum = [array.clone() for array in optimizer_state(part)]
        step_outer(part, before, guess, momentum, part.weights)
        part.origin.copy_(part.weights)

    def land(self, part: LocalSlice, pulled: Any, mean: Any) -> None:
        """Translates weights and origin by the error of the guess."""
        part.weights.add_(pulled - part.origin)
        part.origin.copy_(pulled)
        if not self.control:
            return
        if mean is None:
            part.state.pop(APART, None)
        else:
            self._keep(part, APART, part.state[OWN] - mean)
