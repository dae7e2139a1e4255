"""A replica that comes to its workers late: it catches up with the rounds of a decentralised mode.

Such a worker depends on the others at every step, and they on it at the end of every round. So it
takes part in each round that they have ended and the shards have not, and continues at their step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psworker.replica.ports import PushPull
from psworker.replica.replica import Replica


def push_late(
    replica: Replica, step: int, values: Sequence[torch.Tensor], push_pull: PushPull
) -> bool:
    """Pushes the weights if workers at `step` have ended this round; returns whether they have.

    Args:
        step: Steps behind the others.
        values: Memory for the weights, as for `Replica.finish`.
    """
    ends = replica.rule.step_after(replica.step - replica.num_inner, 1)
    if ends <= step:
        replica.round.add_step(1.0)
        replica._push_round([0], values, push_pull)
        replica.step = ends
    return ends <= step


def continue_at(replica: Replica, step: int, samples: float) -> None:
    """Sets the step of the round under way to that of the other workers."""
    replica.round.add_step(samples, max(0, step - replica.step))
    replica.step = max(step, replica.step)
