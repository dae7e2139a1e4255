"""Compressors and local updates against a memory copy: encode, decode-accumulate, update.

    python -m benchmarks.compressors --json
    python -m benchmarks.compressors --large --only 2bit 1bit

25.6 million float32 (`--large`: 128 million) in slices of a million, as a worker and a shard have
them; on the CPU one core. Each measurement has a copy of the whole gradient right before it, and
its share is taken against that copy, so that other work on the machine slows both. The share is
the bytes that the method has to move, per second, over the bytes that the copy moves, per second:

    copy       read 4 n, write 4 n
    encode     read gradient 4 n, read and write each state array 8 n, write the payload
    decode     read the payload, read and write the accumulator 8 n (sparse: the touched part)
    update     read and write the arrays of the formula

So 1.0 is as fast as memory goes; more than 1 is possible, because reading is faster than writing.
`x copy` is the plain ratio of times. Beside them is what one would write in torch, as it is and
through torch.compile. On a GPU, if there is one, encode and update are measured
alike with that device's encoder (`pscore/cuda/choice.py`), against a copy on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import kit
from pscore.compressors import Compressor, parse_compressor
from pscore.compressors.base import LARGEST
from pscore.cuda.choice import make_encoder
from pscore.cuda.local import kernels_for
from pscore.cuda.runtime import advice, launcher
from pscore.local import LocalSlice, LocalUpdate
from pscore.local.dc import DC
from pscore.local.glu import GLU
from pscore.local.mirror import Mirror
from pscore.local.secant import Secant
from pscore.local.sgd import PlainSGD
from pscore.optimizers import OPTIMIZERS
from pscore.optimizers.base import SliceStep
from pscore.types import SegmentTable

SLICE_NUMEL = 1 << 20
NUMEL, LARGE_NUMEL = 25_600_000, 128_000_000
NAMES = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "2bit",
    "2bit(threshold=0.004)",
    "1bit",
    "qsgd",
    "terngrad",
    "natural",
    "topk",
    "topk(ratio=0.001, select=sampled)",
    "randomk",
    "dgc",
)
SPARSE = ("topk", "randomk", "dgc")
HYPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One thing that was measured, beside copies of the gradient."""

    what: str
    nbytes: float  # That it has to move.
    times_s: list[float]
    copies_s: list[float]
    numel: int

    @property
    def of_copy(self) -> float:
        """The median of its share of the copy's bandwidth."""
        copied = 8 * self.numel
        pairs = zip(self.times_s, self.copies_s, strict=True)
        return statistics.median(
            self.nbytes / time_s / (copied / copy_s) for time_s, copy_s in pairs
        )

    @property
    def times_copy(self) -> float:
        """The median of its time over the copy's."""
        pairs = zip(self.times_s, self.copies_s, strict=True)
        return statistics.median(time_s / copy_s for time_s, copy_s in pairs)

    def row(self) -> list[Any]:
        """Returns its line of the table."""
        best_s = min(self.times_s)
        gbps = self.nbytes / best_s / 1e9
        return [self.what, 1e3 * best_s, gbps, self.times_copy, self.of_copy]


