"""Draws the modes whose workers exchange models, each from a simulated run; see drawings.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.drawing.svg import HEAD, INK, LINE, PALE, arrow, words
from pscore.rules import parse_mode
from pscore.rules.decentralised import Decentralised
from pscore.types import FloatArray
from pssim.peers import PeerWorld

COMPUTE_S = (0.9, 0.9, 1.35)  # Of the workers: the last is 1.5 times as slow.
LATENCY_S = 0.3
# The mode that stands for each rule, and the steps of each worker.
MODES: dict[str, tuple[str, int]] = {
    "allreduce": ("allreduce", 3),
    "dpsgd": ("dpsgd(graph=ring)", 3),
    "adpsgd": ("adpsgd", 4),
    "sgp": ("sgp(graph='0>1 1>2 2>0 0>2')", 3),
}

WIDTH, HEIGHT, LEFT, SCALE = 760, 236, 86, 108
YS, BAR, LEGEND_Y = (40, 108, 176), 24, 220
COLORS = ("#0072b2", "#d55e00", "#009e73", "#a8518a")  # Of the workers' messages.


def draw(rule: str) -> str:
    """Returns the drawing of a rule as SVG; the same at each call."""
    mode, steps = MODES[rule]
    parsed = parse_mode(mode)
    assert isinstance(parsed, Decentralised)

    def still(rank: int, step: int, weights: FloatArray) -> FloatArray:
        return np.zeros(1, np.float32)

    num = len(COMPUTE_S)
    world = PeerWorld(
        parsed,
        still,
        np.zeros(1, np.float32),
        num_workers=num,
        steps=steps,
        lr=0.1,
        seed=3,
        compute_s=COMPUTE_S,
        latency_s=LATENCY_S,
    ).run()
    begin_s = min(worker.spans[0][0] for worker in world.workers)
    body = "\n".join([*_lanes(world, begin_s), *_messages(world, begin_s), *_legend()])
    names = [words(LEFT - 10, y, f"worker {rank}", INK, anchor="end") for rank, y in enumerate(YS)]
    head = HEAD.format(width=WIDTH, height=HEIGHT, title=mode)
    return head + "\n".join([*names, body, "</svg>\n"])


def _x(time_s: float) -> float:
    return LEFT + SCALE * time_s


def _lanes(world: PeerWorld, begin_s: float) -> Iterator[str]:
    """Yields each worker's gradients as bars, and the waits between them."""
    for worker, y in zip(world.workers, YS, strict=True):
        for index, (start_s, end_s) in enumerate(worker.spans):
            x, until = _x(start_s - begin_s), _x(end_s - begin_s)
            yield _box(x, until, y, COLORS[worker.rank])
            yield words((x + until) / 2, y, f"step {index}", "white", weight="bold")
            if index + 1 < len(worker.spans):
                after = _x(worker.spans[index + 1][0] - begin_s)
                if after - until > 1:
                    yield _box(until, after, y, PALE, LINE)


def _messages(world: PeerWorld, begin_s: float) -> Iterator[str]:
    """Yields the messages between workers while they train."""
    end_s = max(worker.spans[-1][1] for worker in world.workers)
    for sent_s, came_s, source, target in world.messages:
        if begin_s <= sent_s <= end_s:
            side = 1 if YS[target] > YS[source] else -1
            place = YS[source] + side * BAR / 2, YS[target] - side * BAR / 2
            x, end = _x(sent_s - begin_s), _x(came_s - begin_s)
            yield arrow(x, place[0], end, place[1], COLORS[source], 1.6)


def _legend() -> Iterator[str]:
    y = LEGEND_Y
    yield _box(LEFT, LEFT + 22, y, COLORS[0], height=12)
    yield words(LEFT + 30, y, "computes a gradient", INK, anchor="start")
    yield _box(LEFT + 180, LEFT + 202, y, PALE, LINE, height=12)
    yield words(LEFT + 210, y, "waits", INK, anchor="start")
    yield arrow(LEFT + 270, y, LEFT + 296, y, COLORS[0], 1.6)
    yield words(LEFT + 304, y, "numbers from one worker to another", INK, anchor="start")


def _box(x: float, end: float, y: float, fill: str, line: str = "none", height: float = BAR) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y - height / 2:.1f}" width="{end - x:.1f}" '
        f'height="{height:.1f}" rx="3" fill="{fill}" stroke="{line}"/>'
    )
