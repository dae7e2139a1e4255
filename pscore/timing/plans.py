"""The bytes that each step of a mode pushes and pulls, slice by slice, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pscore.compressors.base import Compressor
from pscore.net.wire import FLOAT_NBYTES
from pscore.rules.base import Plan, Rule


class SizedSlice(Protocol):
    """A slice, as far as its bytes depend on it."""

    @property
    def numel(self) -> int:
        """Its elements."""

    @property
    def compress(self) -> bool:
        """Whether its payloads may be compressed."""


def period(rule: Rule) -> range:
    """Returns the steps behind the warm-up after which the plan repeats."""
    start = warmup_of(rule)
    return range(start, start + int(rule.arguments().get("steps", 1)))


def warmup_of(rule: Rule) -> int:
    """Returns the steps at the beginning in which every worker pulls; 0: there are none."""
    return int(rule.arguments().get("warmup", 0))


def without_warmup(rule: Rule) -> Rule:
    """Returns the rule as it is behind its warm-up, if it has one."""
    return replace(rule, warmup=0) if warmup_of(rule) else rule  # type: ignore[call-arg]


def push_nbytes(numel: int, compressor: Compressor, plan: Plan, *, compress: bool) -> int:
    """Returns the payload bytes of the push of a slice under a plan; 0: it pushes nothing."""
    if plan.push is None:
        return 0
    packs = compress and plan.compress and not plan.flush
    return compressor.payload_nbytes_max(numel) if packs else FLOAT_NBYTES * numel


def pull_nbytes(
    numel: int, compressor: Compressor, num_state: int, *, compress: bool, with_state: bool
) -> int:
    """Returns the payload bytes of the answer to the pull of a slice."""
    if with_state:
        return FLOAT_NBYTES * numel * (1 + num_state)
    return compressor.payload_nbytes_max(numel) if compress else FLOAT_NBYTES * numel


def by_step(
    slices: Sequence[SizedSlice],
    rule: Rule,
    compressors: tuple[Compressor, Compressor],
    num_state: int,
) -> list[tuple[float, float]]:
    """Returns the bytes pushed and pulled in each step after which the plan repeats."""
    schedule = rule.schedule
    numels = [spec.numel for spec in slices]
    fragments = [0] * len(numels) if schedule is None else schedule.assign(numels)
    local = rule.local_update()
    kinds: dict[tuple[int, bool, int], int] = {}  # Fragment, compressible, elements: how many.
    for spec, fragment in zip(slices, fragments, strict=True):
        kind = fragment, spec.compress, spec.numel
        kinds[kind] = kinds.get(kind, 0) + 1
    steps = []
    for step in period(rule):
        plans = [rule.plan_of(step, fragment) for fragment in range(max(fragments) + 1)]
        pushed = pulled = 0.0
        for (fragment, compress, numel), number in kinds.items():
            plan = plans[fragment]
            with_state = local is not None and not plan.block
            with_state = with_state and bool(local.wants_state(last_of_warmup=False))
            pushed += number * push_nbytes(numel, compressors[0], plan, compress=compress)
            if plan.pull:
                answer = pull_nbytes(
                    numel, compressors[1], num_state, compress=compress, with_state=with_state
                )
                pulled += number * answer / plan.turns
        steps.append((pushed, pulled))
    return steps


def mean_of(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the mean bytes pushed and pulled per step."""
    pushed, pulled = zip(*steps, strict=True)
    return sum(pushed) / len(steps), sum(pulled) / len(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """One step of the period: bytes of a worker, and whether the step waits for its own pull."""

    pushed: float
    pulled: float
    blocks: bool
    is_round: bool  # Whether it ends a round, whose push waits for the end of backward.


def traffic_by_step(
    slices: Sequence[SizedSlice],
    rule: Rule,
    compressors: tuple[Compressor, Compressor],
    num_state: int,
) -> list[StepTraffic]:
    """Returns the traffic of each step after which the plan repeats."""
    number = 1 if rule.schedule is None else rule.schedule.number
    found = []
    steps = by_step(slices, rule, compressors, num_state)
    for step, (pushed, pulled) in zip(period(rule), steps, strict=True):
        plans = [rule.plan_of(step, fragment) for fragment in range(number)]
        found.append(
            StepTraffic(
                pushed=pushed,
                pulled=pulled,
                blocks=any(plan.pull and plan.block and plan.push is not None for plan in plans),
                is_round=bool(rule.outer_optimizer) and pushed > 0,
            )
        )
    return found
