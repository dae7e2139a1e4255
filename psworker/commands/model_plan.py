"""`psworker plan`: the slices of a model, and the bytes that a step of a mode moves."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.net.wire import FLOAT_NBYTES
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout, make_layout
from pscore.rules.base import Rule
from pscore.types import TensorSpec
from psworker.compression.error_feedback import choose

MIN_NBYTES = 1 << 16  # The default of `DistributedOptimizer`.
RAW = NoCompression()
Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `psworker plan`; all bytes are payloads of one worker."""

    num_tensors: int
    num_elements: int
    num_slices: int
    slice_nbytes_max: int
    shards: list[dict[str, int]]  # Number of slices and bytes of weights of each shard.
    mode: str
    compression: str
    pull_compression: str
    optimizer: str
    period_steps: int  # After the warm-up; the bytes below are means over it.
    pushed_nbytes: float  # Per step.
    pulled_nbytes: float
    num_workers: int
    ddp_nbytes: float  # That a worker of DDP sends in a step, and receives: a ring of all workers.
    caution: str  # The reason not to use the compressor with the mode; empty: none.
    tokens: int  # Tokens, or samples, of a worker's step; 0: not given.
    uncompressed: list[str]  # Tensors that are pushed uncompressed in every step.

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return asdict(self)


def make_report(
    shapes: Shapes,
    *,
    num_shards: int,
    rule: Rule,
    compressor: Compressor,
    optimizer: Optimizer,
    pull_compressor: Compressor = RAW,
    min_nbytes: int = MIN_NBYTES,
    exclude: Sequence[str] = (),
    num_workers: int = 2,
    tokens: int = 0,
) -> Report:
    """Returns the plan of a model.

    Args:
        shapes: Names and shapes of its trained parameters, in order.
        num_shards: Number of shards of the job.
        rule: The mode.
        compressor: Of its pushes.
        optimizer: That the shards run.
        pull_compressor: Of its pulls.
        min_nbytes: Smaller parameters are not compressed, in bytes of float32.
        exclude: Names, or patterns, of more that are not.
        num_workers: Workers of the job, for the bytes of DDP.
        tokens: Tokens, or samples, of a worker's step; 0: bytes are per step only.

    Raises:
        ConfigError: There is no such layout, or the mode does not fit the number of workers.
    """
    tensors = [TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes]
    compressors = (compressor, pull_compressor)
    tensors = choose(tensors, *compressors, min_nbytes=min_nbytes, exclude=exclude)
    rule.require_workers(num_workers)
    layout = make_layout(tensors, num_shards)
    num_elements = sum(spec.numel for spec in tensors)
    period, pushed, pulled = _traffic(layout, rule, compressors, len(optimizer.state_names))
    return Report(
        num_tensors=len(tensors),
        num_elements=num_elements,
        num_slices=len(layout.slices),
        slice_nbytes_max=FLOAT_NBYTES * max(spec.numel for spec in layout.slices),
        shards=[
            {
                "num_slices": len(layout.of_shard(shard)),
                "nbytes": FLOAT_NBYTES * sum(spec.numel for spec in layout.of_shard(shard)),
            }
            for shard in range(num_shards)
        ],
        mode=str(rule),
        compression=str(compressor),
        pull_compression=str(pull_compressor),
        optimizer=optimizer.name,
        period_steps=period,
        pushed_nbytes=pushed,
        pulled_nbytes=pulled,
        num_workers=num_workers,
        ddp_nbytes=FLOAT_NBYTES * num_elements * 2 * (num_workers - 1) / num_workers,
        caution=rule.caution(compressor),
        tokens=tokens,
        uncompressed=[spec.name for spec in tensors if not spec.compress],
    )


def _traffic(
    layout: Layout, rule: Rule, compressors: tuple[Compressor, Compressor], num_state: int
) -> tuple[int, float, float]:
    """Returns the steps after which the plan repeats, and bytes pushed and pulled per step."""
    raw = FLOAT_NBYTES * sum(spec.numel for spec in layout.slices)
    packed, pulled_packed = (
        sum(
            item.payload_nbytes_max(spec.numel) if spec.compress else FLOAT_NBYTES * spec.numel
            for spec in layout.slices
        )
        for item in compressors
    )
    arguments = {item.name: getattr(rule, item.name) for item in fields(rule)}
    start, period = int(arguments.get("warmup", 0)), int(arguments.get("steps", 1))
    local = rule.local_update()
    pushed = pulled = 0.0
    for step in range(start, start + period):
        plan = rule.plan(step)
        if plan.push is not None and plan.compress and not plan.flush:
            pushed += packed
        elif plan.push is not None:
            pushed += raw
        with_state = local is not None and not plan.block
        with_state = with_state and local.wants_state(last_of_warmup=False)
        whole = raw * (1 + num_state) if with_state else pulled_packed
        pulled += whole / plan.turns if plan.pull else 0
    return period, pushed / period, pulled / period


# ----- models


