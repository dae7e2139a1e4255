"""`psworker plan`: the slices of a model, and the bytes that a step of a mode moves."""

from __future__ import annotations

from dataclasses import dataclass

from pscore.compressors import parse_compressor
from pscore.compressors.base import Compressor
from pscore.errors import ConfigError
from pscore.estimate import parse_pull_compressor
from pscore.net.wire import FLOAT_NBYTES
from pscore.optimizers import OPTIMIZERS
from pscore.optimizers.base import Optimizer
from pscore.partition import make_layout
from pscore.rules.base import Rule, require_slices
from pscore.timing.auto import parse_fixed_mode
from pscore.timing.plans import by_step, mean_of
from pscore.types import TensorSpec
from psworker.commands.models import make_model
from psworker.compression.error_feedback import choose
from psworker.connection.accounts.mode_traffic import MIN_NBYTES
from psworker.connection.accounts.traffic import ddp_nbytes

Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """The mode of a job, its compressors and its optimizer."""

    rule: Rule
    compressor: Compressor
    pull_compressor: Compressor
    optimizer: Optimizer  # Optimizer of the shards.


def parse_job(mode: str, compression: str, pull_compression: str, optimizer: str) -> PlannedJob:
    """Returns the job that the flags of a command name.

    Raises:
        ConfigError: There is no such mode, compressor or optimizer.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {optimizer!r}, must be one of {', '.join(OPTIMIZERS)}")
    return PlannedJob(
        rule=parse_fixed_mode(mode),
        compressor=parse_compressor(compression),
        pull_compressor=parse_pull_compressor(pull_compression),
        optimizer=OPTIMIZERS[optimizer](),
    )


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
    pushed_peak_nbytes: float  # In the step with the most.
    pulled_peak_nbytes: float
    num_workers: int
    ddp_nbytes: float  # That a worker of DDP sends in a step, and receives: a ring of all workers.
    caution: str  # The reason not to use the compressor with the mode; empty: none.
    tokens: int  # Tokens, or samples, of a worker's step; 0: not given.
    uncompressed: list[str]  # Tensors that are pushed uncompressed in every step.


def make_report(
    shapes: Shapes, job: PlannedJob, num_shards: int, num_workers: int = 2, tokens: int = 0
) -> Report:
    """Returns the plan of a model.

    Args:
        shapes: Names and shapes of its trained parameters, in order.
        num_workers: Workers of the job, for the bytes of DDP.
        tokens: Tokens, or samples, of a worker's step; 0: bytes are per step only.

    Raises:
        ConfigError: There is no such layout, or the mode does not fit it or the number of workers.
    """
    tensors = [TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes]
    rule, compressors = job.rule, (job.compressor, job.pull_compressor)
    tensors = choose(tensors, *compressors, min_nbytes=MIN_NBYTES, exclude=())
    rule.require_workers(num_workers)
    layout = make_layout(tensors, num_shards)
    require_slices(rule, len(layout.slices))
    num_elements = sum(spec.numel for spec in tensors)
    steps = by_step(layout.slices, rule, compressors, len(job.optimizer.state_names))
    (pushed, pulled), peaks = mean_of(steps), [max(each) for each in zip(*steps, strict=True)]
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
        compression=str(job.compressor),
        pull_compression=str(job.pull_compressor),
        optimizer=job.optimizer.name,
        period_steps=len(steps),
        pushed_nbytes=pushed,
        pulled_nbytes=pulled,
        pushed_peak_nbytes=peaks[0],
        pulled_peak_nbytes=peaks[1],
        num_workers=num_workers,
        ddp_nbytes=ddp_nbytes(num_elements, num_workers),
        caution=rule.caution(job.compressor),
        tokens=tokens,
        uncompressed=[spec.name for spec in tensors if not spec.compress],
    )


def shapes_of(model: str) -> Shapes:
    """Returns the trained parameters of `module:factory`, or of a model known by name.

    Raises:
        ConfigError: There is no such model, or the factory does not return one.
    """
    module = make_model(model, "meta")
    shapes = [(n, tuple(w.shape)) for n, w in module.named_parameters() if w.requires_grad]
    if not shapes:
        raise ConfigError(f"{model!r} has no parameters that are trained")
    return shapes


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
        f"{_mib(report.pushed_nbytes)} pushed, {_mib(report.pulled_nbytes)} pulled; in the step "
        f"with the most {_mib(report.pushed_peak_nbytes)} and {_mib(report.pulled_peak_nbytes)}",
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
