"""`psworker bench compressors`: the cost and gain of each compressor on this machine.

Encoding and decoding are measured on one core of this machine; the link by pushing and pulling
slices of 4 MiB through the data plane that training would use, or it is taken as given. A step is
then two pipelines over the model's slices, as long as the slowest stage and one slice of the rest:

    push    encode (worker)  ->  send  ->  add (shard)              one for each worker
    pull    encode (shard)   ->  send  ->  add (worker)             `none`: send alone

With N workers and S shards of equal links a shard's link carries N / S times what a worker's does,
if that is more than one, and its core adds N / S payloads. Time hidden behind computing is not
counted: `compute_s` of each step is free. The model knows no losses of accuracy: of compressors
that save nearly the same the mildest is advised, and none if nothing is saved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from pscore.compressors import parse_compressor
from pscore.compressors.base import RESIDUAL, Compressor
from pscore.compressors.none import NoCompression
from pscore.estimate import fingerprint
from pscore.memory import kernels
from pscore.optimizers.assign import Assign
from pscore.partition import SLICE_NUMEL_MAX, SLICES_PER_SHARD, Layout, make_layout
from pscore.rules.asgd import ASGD
from pscore.table_spec import TableSpec
from pscore.timing.shown import in_ms, three_figures
from pscore.types import Push, Role, TensorSpec
from psworker.commands.model_plan import Shapes
from psworker.commands.run import new_job
from psworker.compression.error_feedback import choose
from psworker.connection.accounts.mode_traffic import MIN_NBYTES
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.membership.session import Session
from psworker.job.context import open_session
from psworker.job.environment import Environment
from psworker.job.own_shards import start_shards
from psworker.replica.ports import PullBuffer

# From the mildest to the harshest.
NAMES = (
    "bf16",
    "fp16",
    "int8",
    "2bit",
    "1bit",
    "topk(ratio=0.01)",
    "topk(ratio=0.001, select=sampled)",
)
CACHE_NUMEL = 1 << 24  # 64 MiB of float32: more than most caches hold.
ROUNDS_MIN, ROUNDS_MAX, BUDGET_S = 3, 15, 1.0
WORTH = 0.1  # Share of an uncompressed step: less than that is not worth a compressor.
NEARLY = 0.8  # Share of the best saving: then the mildest of them is advised.
MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How bytes travel between this machine and one shard, in bytes per second.

    A payload in shared memory does not travel: its speed is that of a notice.
    """

    name: str
    raw_up: float  # Uncompressed slices, which may lie in shared memory.
    raw_down: float
    packed_up: float  # Payloads, which travel.
    packed_down: float
    latency_s: float  # From a request to its answer.

    @classmethod
    def given(cls, gbit: float, latency_s: float) -> Wire:
        """Returns a link of `gbit` 10^9 bits per second, the same both ways."""
        speed = gbit * 125e6
        return cls(
            name=f"{gbit:g} Gbit/s, as given",
            raw_up=speed,
            raw_down=speed,
            packed_up=speed,
            packed_down=speed,
            latency_s=latency_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorCost:
    """One compressor on this machine."""

    nbytes: float  # Payload bytes per element.
    encode_s: float  # Seconds per element, on one core.
    add_s: float  # Seconds per element: decode into a sum.


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The effect of a compressor on a step of one worker."""

    compression: str
    pushed_nbytes: float
    encode_s: float  # Seconds for the whole gradient.
    add_s: float
    step_s: float  # With compressed pushes; only the time that computing does not hide.
    both_ways_s: float | None  # Pulls too; None: not one for pulls.


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorReport:
    """The result of `psworker bench compressors`."""

    model: str
    num_elements: int
    num_workers: int
    num_shards: int
    compute_s: float
    wire: Wire
    rows: list[Row]  # `none` first.
    advice: str  # A compressor, or `none`.
    both_ways: bool  # Whether pulls are to be compressed too.
    text: str


# ----- measuring


def timed(work: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    """Returns the median of a few runs, in seconds; the first is not counted."""
    work()
    times: list[float] = []
    started_s = now()
    while len(times) < ROUNDS_MIN or (len(times) < ROUNDS_MAX and now() - started_s < BUDGET_S):
        before_s = now()
        work()
        times.append(now() - before_s)
    return statistics.median(times)


def measure_cost(compressor: Compressor, numel: int, num_slices: int) -> CompressorCost:
    """Measures one compressor on normal gradients.

    Args:
        num_slices: Number of slices of the model; so many are worked on in turn, as far as that
            leaves the cache.
    """
    count = max(1, min(num_slices, CACHE_NUMEL // numel))
    drawn = np.random.default_rng(0).standard_normal(count * numel, dtype=np.float32)
    grads = np.split(drawn * np.float32(0.01), count)
    targets = np.split(np.zeros(count * numel, dtype=np.float32), count)
    num_all = count * numel
    if compressor.is_raw:

        def add_raw() -> None:
            for grad, target in zip(grads, targets, strict=True):
                kernels.add_scaled(grad, target, 0.5)

        return CompressorCost(nbytes=4.0, encode_s=0.0, add_s=timed(add_raw) / num_all)
    states = [
        {name: np.zeros(numel, dtype=np.float32) for name in compressor.state_names}
        for _ in range(count)
    ]
    longest = compressor.payload_nbytes_max(numel)
    buffers = [np.zeros(longest, dtype=np.uint8) for _ in range(count)]
    sent = [longest] * count

    def encode() -> None:
        for i in range(count):
            sent[i] = compressor.encode(grads[i], states[i], buffers[i], seed=i, step=1 << 30)

    def add() -> None:
        for i in range(count):
            compressor.decode_add(buffers[i][: sent[i]], targets[i], 0.5, assign=False)

    encode_s = timed(encode)
    return CompressorCost(
        nbytes=sum(sent) / num_all, encode_s=encode_s / num_all, add_s=timed(add) / num_all
    )


def measure_wire_to(servers: Sequence[str]) -> Wire:
    """Measures the link to the shards; without any, to one that is started here.

    Raises:
        PacelineError: They do not answer, or refuse this worker.
    """
    torch.set_num_threads(1)
    own = None if servers else start_shards()
    try:
        environment = replace(
            Environment.read({}), data_plane=Environment.read().data_plane, job=new_job(), rank=0
        )
        session = open_session(own.addresses if own else servers, environment)
        try:
            return measure_wire(session)
        finally:
            session.leave("the link is measured")
    finally:
        if own is not None:
            own.end()


def measure_wire(session: Session) -> Wire:
    """Measures the link to the first shard that training's slices would use."""
    raw_up, raw_down, _ = _through(session, "bench.raw", share=True)
    packed_up, packed_down, latency_s = _through(session, "bench.packed", share=False)
    link = session.links[0]
    plane = "shared memory" if link.transport.shares_memory else link.transport.name
    return Wire(
        name=f"{plane} to {link.address}, measured",
        raw_up=raw_up,
        raw_down=raw_down,
        packed_up=packed_up,
        packed_down=packed_down,
        latency_s=latency_s,
    )


def _through(session: Session, name: str, *, share: bool) -> tuple[float, float, float]:
    """Returns bytes per second up and down, and the seconds of an empty round trip."""
    num_shards = len(session.links)
    numel = SLICES_PER_SHARD * SLICE_NUMEL_MAX * num_shards
    tensors = [
        TensorSpec(
            name="small", shape=(16,), dtype="float32", compress=True
        ),  # A slice of its own.
        TensorSpec(name="large", shape=(numel,), dtype="float32"),
    ]
    declared = TableSpec(
        name=name,
        tensors=tuple(tensors),
        num_shards=num_shards,
        rule=ASGD(),
        compressor=NoCompression(),
        optimizer=Assign.name,
        num_groups=1,
    )
    table = Exchange(session, declared, share=share)
    layout = table.layout
    flat = torch.zeros(layout.numel) if table.grads is None else torch.from_numpy(table.grads)
    weights = torch.zeros(layout.numel)
    for spec in layout.slices:
        table.load(spec.index, Role.WEIGHTS, [np.zeros(spec.numel, dtype=np.float32)], [])
    table.flush()

    def push(indices: Sequence[int]) -> None:
        hyper = np.zeros((1, len(Assign.hyper_names)))
        for index in indices:
            spec = layout.slices[index]
            # Always the same step: the shard drops repeated pushes after receiving them, so only
            # the link is measured, and not the shard's own work.
            pushed = Push(worker=session.rank, step=0, base_version=0, hyper=hyper)
            table.push(index, pushed, flat[spec.start : spec.stop], compress=False)
        table.flush()

    def pull(indices: Sequence[int]) -> None:
        for index in indices:
            spec = layout.slices[index]
            pull_buffer = PullBuffer(weights=weights[spec.start : spec.stop], state=[])
            table.pull(index, 0, 0, pull_buffer, with_state=False)
        table.run(indices)

    small = next(spec.index for spec in layout.slices if spec.compress)
    large = [spec.index for spec in layout.of_shard(0) if spec.index != small]
    nbytes = 4.0 * sum(layout.slices[index].numel for index in large)
    latency_s = timed(lambda: pull([small]))
    return nbytes / timed(lambda: push(large)), nbytes / timed(lambda: pull(large)), latency_s


def show(report: CompressorReport) -> None:
    """Prints the table and the advice."""
    grid = Table(box=box.SIMPLE_HEAD, title=_title(report), title_justify="left")
    grid.add_column("compressor", no_wrap=True)
    for column in ("MB pushed", "encode ms", "add ms", "step ms", "saves", "both ways", "saves"):
        grid.add_column(column, justify="right")
    base_s = report.rows[0].step_s
    for row in report.rows:
        both = ("", "") if row.both_ways_s is None else _against(row.both_ways_s, base_s)
        grid.add_row(
            row.compression,
            three_figures(row.pushed_nbytes / 1e6),
            three_figures(MS * row.encode_s),
            three_figures(MS * row.add_s),
            *_against(row.step_s, base_s),
            *both,
        )
    console = Console(highlight=False, width=110)
    console.print(grid)
    console.print(report.text, markup=False)


def _title(report: CompressorReport) -> str:
    wire = report.wire
    speeds = ", ".join(
        f"{name} {three_figures(8e-9 * speed)}"
        for name, speed in (
            ("raw up", wire.raw_up),
            ("down", wire.raw_down),
            ("packed up", wire.packed_up),
            ("down", wire.packed_down),
        )
    )
    return (
        f"{report.model}: {report.num_elements:,} elements, {report.num_workers} workers, "
        f"{report.num_shards} shards, {MS * report.compute_s:g} ms of computing a step\n"
        f"{wire.name}: {speeds} Gbit/s, {in_ms(wire.latency_s)} there and back"
    )


def _against(seconds: float, base_s: float) -> tuple[str, str]:
    saved = f"{100 * (1 - seconds / base_s):.0f} %" if base_s > 0 else ""
    return three_figures(MS * seconds), saved


# ----- the model of a step


def pipeline_s(stages: Sequence[float], num_slices: int) -> float:
    """Returns the duration of work that passes through stages slice by slice."""
    longest = max(stages)
    return longest + (sum(stages) - longest) / max(1, num_slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Elements that a step of one worker moves, uncompressed and packed."""

    packed: int  # Elements that a compressor may be used for.
    rest: int
    num_slices: int
    wire: Wire
    num_workers: int
    num_shards: int
    compute_s: float

    @property
    def crowd(self) -> float:
        """The traffic of a shard's link relative to a worker's, at least 1."""
        return max(1.0, self.num_workers / self.num_shards)

    def push_s(self, cost: CompressorCost, plain: CompressorCost) -> float:
        """Returns the seconds of the pushes; `plain` is the cost of `none`."""
        is_raw = cost is plain
        speed = self.wire.raw_up if is_raw else self.wire.packed_up
        send_s = cost.nbytes * self.packed / speed + 4.0 * self.rest / self.wire.raw_up
        add_s = (cost.add_s * self.packed + plain.add_s * self.rest) * self.num_workers
        stages = (cost.encode_s * self.packed, send_s * self.crowd, add_s / self.num_shards)
        return pipeline_s(stages, self.num_slices) + self.wire.latency_s

    def pull_s(self, cost: CompressorCost, plain: CompressorCost, hash_s: float) -> float:
        """Returns the seconds of the pulls; `hash_s` is that of a fingerprint, per element."""
        is_raw = cost is plain
        speed = self.wire.raw_down if is_raw else self.wire.packed_down
        send_s = cost.nbytes * self.packed / speed + 4.0 * self.rest / self.wire.raw_down
        stages = [send_s * self.crowd]
        if not is_raw:
            stages.append((cost.encode_s + cost.add_s + hash_s) * self.packed / self.num_shards)
            stages.append((cost.add_s + hash_s) * self.packed)
        return pipeline_s(stages, self.num_slices) + self.wire.latency_s

    def row(
        self,
        name: str,
        compressor: Compressor,
        cost: CompressorCost,
        plain: CompressorCost,
        hash_s: float,
    ) -> Row:
        """Returns the effect of a compressor on this step."""
        push_s = self.push_s(cost, plain)
        both_s = None
        if compressor.state_names == (RESIDUAL,):
            both_s = self._left(push_s + self.pull_s(cost, plain, hash_s))
        return Row(
            compression=name,
            pushed_nbytes=cost.nbytes * self.packed + 4.0 * self.rest,
            encode_s=cost.encode_s * self.packed,
            add_s=cost.add_s * self.packed,
            step_s=self._left(push_s + self.pull_s(plain, plain, hash_s)),
            both_ways_s=both_s,
        )

    def _left(self, seconds: float) -> float:
        return max(0.0, seconds - self.compute_s)


def make_report(
    model: str,
    shapes: Shapes,
    wire: Wire,
    *,
    names: Sequence[str] = NAMES,
    num_workers: int = 1,
    num_shards: int = 1,
    compute_s: float = 0.0,
    min_nbytes: int = MIN_NBYTES,
    cost_of: Callable[[Compressor, int, int], CompressorCost] = measure_cost,
) -> CompressorReport:
    """Returns the effect of each compressor on a step of a model.

    Args:
        shapes: Names and shapes of its trained parameters, in order.
        wire: The link between one worker and one shard.
        names: Compressors as `compression=` takes them, the mildest first.
        compute_s: Computing time of a step, in seconds, that hides as much of its pushes and pulls.
        min_nbytes: Smaller parameters are not compressed, in bytes of float32.
        cost_of: Measures one compressor on slices of so many elements, so many of them.

    Raises:
        ConfigError: There is no such compressor.
    """
    compressors = {name: parse_compressor(name) for name in names if name != "none"}
    layout = _layout(shapes, num_shards, min_nbytes)
    packed = sum(spec.numel for spec in layout.slices if spec.compress)
    step = Step(
        packed=packed,
        rest=sum(spec.numel for spec in layout.slices) - packed,
        num_slices=len(layout.slices) // num_shards,
        wire=wire,
        num_workers=num_workers,
        num_shards=num_shards,
        compute_s=compute_s,
    )
    numel = max((spec.numel for spec in layout.slices if spec.compress), default=1)
    num_slices = sum(spec.compress for spec in layout.slices)
    plain = cost_of(NoCompression(), numel, num_slices)
    values = np.ones(numel, dtype=np.float32)
    hash_s = timed(lambda: fingerprint(values)) / numel
    rows = [step.row("none", NoCompression(), plain, plain, hash_s)]
    for name, compressor in compressors.items():
        cost = cost_of(compressor, numel, num_slices)
        rows.append(step.row(name, compressor, cost, plain, hash_s))
    advice, both_ways, text = advise(rows)
    return CompressorReport(
        model=model,
        num_elements=sum(tensor.numel for tensor in layout.tensors),
        num_workers=num_workers,
        num_shards=num_shards,
        compute_s=compute_s,
        wire=wire,
        rows=rows,
        advice=advice,
        both_ways=both_ways,
        text=text,
    )


def _layout(shapes: Shapes, num_shards: int, min_nbytes: int) -> Layout:
    """Returns the layout of a model on the shards if its pushes are compressed."""
    tensors = [TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes]
    chosen = choose(tensors, parse_compressor("bf16"), min_nbytes=min_nbytes, exclude=())
    return make_layout(chosen, num_shards)


def advise(rows: Sequence[Row]) -> tuple[str, bool, str]:
    """Returns a compressor (or `none`), whether pulls are to be compressed too, and a sentence.

    Args:
        rows: `none` first, then from the mildest to the harshest.
    """
    base_s = rows[0].step_s
    choices = [
        (row.compression, both_ways, base_s - seconds)
        for row in rows[1:]
        for both_ways, seconds in ((False, row.step_s), (True, row.both_ways_s))
        if seconds is not None
    ]
    best_s = max((saved_s for _, _, saved_s in choices), default=0.0)
    if base_s <= 0.0:
        return "none", False, "do not compress: computing hides all traffic of a step"
    if best_s < WORTH * base_s:
        return "none", False, (
            f"do not compress: of the {in_ms(base_s)} that a step waits uncompressed, no "
            f"compressor saves more than {in_ms(max(0.0, best_s))}"
        )  # fmt: skip
    name, both_ways, saved_s = next(item for item in choices if item[2] >= NEARLY * best_s)
    argument = f'compression="{name}"' + (f', pull_compression="{name}"' if both_ways else "")
    return name, both_ways, (
        f"{argument}: saves {three_figures(MS * saved_s)} of {in_ms(base_s)} a step; see "
        "docs/compressors.md for what it costs in accuracy"
    )  # fmt: skip
