"""`psworker plan --pipeline`: stages, replicas and the verdict, from a measured profile."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from pscore.errors import ConfigError
from pscore.optimizers.base import Optimizer
from pscore.rules.decentralised import Decentralised
from pscore.text import counted
from psworker.commands.model_plan import PlannedJob
from psworker.commands.models import MODELS, make_model
from psworker.pipeline.plan.costs import Cost, RingCost
from psworker.pipeline.plan.measure import MakeOptimizer, measure, with_momentum
from psworker.pipeline.plan.partition import Level, MemoryLimit, Stage
from psworker.pipeline.plan.plan_file import PlanFile, PlanStage
from psworker.pipeline.plan.profile import Profile, read_profile
from psworker.pipeline.plan.traffic import cost_on_shards
from psworker.pipeline.plan.units import parse_bandwidths, parse_memory
from psworker.pipeline.plan.verdict import Comparison, compare, size
from psworker.pipeline.run.chain import chain_of

SYNCS = ("shards", "ring")
WORKERS_MAX = 64  # Most workers of a plan: its time grows with their square.
SAMPLES = 8  # Samples of a minibatch, if none are given.


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The flags of `psworker plan` that belong to `--pipeline`; None: not given."""

    bandwidth: str | None = None
    machines: int | None = None
    memory: str | None = None
    inputs: str | None = None
    device: str | None = None
    sync: str | None = None
    save_profile: Path | None = None
    save_plan: Path | None = None

    def require_none(self) -> None:
        """Raises ConfigError for flags that have no effect without `--pipeline`."""
        for item in fields(self):
            if getattr(self, item.name) is not None:
                flag = {"inputs": "input"}.get(item.name, item.name).replace("_", "-")
                raise ConfigError(f"--{flag} has no effect without --pipeline")


def plan_pipeline(
    model: str, wanted: Wanted, job: PlannedJob, num_workers: int, num_shards: int | None
) -> dict[str, Any]:
    """Returns the plan of a model's pipeline as JSON: milliseconds and bytes of one minibatch.

    Args:
        model: Known by name, `module:factory`, or the file of a profile.
        job: The mode between the replicas of a stage.
        num_shards: Each behind a link as fast as a worker's; None: one on each worker's host.

    Raises:
        ConfigError: A flag is wrong, or the model is not a chain that runs on the input.
    """
    if wanted.bandwidth is None:
        raise ConfigError("--pipeline needs --bandwidth, the link of a worker, as 1gbit")
    if num_workers > WORKERS_MAX:
        raise ConfigError(f"--workers is {num_workers}, must be at most {WORKERS_MAX} here")
    if wanted.sync not in (None, *SYNCS):
        raise ConfigError(f"--sync is {wanted.sync!r}, must be one of {', '.join(SYNCS)}")
    levels = levels_of(num_workers, wanted.machines or 1, wanted.bandwidth)
    memory = MemoryLimit(parse_memory(wanted.memory), len(job.optimizer.state_names))
    job.rule.require_workers(num_workers)
    make_optimizer = _maker_of(job.optimizer)
    profile = profile_of(model, wanted.inputs, wanted.device or "cpu", make_optimizer)
    if wanted.save_profile is not None:
        try:
            wanted.save_profile.write_text(profile.as_json(), encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"the profile cannot be written: {problem}") from problem
    cost = cost_of(wanted.sync or SYNCS[0], num_workers, num_shards, profile, job)
    verdict = compare(profile, levels, cost, memory)
    if wanted.save_plan is not None:
        plan_file_of(profile, verdict).write(wanted.save_plan)
    return pipeline_report(profile, num_workers, verdict)


def levels_of(workers: int, machines: int, bandwidth: str) -> list[Level]:
    """Returns the levels of a cluster: the workers of a machine, then the machines.

    Raises:
        ConfigError: The workers cannot be split evenly, or there are too few or many links.
    """
    links = parse_bandwidths(bandwidth)
    if machines == 1:
        sizes = [workers]
    elif workers % machines:
        raise ConfigError(f"{workers} workers cannot be split evenly over {machines} machines")
    else:
        sizes = [workers // machines, machines]
    if len(links) != len(sizes):
        raise ConfigError(
            f"--bandwidth names {len(links)} links, must name {len(sizes)}: "
            + ("between the workers" if machines == 1 else "in a machine, and between machines")
        )
    return [Level(units, link) for units, link in zip(sizes, links, strict=True)]


def _maker_of(optimizer: Optimizer) -> MakeOptimizer:
    """Returns what makes torch's optimizer of the shards', to measure its step."""
    name = next(iter(optimizer.torch_classes), "SGD")
    if name == "SGD":
        return with_momentum
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.0)


