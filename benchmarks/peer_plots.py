"""One small plot for the page of each mode whose workers exchange models, from simulated runs.

    python -m benchmarks.peer_plots

Eight workers with an ellipsoid each, in simulated time: the real state machines of the workers and
of the directory, gradients of 0.1 s, messages of up to 0.02 s, plain SGD. Left: distance of the
mean model to the common minimum. Middle: distance of the models to their mean. Right: pace of the
other seven beside one that is slowed. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks import curves
from pscore.rules import parse_mode
from pscore.rules.decentralised import Decentralised
from pscore.types import FloatArray
from pssim.peers import PeerWorld

NUM, NUMEL, STEPS, LR = 8, 20, 60, 0.2
COMPUTE_S, LATENCY_S = 0.1, 0.02
FACTORS = {"none": 1, "2x": 2, "10x": 10, "100x": 100}
PAGES: dict[str, tuple[str, ...]] = {
    "allreduce": ("allreduce", "dpsgd", "adpsgd"),
    "dpsgd": ("allreduce", "dpsgd", "dpsgd(graph=ring)", "dpsgd(order=atc)"),
    "adpsgd": ("allreduce", "adpsgd", "adpsgd(graph=ring)", "adpsgd(every=4)"),
    "sgp": ("allreduce", "dpsgd(order=atc)", "sgp", "sgp(graph=ring)"),
}
_random = np.random.default_rng(5)
CURVATURE = _random.uniform(0.2, 1.0, (NUM, NUMEL))
TARGET = _random.normal(size=(NUM, NUMEL))
MINIMUM = (CURVATURE * TARGET).sum(axis=0) / CURVATURE.sum(axis=0)


def gradient(rank: int, step: int, weights: FloatArray) -> FloatArray:
    """Returns the gradient of a worker's ellipsoid."""
    found: FloatArray = (CURVATURE[rank] * (weights - TARGET[rank])).astype(np.float32)
    return found


@cache
def run(mode: str, factor: int = 1, steps: int = STEPS) -> PeerWorld:
    """Returns a run in which worker 0 needs `factor` times as long for a gradient."""
    rule = parse_mode(mode)
    assert isinstance(rule, Decentralised)
    return PeerWorld(
        rule,
        gradient,
        np.zeros(NUMEL, np.float32),
        num_workers=NUM,
        steps=steps,
        lr=LR,
        compute_s=[COMPUTE_S * factor] + [COMPUTE_S] * (NUM - 1),
        latency_s=LATENCY_S,
        seed=1,
    ).run()


def pace(mode: str, factor: int) -> float:
    """Returns steps a second of the workers that are not slowed."""
    steps = STEPS if factor < FACTORS["100x"] else STEPS // 3
    last_s = [worker.finished_s[-1] for worker in run(mode, factor, steps).workers[1:]]
    return steps / float(np.mean(last_s))


def draw(rule: str, folder: Path) -> Path:
    """Draws one page's plot; returns the file."""
    figure = curves.new_figure(9.6, 2.9)
    mean, apart, paces = figure.subplots(1, 3, width_ratios=(1.0, 1.0, 0.9))
    for index, mode in enumerate(PAGES[rule]):
        color = "black" if not index else curves.COLORS[index - 1]
        models = np.stack([np.stack(worker.path) for worker in run(mode).workers])
        middle = models.mean(axis=0)
        mean.semilogy(np.linalg.norm(middle - MINIMUM, axis=1), color=color, lw=1.2)
        spread = np.linalg.norm(models - middle, axis=2).mean(axis=0)
        apart.plot(spread, color=color, lw=1.2, label=mode)
        for place, (name, factor) in enumerate(FACTORS.items()):
            value = pace(mode, factor) / pace(mode, 1)
            if place:
                spot = index + 0.27 * (place - 2)
                paces.barh(spot, value, 0.24, color=color, alpha=1.0 - 0.25 * (place - 1))
                paces.text(value + 0.02, spot, name, va="center", fontsize=7)
    curves.dress(mean, "step", "mean model to the minimum")
    curves.dress(apart, "step", "models to their mean")
    apart.legend(frameon=False, fontsize=8)
    paces.set_yticks(range(len(PAGES[rule])), PAGES[rule], fontsize=7)
    paces.invert_yaxis()
    paces.set_xlim(0, 1.2)
    curves.dress(paces, "pace, one of eight slowed")
    return curves.save(figure, folder / f"rule-{rule}.png")


def main() -> None:
    """Draws all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/plots"), help="folder of the plots")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    paths = [draw(rule, args.out) for rule in PAGES]
    for path in paths:
        print(f"plot: {path}, {path.stat().st_size} bytes")
    if args.json:
        print(json.dumps({path.name: path.stat().st_size for path in paths}))


if __name__ == "__main__":
    main()
