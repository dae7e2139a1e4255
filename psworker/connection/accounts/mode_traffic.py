"""The bytes that a step of a mode pushes and pulls, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pscore.compressors.base import Compressor
from pscore.net.wire import FLOAT_NBYTES
from pscore.partition import make_layout
from pscore.rules.base import Rule
from pscore.timing.plans import by_step, mean_of, period
from pscore.types import TensorSpec
from psworker.compression.error_feedback import choose

MIN_NBYTES = 1 << 16  # The default of `DistributedOptimizer`.


@dataclass(frozen=True, slots=True)
class ModeTraffic:
    """Bytes that a step pushes and pulls, per byte of parameters, as a mean over the period."""

    pushed: float
    pulled: float
    blocks: bool  # Whether a step of the period waits for its own pull.


def traffic_of(
    numels: Sequence[int], rule: Rule, compressors: tuple[Compressor, Compressor], num_state: int
) -> ModeTraffic:
    """Returns the traffic of a mode after its warm-up.

    Args:
        numels: Elements of each tensor; all that are large enough are compressed.
    """
    tensors = [
        TensorSpec(name=str(number), shape=(numel, 1), dtype="float32")
        for number, numel in enumerate(numels)
    ]
    tensors = choose(tensors, *compressors, min_nbytes=MIN_NBYTES, exclude=())
    pushed, pulled = mean_of(by_step(make_layout(tensors, 1).slices, rule, compressors, num_state))
    nbytes = FLOAT_NBYTES * sum(numels)
    plans = [rule.plan(step) for step in period(rule)]
    return ModeTraffic(
        pushed / nbytes, pulled / nbytes, any(plan.pull and plan.block for plan in plans)
    )