def profile_of(
    model: str, inputs: str | None, device: str, optimizer: MakeOptimizer = with_momentum
) -> Profile:
    """Returns the measured profile of a model, or the one in a `.json` file.

    Args:
        model: Known by name, `module:factory`, or a file that `--save-profile` wrote.
        inputs: A minibatch, as `8x3x224x224`, or `8x1024:50257` for numbers below 50257.
        optimizer: Makes the optimizer of some parameters, whose step is measured too.

    Raises:
        ConfigError: There is no such model or file, or it is not a chain.
    """
    if model.endswith(".json"):
        try:
            return read_profile(Path(model).read_text(encoding="utf-8"), model)
        except OSError as problem:
            raise ConfigError(f"profile {model} cannot be read: {problem}") from problem
    module = make_model(model, for_stages=True)
    example = _example(model, inputs)
    _require_device(device)
    try:
        blocks = chain_of(module.to(device), example.to(device))
        return measure(model, blocks, example.to(device), optimizer=optimizer)
    except (RuntimeError, TypeError, AttributeError, ValueError) as problem:
        shape = "x".join(map(str, example.shape))
        reason = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        raise ConfigError(
            f"{model} does not run on an input of {shape} on {device} ({reason}); name another "
            "with --input"
        ) from problem


def _require_device(device: str) -> None:
    """Raises a `ConfigError` if torch knows no such device, or has none here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).partition("\n")[0]
        raise ConfigError(f"--device is {device!r}: {reason}") from problem


def _example(model: str, inputs: str | None) -> torch.Tensor:
    """Returns a minibatch of random numbers."""
    if inputs is None:
        if model not in MODELS:
            raise ConfigError(
                f"the shape of a minibatch of {model} is not known: name it by --input"
            )
        known = MODELS[model]
        shape, vocabulary = (SAMPLES, *known.shape), known.vocabulary
    else:
        matched = re.fullmatch(r"([1-9]\d*(?:x[1-9]\d*)*)(?::([1-9]\d*))?", inputs)
        if matched is None:
            raise ConfigError(f"--input is {inputs!r}, must be as 8x3x224x224, or 8x1024:50257")
        shape = tuple(int(number) for number in matched[1].split("x"))
        vocabulary = int(matched[2] or 0)
    return torch.randint(vocabulary, shape) if vocabulary else torch.randn(shape)


def cost_of(
    sync: str, num_workers: int, num_shards: int | None, profile: Profile, job: PlannedJob
) -> Cost:
    """Returns the cost of stages whose replicas meet on shards, or in a ring.

    Args:
        sync: One of `SYNCS`.
        num_shards: Shards, each behind a link of its own; None: one on each worker's host.
        job: The mode between replicas, with its compressors and optimizer.

    Raises:
        ConfigError: There is no such way.
    """
    if sync not in SYNCS:
        raise ConfigError(f"--sync is {sync!r}, must be one of {', '.join(SYNCS)}")
    if sync == "ring":
        return RingCost()
    if isinstance(job.rule, Decentralised):
        raise ConfigError(f"mode {job.rule} has no shards between replicas; use --sync ring")
    return cost_on_shards(
        profile,
        job.rule,
        len(job.optimizer.state_names),
        num_shards=num_shards or num_workers,
        on_workers=num_shards is None,
        compressors=(job.compressor, job.pull_compressor),
    )


def plan_file_of(profile: Profile, found: Comparison) -> PlanFile:
    """Returns the advised plan for workers to read.

    Raises:
        ConfigError: Nothing fits into memory.
    """
    if found.advised is None:
        raise ConfigError(f"there is no plan to save: {found.reason}")
    return PlanFile(
        model=profile.model,
        stages=tuple(
            PlanStage(last=profile.layers[stage.last].name, replicas=stage.replicas)
            for stage in found.advised.stages
        ),
        predicted_ms=1e3 * found.advised.seconds,
        verdict=found.verdict,
        reason=found.reason,
    )


def pipeline_report(profile: Profile, workers: int, found: Comparison) -> dict[str, Any]:
    """Returns a comparison as JSON: milliseconds and bytes are of one minibatch."""
    shown = found.pipeline or found.advised
    return {
        "model": profile.model,
        "samples": profile.samples,
        "device": profile.device,
        "num_workers": workers,
        "num_layers": len(profile.layers),
        "parameter_nbytes": sum(layer.parameter_nbytes for layer in profile.layers),
        "forward_ms": 1e3 * sum(layer.forward_s for layer in profile.layers),
        "backward_ms": 1e3 * sum(layer.backward_s for layer in profile.layers),
        "plan": "" if found.advised is None else found.advised.name,
        "pipeline": "" if found.pipeline is None else found.pipeline.name,
        "pipeline_workers": 0 if found.pipeline is None else found.pipeline.workers,
        "stages": [] if shown is None else [_stage_json(profile, one) for one in shown.stages],
        "pipeline_ms": None if found.pipeline is None else 1e3 * found.pipeline.seconds,
        "pipeline_nbytes": found.moved_nbytes,
        "data_parallel_ms": 1e3 * found.data_parallel_s,
        "data_parallel_nbytes": found.data_parallel_nbytes,
        "data_parallel_memory_nbytes": found.data_parallel.memory_nbytes,
        "hidden_ms": 1e3 * found.hidden_s,
        "verdict": found.verdict,
        "reason": found.reason,
    }


def _stage_json(profile: Profile, stage: Stage) -> dict[str, Any]:
    layers = profile.layers[stage.first : stage.last + 1]
    is_last = stage.last + 1 == len(profile.layers)
    return {
        "first": layers[0].name,
        "last": layers[-1].name,
        "num_layers": len(layers),
        "replicas": stage.replicas,
        "compute_ms": 1e3 * sum(layer.compute_s for layer in layers),
        "update_ms": 0.0 if stage.replicas > 1 else 1e3 * sum(layer.update_s for layer in layers),
        "parameter_nbytes": sum(layer.parameter_nbytes for layer in layers),
        "output_nbytes": 0 if is_last else layers[-1].output_nbytes,
        "weight_versions": stage.in_flight,
        "memory_nbytes": stage.memory_nbytes,
    }


def lines_of(data: dict[str, Any]) -> list[str]:
    """Returns a plan as lines for a terminal."""
    lines = [
        f"{data['model']}, {data['samples']} samples a minibatch, measured on {data['device']}: "
        f"{data['num_layers']} layers, {size(data['parameter_nbytes'])} of parameters, "
        f"{data['forward_ms']:.4g} ms forward, {data['backward_ms']:.4g} ms backward"
    ]
    for number, stage in enumerate(data["stages"]):
        update = f" and {stage['update_ms']:.4g} ms of update" if stage["update_ms"] else ""
        sends = f", sends {size(stage['output_nbytes'])}" if stage["output_nbytes"] else ""
        lines.append(
            f"stage {number}: {counted(stage['num_layers'], 'layer')}, {stage['first']} to "
            f"{stage['last']}, on {counted(stage['replicas'], 'worker')}; "
            f"{stage['compute_ms']:.4g} ms of computing{update}, "
            f"{size(stage['parameter_nbytes'])} of parameters{sends}; "
            f"{counted(stage['weight_versions'], 'weight version')}, "
            f"{size(stage['memory_nbytes'])} of memory"
        )
    if data["pipeline"]:
        used, workers = data["pipeline_workers"], data["num_workers"]
        idle = "" if used == workers else f" on {used} of {workers} workers"
        lines.append(
            f"pipeline {data['pipeline']}{idle}: {data['pipeline_ms']:.4g} ms and "
            f"{size(data['pipeline_nbytes'])} a minibatch"
        )
    lines.append(
        f"data parallelism: {data['data_parallel_ms']:.4g} ms and "
        f"{size(data['data_parallel_nbytes'])} a minibatch, "
        f"{size(data['data_parallel_memory_nbytes'])} of memory"
    )
    if data["hidden_ms"] < data["data_parallel_ms"]:
        lines.append(
            "data parallelism that hides its traffic behind computing (overlap=True, or mode ssd): "
            f"{data['hidden_ms']:.4g} ms at best"
        )
    lines.append(f"verdict: {data['verdict']}: {data['reason']}")
    return lines
