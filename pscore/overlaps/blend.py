"""Blend: a worker continues from its own weights, and mixes the answer in when it lands.

Arthur Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512, there
for fragments of the model, and with a = 0.5.

    end of round r:          s_i = x_i
    W^{r+1} lands:           x_i <- a x_i + (1 - a) W^{r+1};   s_i <- W^{r+1}

Differs from the paper: the model is one fragment, and moves are not quantized unless the job's
compressor does it. The form is that of a digest; the paper's own text was not read.
"""

from __future__ import annotations

from typing import Any

from pscore.local.base import LocalSlice
from pscore.overlaps.base import Overlap


class Blend(Overlap):
    """The next round starts where the last one ended.

    Args:
        mix: a, weight of the worker's own weights when the answer lands, 0 to 1.
    """

    name = "blend"
    mixes = True

    def __init__(self, mix: float = 0.5) -> None:
        self.mix = mix

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Continues from the weights at the end of the round."""
        part.origin.copy_(part.weights)

    def land(self, part: LocalSlice, pulled: Any, mean: Any) -> None:
        """Mixes, and measures the next move from the global weights."""
        part.weights.mul_(self.mix).add_(pulled, alpha=1.0 - self.mix)
        part.origin.copy_(pulled)
