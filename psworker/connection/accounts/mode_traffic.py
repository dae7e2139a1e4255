"""The bytes that a step of a mode pushes and pulls, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pscore.compressors.base import Compressor
from pscore.net.wire import FLOAT_NBYTES
from pscore.partition import Layout, make_layout
from pscore.rules.base import Rule
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
        rule: The mode.
        compressors: Compressors of pushes and of pulls.
        num_state: Arrays of the optimizer's state.
    """
    tensors = [
        TensorSpec(name=str(number), shape=(numel, 1), dtype="float32")
        for number, numel in enumerate(numels)
    ]
    tensors = choose(tensors, *compressors, min_nbytes=MIN_NBYTES, exclude=())
    pushed, pulled = mean_of(by_step(make_layout(tensors, 1), rule, compressors, num_state))
    nbytes = FLOAT_NBYTES * sum(numels)
    plans = [rule.plan(step) for step in _period(rule)]
    return ModeTraffic(
        pushed / nbytes, pulled / nbytes, any(plan.pull and plan.block for plan in plans)
    )


def _period(rule: Rule) -> range:
    """Returns the steps behind the warm-up after which the plan repeats."""
    arguments = {item.name: getattr(rule, item.name) for item in fields(rule)}
    start = int(arguments.get("warmup", 0))
    return range(start, start + int(arguments.get("steps", 1)))


def by_step(
    layout: Layout, rule: Rule, compressors: tuple[Compressor, Compressor], num_state: int
) -> list[tuple[float, float]]:
    """Returns the bytes pushed and pulled in each step after which the plan repeats."""
    schedule = rule.schedule
    numels = [spec.numel for spec in layout.slices]
    fragments = [0] * len(numels) if schedule is None else schedule.assign(numels)
    local = rule.local_update()
    steps = []
    for step in _period(rule):
        plans = [rule.plan_of(step, fragment) for fragment in range(max(fragments) + 1)]
        pushed = pulled = 0.0
        for spec, fragment in zip(layout.slices, fragments, strict=True):
            plan, raw = plans[fragment], FLOAT_NBYTES * spec.numel
            packed, pulled_packed = (
                item.payload_nbytes_max(spec.numel) if spec.compress else raw
                for item in compressors
            )
            if plan.push is not None:
                pushed += packed if plan.compress and not plan.flush else raw
            with_state = local is not None and not plan.block
            with_state = with_state and local.wants_state(last_of_warmup=False)
            whole = raw * (1 + num_state) if with_state else pulled_packed
            pulled += whole / plan.turns if plan.pull else 0
        steps.append((pushed, pulled))
    return steps


def mean_of(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the mean bytes pushed and pulled per step."""
    pushed, pulled = zip(*steps, strict=True)
    return sum(pushed) / len(steps), sum(pulled) / len(steps)