def resnet50_shapes() -> Shapes:
    """Returns torchvision's ResNet-50: 161 tensors, 25,557,032 elements."""
    shapes: Shapes = [("conv1.weight", (64, 3, 7, 7)), *_norm("bn1", 64)]
    planes = 64
    for stage, (width, num_blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(num_blocks):
            name = f"layer{stage}.{block}"
            for number, shape in enumerate(
                ((width, planes, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)), 1
            ):
                shapes.append((f"{name}.conv{number}.weight", shape))
                shapes += _norm(f"{name}.bn{number}", shape[0])
            if block == 0:
                shapes.append((f"{name}.downsample.0.weight", (4 * width, planes, 1, 1)))
                shapes += _norm(f"{name}.downsample.1", 4 * width)
            planes = 4 * width
    return [*shapes, ("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]


def lenet_shapes() -> Shapes:
    """Returns the LeNet-5 of Fashion-MNIST: 10 tensors, 61,706 elements."""
    layers = [("0", (6, 1, 5, 5)), ("3", (16, 6, 5, 5)), ("7", (120, 400)), ("9", (84, 120))]
    layers.append(("11", (10, 84)))
    shapes: Shapes = []
    for name, shape in layers:
        shapes += [(f"{name}.weight", shape), (f"{name}.bias", (shape[0],))]
    return shapes


def _norm(name: str, width: int) -> Shapes:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


MODELS: dict[str, Callable[[], Shapes]] = {"lenet": lenet_shapes, "resnet50": resnet50_shapes}


def shapes_of(model: str) -> Shapes:
    """Returns the trained parameters of `module:factory`, or of a model known by name.

    Raises:
        ConfigError: There is no such model, or the factory does not return one.
    """
    if model in MODELS:
        return MODELS[model]()
    module_name, colon, factory_name = model.partition(":")
    if not colon:
        known = ", ".join(sorted(MODELS))
        raise ConfigError(f"model is {model!r}, must be one of {known}, or module:factory")
    with _users_code(model):
        made = _make(model, module_name, factory_name)
        found = [(n, tuple(w.shape)) for n, w in made.named_parameters() if w.requires_grad]
    if not found:
        raise ConfigError(f"{model!r} has no parameters that are trained")
    return found


@contextlib.contextmanager
def _users_code(model: str) -> Iterator[None]:
    """Turns an exception of the user's module or factory into one sentence."""
    sys.path.insert(0, os.getcwd())  # As `python -m` does.
    try:
        yield
    except ConfigError:
        raise
    except Exception as problem:
        how = f"{type(problem).__name__}: {problem}"
        raise ConfigError(f"model {model!r} cannot be made without arguments: {how}") from problem
    finally:
        sys.path.pop(0)


def _make(model: str, module_name: str, factory_name: str) -> Any:
    factory = getattr(importlib.import_module(module_name), factory_name, None)
    if not callable(factory):
        raise ConfigError(f"module {module_name!r} has no function or class {factory_name!r}")
    made = factory()
    if isinstance(made, type) or not hasattr(made, "named_parameters"):
        raise ConfigError(f"{model!r} returns {made!r:.80}, must return a torch module")
    return made


# ----- for people


def lines_of(report: Report) -> list[str]:
    """Returns the report as lines for a terminal."""
    lines = [
        f"{report.num_tensors} tensors, {report.num_elements:,} elements, {report.num_slices} "
        f"slices of at most {_mib(report.slice_nbytes_max)}",
        *(
            f"shard {index}: {shard['num_slices']} slices, {_mib(shard['nbytes'])} of weights"
            for index, shard in enumerate(report.shards)
        ),
        f"{report.mode}, compression {report.compression}, of pulls {report.pull_compression}, "
        f"{report.optimizer} on the shards",
        f"per worker and step, as a mean over {report.period_steps} after the warm-up: "
        f"{_mib(report.pushed_nbytes)} pushed, {_mib(report.pulled_nbytes)} pulled",
        f"DDP of {report.num_workers} workers, uncompressed: {_mib(report.ddp_nbytes)} sent, and "
        f"as much received{_beside_ddp(report)}",
    ]
    if report.tokens:
        up, down, ddp = (
            nbytes / report.tokens
            for nbytes in (report.pushed_nbytes, report.pulled_nbytes, report.ddp_nbytes)
        )
        lines.append(
            f"bytes per token or sample, {report.tokens} in a step: {up:.4g} pushed, {down:.4g} "
            f"pulled; DDP {ddp:.4g} each way"
        )
    if report.caution:
        lines.append(f"warning: {report.caution}")
    kept = report.uncompressed
    if (report.compression, report.pull_compression) != ("none", "none") and kept:
        listed = ", ".join(kept[:6]) + (", ..." if len(kept) > 6 else "")  # noqa: PLR2004
        lines.append(f"always uncompressed: {len(kept)} tensors: {listed}")
    return lines


def _beside_ddp(report: Report) -> str:
    """Returns the shares of DDP's bytes, if there are any."""
    if not report.ddp_nbytes:
        return ""
    up, down = report.pushed_nbytes / report.ddp_nbytes, report.pulled_nbytes / report.ddp_nbytes
    return f"; of that {up:.2%} are pushed, {down:.2%} pulled"


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.2f} MiB"