def measure(
    what: str, nbytes: float, numel: int, work: Callable[[], Any], copy: Callable[[], Any],
    rounds: int, now: Callable[[], float],
) -> Measured:  # fmt: skip
    """Runs copy and work by turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + rounds):
        for kept, call in zip(times, (copy, work), strict=True):
            start_s = now()
            call()
            if turn >= WARM_UP:
                kept.append(now() - start_s)
            else:
                now()
    return Measured(what=what, nbytes=nbytes, times_s=times[1], copies_s=times[0], numel=numel)


def slices(numel: int) -> list[slice]:
    """Returns the parts that a shard owns one of each."""
    return [slice(start, min(start + SLICE_NUMEL, numel)) for start in range(0, numel, SLICE_NUMEL)]


def gradient(numel: int) -> np.ndarray:
    """Returns a normal gradient."""
    return np.random.default_rng(0).standard_normal(numel, dtype=np.float32) * np.float32(0.01)


class Host:
    """The CPU, one core."""

    def __init__(self, numel: int, rounds: int) -> None:
        self.numel, self.rounds = numel, rounds
        self.grad = gradient(numel)
        self.target = np.zeros(numel, dtype=np.float32)

    def run(self, what: str, nbytes: float, work: Callable[[], Any]) -> Measured:
        """Measures beside copies."""
        copy = lambda: np.copyto(self.target, self.grad)  # noqa: E731
        # The thread's own clock: while other work has the core, nothing is counted.
        return measure(what, nbytes, self.numel, work, copy, self.rounds, time.thread_time)

    def compressor(self, name: str) -> tuple[Measured, Measured, float]:
        """Measures encode and decode-accumulate; returns the bytes per element too."""
        compressor, parts = parse_compressor(name), slices(self.numel)
        state = {key: np.zeros(self.numel, np.float32) for key in compressor.state_names}
        largest = [np.zeros(1, np.float32) for _ in parts]  # As a worker keeps it.
        longest = [compressor.payload_nbytes_max(part.stop - part.start) for part in parts]
        buffers = [np.zeros(nbytes, np.uint8) for nbytes in longest]
        sent, out = list(longest), np.zeros(self.numel, np.float32)

        def encode() -> None:
            for index, part in enumerate(parts):
                views = {key: array[part] for key, array in state.items()}
                views[LARGEST] = largest[index]
                sent[index] = compressor.encode(
                    self.grad[part], views, buffers[index], seed=index, step=1 << 30
                )

        def decode() -> None:
            for index, part in enumerate(parts):
                payload = buffers[index][: sent[index]]
                compressor.decode_add(payload, out[part], 0.5, assign=False)

        encode()
        payload_nbytes = sum(sent)
        moved = 4 * self.numel + 8 * self.numel * len(state) + payload_nbytes
        first = self.run(f"encode {name}", moved, encode)
        payload_nbytes = sum(sent)
        touched = 8 * self.numel
        if compressor.name in SPARSE:
            touched = 2 * payload_nbytes
        second = self.run(f"decode {name}", payload_nbytes + touched, decode)
        return first, second, payload_nbytes / self.numel

    def updates(self) -> list[Measured]:
        """Measures the local updates and the shard's SGD step."""
        found = []
        for what, arrays, work in local_updates(torch.from_numpy(self.grad)):
            found.append(self.run(f"local {what}", 4 * arrays * self.numel, work))
        part, grad = one_slice(torch.from_numpy(self.grad)), self.grad
        out, buffer = np.zeros(self.numel, np.float32), np.zeros(self.numel, np.float32)
        weights = part.weights.numpy()

        def step() -> None:
            rest = (part.segments, part.counts, part.active, part.hyper)
            part.optimizer.step(SliceStep(weights, out, grad, 0.5, [buffer], *rest))

        found.append(self.run("shard's SGD step with momentum", 20 * self.numel, step))
        return found

    def torchs(self) -> list[Measured]:
        """Measures what one would write in torch, on the same core."""
        grad = torch.from_numpy(self.grad)
        found = []
        for what, nbytes, work in [*torch_work(grad), *compiled_work(grad)]:
            found.append(self.run(what, nbytes * self.numel, work))
        return found


class Device:
    """A GPU, or the CPU in place of one."""

    def __init__(self, numel: int, rounds: int, device: torch.device) -> None:
        self.numel, self.rounds, self.device = numel, rounds, device
        self.grad = torch.from_numpy(gradient(numel)).to(self.device)
        self.target = torch.zeros_like(self.grad)

    def run(self, what: str, nbytes: float, work: Callable[[], Any]) -> Measured:
        """Measures by the device's own clock beside copies."""

        def now() -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

        copy = lambda: self.target.copy_(self.grad)  # noqa: E731
        return measure(what, nbytes, self.numel, work, copy, self.rounds, now)

    def compressor(self, name: str) -> Measured | None:
        """Measures encode; None where the host has to, or nothing is encoded."""
        compressor = parse_compressor(name)
        encoder = None if compressor.is_raw else make_encoder(compressor, self.numel, self.device)
        if encoder is None:
            return None
        work = lambda: encoder.encode(self.grad, seed=1, step=1 << 30)  # noqa: E731
        return self.run(f"encode {name}", self._moved(encoder.compressor), work)

    def updates(self) -> list[Measured]:
        """Measures the local updates."""
        return [
            self.run(f"local {what}", 4 * arrays * self.numel, work)
            for what, arrays, work in local_updates(self.grad)
        ]

    def torchs(self) -> list[Measured]:
        """Measures what one would write in torch."""
        return [
            self.run(what, nbytes * self.numel, work)
            for what, nbytes, work in [*torch_work(self.grad), *compiled_work(self.grad)]
        ]

    def _moved(self, compressor: Compressor) -> float:
        state = 8 * self.numel * len(compressor.state_names)
        return 4 * self.numel + state + compressor.payload_nbytes_max(self.numel)


def one_slice(grad: torch.Tensor) -> LocalSlice:
    """Returns a slice of one segment for local updates."""
    optimizer = OPTIMIZERS["sgd"]()
    hyper = np.array([[HYPER.get(name, 0.0) for name in optimizer.hyper_names]])
    return LocalSlice(
        weights=torch.zeros_like(grad),
        segments=SegmentTable(
            bounds=np.array([[0, len(grad)]], np.int64), groups=np.zeros(1, np.int64)
        ),
        optimizer=optimizer,
        hyper=hyper,
        active=np.ones(1, np.int64),
        counts=np.ones(1, np.int64),
        kernels=kernels_for(grad),
    )


