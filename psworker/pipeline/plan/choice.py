"""The plan that the workers of a pipeline find by themselves: rank 0 measures, all get the same.

Rank 0 passes the plan on as numbers of a barrier, whose largest value every worker gets.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pscore.errors import ConfigError, PacelineError
from pscore.rules.base import Rule
from psworker.connection.membership.session import Session
from psworker.pipeline.plan.measure import MakeOptimizer, measure, with_momentum
from psworker.pipeline.plan.partition import Level, MemoryLimit
from psworker.pipeline.plan.plan_file import read_plan
from psworker.pipeline.plan.profile import Profile
from psworker.pipeline.plan.traffic import cost_on_shards
from psworker.pipeline.plan.units import parse_bandwidths, parse_memory
from psworker.pipeline.plan.verdict import compare
from psworker.pipeline.run.chain import Block

AUTO = "auto"
MEETING = "pipeline plan"  # Name of the barriers that pass a plan on.
Plan = Sequence[tuple[str, int]]
log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The arguments of `psworker.Pipeline` that a plan found by itself needs."""

    bandwidth: float  # Bytes per second of a worker's link, in each direction.
    memory_nbytes: float  # Memory of a worker; infinite: no limit.

    @classmethod
    def parse(cls, bandwidth: str | None, memory: str | None) -> PlanLimits:
        """Returns the limits of texts such as `1gbit` and `16g`.

        Raises:
            ConfigError: There is no bandwidth, or one of them is wrong.
        """
        if bandwidth is None:
            raise ConfigError(
                "plan='auto' needs bandwidth, the link of a worker, as bandwidth='1gbit'; or give "
                "a plan: each stage's last block and replicas"
            )
        links = parse_bandwidths(bandwidth, "bandwidth")
        if len(links) != 1:
            raise ConfigError(
                f"bandwidth is {bandwidth!r}, must be one link; psworker plan --machines finds "
                "plans for several kinds of links"
            )
        return cls(links[0], parse_memory(memory, "memory"))


def resolve_plan(
    plan: Plan | str | Path, handed: str, bandwidth: str | None, memory: str | None
) -> tuple[Plan, PlanLimits | None]:
    """Returns a plan that is given, or the limits of one that is to be found.

    Args:
        plan: The argument of `psworker.Pipeline`.
        handed: File that the launcher has handed to this worker, for `auto`; empty: none.
        bandwidth: Link of a worker, with `auto`; without effect if the launcher has a plan.
        memory: Memory of a worker, likewise.

    Raises:
        ConfigError: The arguments do not fit, or the file is no plan.
    """
    if plan == AUTO and not handed:
        return [], PlanLimits.parse(bandwidth, memory)
    if plan == AUTO:
        return _of_file(handed), None
    for name, value in (("bandwidth", bandwidth), ("memory", memory)):
        if value is not None:
            raise ConfigError(f"{name}={value!r} has no effect but with plan='auto'")
    if isinstance(plan, str | Path):
        return _of_file(plan), None
    if not plan or min(number for _, number in plan) < 1:
        raise ConfigError(
            f"plan is {[*plan]}, must name each stage's last block and replicas, or a file of "
            "psworker plan --save-plan, or be 'auto'"
        )
    return plan, None


def _of_file(path: str | Path) -> Plan:
    plan = read_plan(path)
    log.info(
        "pipeline plan %s of %s: %.4g ms a minibatch predicted; %s: %s",
        plan.name,
        path,
        plan.predicted_ms,
        plan.verdict,
        plan.reason,
    )
    return plan.cuts


def agreed_plan(
    session: Session,
    blocks: Sequence[Block],
    example: torch.Tensor,
    limits: PlanLimits,
    optimizer: MakeOptimizer,
    rule: Rule,
) -> list[tuple[str, int]]:
    """Returns the plan that rank 0 finds, on every worker.

    Args:
        session: The job of all stages; a worker that fails here leaves it.
        example: One minibatch; rank 0 measures the blocks on its device.
        optimizer: Makes an optimizer; its state is part of the memory.
        rule: Mode between the replicas of a stage.

    Raises:
        ConfigError: On rank 0: nothing fits into memory, or the fastest plan leaves workers idle.
        PacelineError: Rank 0 has found none.
    """
    spans: list[tuple[int, int]] = []
    is_done = False
    try:
        if session.rank == 0:
            workers, shards = session.num_processes, len(session.links)
            profile = measured(blocks, example, optimizer)
            spans = find_plan(profile, limits, workers, shards, num_state_of(optimizer), rule)
        agreed = _agree(session, spans)
        is_done = True
    finally:
        if not is_done:  # The barrier of the others then ends without a plan.
            session.leave("it has no plan", failed=True)
    return [(blocks[last].name, replicas) for last, replicas in agreed]


def _agree(session: Session, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns rank 0's last blocks and replicas; those of others are empty."""
    stages = int(session.agree(MEETING, len(found)))
    if not stages:
        raise PacelineError("rank 0 has found no plan for the pipeline, and says why")
    pairs = found or [(0, 0)] * stages
    return [
        (int(session.agree(MEETING, last)), int(session.agree(MEETING, replicas)))
        for last, replicas in pairs
    ]


def measured(
    blocks: Sequence[Block], example: torch.Tensor, optimizer: MakeOptimizer = with_momentum
) -> Profile:
    """Returns the profile of blocks, whose buffers and random numbers stay as they are."""
    buffers = [buffer for block in blocks for buffer in block.module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    devices = [example.device] if example.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        profile = measure("the model", blocks, example, optimizer=optimizer)
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    return profile


def find_plan(
    profile: Profile,
    limits: PlanLimits,
    num_workers: int,
    num_shards: int,
    num_state: int,
    rule: Rule,
) -> list[tuple[int, int]]:
    """Returns each stage's last block and replicas: the fastest pipeline, or one stage.

    Logs the plan and the verdict in one line, as a warning if it is against a pipeline: one stage
    on all workers is then data parallelism.

    Args:
        num_shards: Shards, each behind a link as fast as a worker's.
        num_state: Arrays of the optimizer's state, as long as the parameters.
        rule: Mode between the replicas of a stage.

    Raises:
        ConfigError: Nothing fits into memory, or the fastest plan leaves workers idle.
    """
    cost = cost_on_shards(profile, rule, num_state, num_shards=num_shards)
    memory = MemoryLimit(limits.memory_nbytes, num_state)
    verdict = compare(profile, [Level(num_workers, limits.bandwidth)], cost, memory)
    if verdict.advised is None:
        raise ConfigError(f"there is no plan for {num_workers} workers: {verdict.reason}")
    if not verdict.is_pipeline or verdict.pipeline is None:
        log.warning("pipeline plan %d: do not pipeline: %s", num_workers, verdict.reason)
        return [(len(profile.layers) - 1, num_workers)]
    if verdict.pipeline.workers != num_workers:
        raise ConfigError(
            f"the fastest plan, {verdict.pipeline.name}, has {verdict.pipeline.workers} workers, "
            "and more would slow it down: start "
            f"{verdict.pipeline.workers} in place of {num_workers}"
        )
    log.info("pipeline plan %s: pipeline: %s", verdict.pipeline.name, verdict.reason)
    return [(stage.last, stage.replicas) for stage in verdict.pipeline.stages]


def num_state_of(make: MakeOptimizer) -> int:
    """Returns the arrays of an optimizer's state that are as long as the parameters."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    return sum(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for value in optimizer.state[parameter].values()
    )
