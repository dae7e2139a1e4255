"""Assignment of a sum: the weights become the sum of the pushed tensors. For named tensors.

Paceline's own. The mean is left to the workers, which get the number of tensors in the sum with it:
a mean has lost the last bits of the sum.

    w = g
"""

from __future__ import annotations

from pscore.optimizers.assign import Assign
from pscore.optimizers.base import SliceStep


class AssignSum(Assign):
    """The sum of the pushes takes the weights' place; `lr` is there by protocol and ignored."""

    name = "assign_sum"

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        self._assign(step, 1.0)