def local_updates(grad: torch.Tensor) -> list[tuple[str, int, Callable[[], None]]]:
    """Returns name, float32 arrays read and written per element, and the work."""
    updates: list[tuple[LocalUpdate, int]] = [
        (PlainSGD(), 3),
        (GLU(), 5),
        (Secant(), 4),
        (DC(), 5),
        (Mirror(), 5),
    ]

    def work(update: LocalUpdate) -> Callable[[], None]:
        part = one_slice(grad)
        return lambda: update.update(part, grad)

    return [(update.name, arrays, work(update)) for update, arrays in updates]


def torch_work(grad: torch.Tensor) -> list[tuple[str, float, Callable[[], Any]]]:
    """Returns name, bytes that the method has to move per element, and the work in plain torch."""
    residual, weights = torch.zeros_like(grad), torch.zeros_like(grad)
    buffer, threshold = torch.zeros_like(grad), 0.004

    def two_bit() -> torch.Tensor:
        total = residual.add_(grad)
        up, down = total >= threshold, total <= -threshold
        residual.sub_(up.float() - down.float(), alpha=threshold)
        codes = (up.to(torch.uint8) * 3 + down.to(torch.uint8) * 2).view(-1, 4)
        return codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]

    def half() -> torch.Tensor:
        sent = residual.add_(grad).half()
        residual.sub_(sent)
        return sent

    def momentum() -> None:
        step = grad.add(weights, alpha=HYPER["weight_decay"])
        buffer.mul_(HYPER["momentum"]).add_(step)
        weights.add_(buffer, alpha=-HYPER["lr"])

    return [
        ("torch: 2bit(threshold=0.004) with feedback", 12.25, two_bit),
        ("torch: fp16 with feedback", 14.0, half),
        ("torch: SGD step with momentum", 20.0, momentum),
    ]


def compiled_work(grad: torch.Tensor) -> list[tuple[str, float, Callable[[], Any]]]:
    """Returns the same through torch.compile; nothing where there is no compiler for it."""
    variable, usual = ("CXX", "g++") if grad.device.type == "cpu" else ("CC", "gcc")
    if shutil.which(os.environ.get(variable, usual)) is None:
        print(f"no {usual}: torch.compile is not measured")
        return []
    return [
        (what.replace("torch:", "torch.compile:"), nbytes, torch.compile(work))
        for what, nbytes, work in torch_work(grad)
    ]


COLUMNS = ["what", "best ms", "GB/s moved", "x copy", "of copy"]


def on_host(numel: int, rounds: int, names: list[str]) -> tuple[dict[str, Any], dict[str, float]]:
    """Measures the CPU, prints its table, and returns its compressors' shares and its bars."""
    host = Host(numel, rounds)
    shares: dict[str, Any] = {}
    rows: list[list[Any]] = []
    bars: dict[str, float] = {}
    for name in names:
        encode, decode, nbytes = host.compressor(name)
        rows += [[*encode.row(), nbytes], [*decode.row(), nbytes]]
        shares[name] = {"encode_of_copy": encode.of_copy, "decode_of_copy": decode.of_copy}
        bars |= {encode.what: encode.of_copy, decode.what: decode.of_copy}
    updates = host.updates()
    rows += [[*item.row(), ""] for item in [*updates, *host.torchs()]]
    bars |= {item.what: item.of_copy for item in updates}
    title = f"{numel / 1e6:g} million float32 on one CPU core, {rounds} rounds"
    kit.show(title, [*COLUMNS, "payload bytes/element"], rows)
    return shares, bars


def on_device(numel: int, rounds: int, names: Sequence[str], where: torch.device) -> list[Measured]:
    """Measures a device, prints its table, and returns it: compressors, local updates, torch."""
    device = Device(numel, rounds, where)
    if launcher(where) is None:
        print(advice(torch.version.cuda))
    encoded = [item for name in names if (item := device.compressor(name)) is not None]
    found = [*encoded, *device.updates(), *device.torchs()]
    title = f"{numel / 1e6:g} million float32 on {where}, {rounds} rounds"
    kit.show(title, COLUMNS, [item.row() for item in found])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--large", action="store_true", help="128 million elements")
    parser.add_argument("--numel", type=int, help="this many elements")
    parser.add_argument("--rounds", type=int, default=9, help="of each measurement")
    parser.add_argument("--only", nargs="+", default=list(NAMES), help="these compressors only")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numel = options.numel or (LARGE_NUMEL if options.large else NUMEL)
    shares, bars = on_host(numel, options.rounds, options.only)
    on_gpu = None
    if torch.cuda.is_available():
        where = torch.device("cuda", torch.cuda.current_device())
        found = on_device(numel, options.rounds, options.only, where)
        on_gpu = {item.what: {"of_copy": item.of_copy} for item in found}
    kit.plot_bars(
        options.out / "compressors.png",
        f"{numel / 1e6:g} million float32 on one CPU core",
        "bytes moved per second, share of a memory copy's",
        bars,
    )
    if options.json:
        print(json.dumps({"cpu": shares, "gpu": on_gpu}))


if __name__ == "__main__":
    main()
