"""Test accuracy of a LeNet through real daemons: 2 workers, 2 shards, the delay modes and ssgd.

    python -m benchmarks.accuracy --data ../shared/data/fashion-mnist --out docs/plots

Each mode is one `psworker run --workers 2 --shards 2 -- -m psworker.commands.demo.train ...`:
processes, sockets and shared memory as in real life, so that only accuracy and loss are figures to
rely on, not seconds. The learning rate falls as a cosine to 0; the batch is 2 x 32 images.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import curves

WARMUP = 500  # Steps; the authors' number.
MODES = {
    "ssgd": "ssgd",
    "mirror k=1": f"ssd(steps=1, warmup={WARMUP}, local='mirror')",
    "mirror k=5": f"ssd(steps=5, warmup={WARMUP}, local='mirror')",
    "secant k=1": f"ssd(steps=1, warmup={WARMUP}, local='secant')",
    "secant k=5": f"ssd(steps=5, warmup={WARMUP}, local='secant')",
    "sgd k=1": f"ssd(steps=1, warmup={WARMUP}, local='sgd')",
    "sgd k=5": f"ssd(steps=5, warmup={WARMUP}, local='sgd')",
}
STYLES = {"ssgd": ("#000000", "-"), "mirror": ("#0072b2", "-"), "secant": ("#d55e00", "-")}
SAID = re.compile(r"\[(\d+)\] (\{.*\})")
SMOOTHED_STEPS = 100
KEPT_EVERY = 10  # Steps from one point of a curve to the next.


@dataclass(slots=True, kw_only=True)
class Result:
    """The result of one mode."""

    mode: str  # As `mode=` takes it.
    lr: float
    accuracy: float = 0.0
    loss: float = float("nan")  # Training loss, mean of the last steps of both workers.
    seconds: float = 0.0
    pulled_mb: float = 0.0  # Of all workers, 10**6 bytes.
    failure: str = ""  # Why it has no accuracy.
    losses: list[float] = field(default_factory=list)  # Smoothed; every KEPT_EVERY steps.


def run(name: str, mode: str, args: argparse.Namespace) -> Result:
    """Trains in one mode and returns the workers' output."""
    words = [sys.executable, "-m", "psworker", "run", "--workers", str(args.workers)]
    words += ["--shards", str(args.shards), "--quiet", "--", "-m", "psworker.commands.demo.train"]
    words += ["--mode", mode, "--epochs", str(args.epochs), "--lr", str(args.lr)]
    words += ["--momentum", str(args.momentum), "--seed", str(args.seed)]
    words += ["--data", str(args.data)] if args.data else []
    words += ["--images", str(args.images)] if args.images else []
    result = Result(mode=mode, lr=args.lr)
    steps: dict[int, list[float]] = {}
    started_s = time.monotonic()
    other: list[str] = []
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    for line in process.stdout:
        if (match := SAID.match(line)) is None:
            other.append(line.strip())
            continue
        said = json.loads(match[2])
        if "accuracy" in said:
            result.accuracy = said["accuracy"]
            result.pulled_mb += said["pulled_nbytes"] / 1e6
        else:
            steps.setdefault(said["step"], []).append(said["loss"])
    result.seconds = time.monotonic() - started_s
    means = [sum(losses) / len(losses) for _, losses in sorted(steps.items())]
    smooth = curves.smoothed(means, SMOOTHED_STEPS)
    result.losses, result.loss = smooth[::KEPT_EVERY], smooth[-1] if smooth else float("nan")
    if process.wait() != 0:
        problems = [line for line in other if "Error" in line] or other[-1:]
        result.failure = problems[-1] if problems else f"ended with status {process.returncode}"
        print(f"{name}: {result.failure}", file=sys.stderr)
    return result


def show(results: dict[str, Result], args: argparse.Namespace) -> None:
    """Prints the table."""
    grid = Table(
        title=f"LeNet, Fashion-MNIST, {args.workers} workers x 32 images, {args.shards} shards, "
        f"{args.epochs} epochs, momentum {args.momentum:g}, lr {args.lr:g} (cosine to 0), "
        f"seed {args.seed}",
        box=box.SIMPLE_HEAD,
    )
    grid.add_column("mode")
    for column in ("test accuracy", "points from ssgd", "training loss", "MB pulled"):
        grid.add_column(column, justify="right")
    best = results["ssgd"].accuracy if "ssgd" in results else float("nan")
    for name, result in results.items():
        if result.failure:
            grid.add_row(name, "diverged", "", "", "")
            continue
        grid.add_row(
            name,
            f"{result.accuracy:.4f}",
            f"{100 * (result.accuracy - best):+.2f}",
            f"{result.loss:.3f}",
            f"{result.pulled_mb:,.0f}",
        )
    Console(highlight=False, width=100).print(grid)


def plot(results: dict[str, Result], args: argparse.Namespace) -> Path:
    """Draws training loss over steps; returns the file."""
    figure = curves.new_figure(8.5, 4.2)
    axes = figure.subplots()
    for name, result in results.items():
        color, _ = STYLES.get(name.partition(" ")[0], ("#009e73", "-"))
        style = ":" if name.endswith("k=1") else "-"
        what = "diverged" if result.failure else f"test {100 * result.accuracy:.1f} %"
        places = [index * KEPT_EVERY for index in range(len(result.losses))]
        axes.plot(places, result.losses, style, color=color, label=f"{name}: {what}", lw=1.5)
    curves.dress(axes, "step", f"training loss, mean of {SMOOTHED_STEPS} steps")
    axes.set_ylim(0.1, 1.2)
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    axes.set_title(
        f"LeNet, Fashion-MNIST, through real daemons: {args.workers} workers, {args.shards} shards"
    )
    return curves.save(figure, args.out / "accuracy.png")


def main() -> None:
    """Runs the modes one after the other."""
    args = parse_args()
    results = {}
    for name in args.only or MODES:
        results[name] = run(name, MODES[name], args)
        if args.keep:
            args.keep.write_text(json.dumps({key: as_json(r) for key, r in results.items()}))
        print(f"{name}: {results[name].accuracy:.4f}, {results[name].seconds:.0f} s", flush=True)
    show(results, args)
    print(f"plot: {plot(results, args)}")
    if args.json:
        brief = {key: {**as_json(item), "losses": None} for key, item in results.items()}
        print(
            json.dumps({k: {n: x for n, x in v.items() if x is not None} for k, v in brief.items()})
        )


def as_json(result: Result) -> dict[str, object]:
    """Returns a result as JSON has it."""
    return {
        "mode": result.mode,
        "lr": result.lr,
        "accuracy": None if result.failure else result.accuracy,
        "loss": curves.finite(result.loss),
        "pulled_mb": round(result.pulled_mb, 3),
        "failure": result.failure or None,
        "losses": [curves.finite(round(loss, 4)) for loss in result.losses],
    }


def parse_args() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--images", type=int, help="number of images to train on")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(MODES), help="these modes only")
    parser.add_argument("--keep", type=Path, help="file that gets the curves, as JSON")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of the plot")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
