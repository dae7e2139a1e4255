"""Draws the README's picture: shards, workers, and the messages between them."""

from __future__ import annotations

from benchmarks.drawing.svg import HEAD, INK, LINE, arrow, words

WIDTH, HEIGHT = 760, 300
SHARD, WORKER, GRAD, WEIGHTS = "#dfe8f1", "#f4f4f4", "#d55e00", "#0072b2"
SLICES = ("#7da3cb", "#5f8dbd", "#4477ae", "#2b5f9c")  # Of the weights, in the order of the vector.
NUM_SHARDS, NUM_WORKERS = 2, 3
SHARD_X, SHARD_Y, SHARD_WIDTH, SHARD_HEIGHT = (150, 450), 34, 190, 84
WORKER_X, WORKER_Y, WORKER_WIDTH, WORKER_HEIGHT = (40, 290, 540), 196, 180, 76


def draw() -> str:
    """Returns the picture as SVG."""
    parts: list[str] = []
    for shard, x in enumerate(SHARD_X):
        parts += _shard(shard, x)
    for rank, x in enumerate(WORKER_X):
        parts += _worker(rank, x)
    for rank, x in enumerate(WORKER_X):
        for shard, shard_x in enumerate(SHARD_X):
            parts += _exchange(x, rank, shard, shard_x)
    parts += [
        words(WIDTH - 12, 146, "push: gradients", GRAD, anchor="end", weight="bold"),
        words(WIDTH - 12, 162, "pull: weights", WEIGHTS, anchor="end", weight="bold"),
        words(12, 52, "psserver start", INK, anchor="start", size=12, weight="bold"),
        words(12, 68, "--shards 2", INK, anchor="start", size=12),
        words(12, 146, "mode= sets", INK, anchor="start", size=12, weight="bold"),
        words(12, 162, "the pace", INK, anchor="start", size=12),
        words(WIDTH / 2, 288, "psworker run --workers 3 -- train.py", INK, size=12, weight="bold"),
    ]
    title = "Shards hold the weights; workers push gradients and pull weights"
    return HEAD.format(width=WIDTH, height=HEIGHT, title=title) + "\n".join(parts) + "\n</svg>\n"


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" '
        f'fill="{fill}" stroke="{LINE}"/>'
    )


def _shard(shard: int, x: int) -> list[str]:
    cell = (SHARD_WIDTH - 28) / 2
    parts = [
        _box(x, SHARD_Y, SHARD_WIDTH, SHARD_HEIGHT, SHARD),
        words(x + SHARD_WIDTH / 2, SHARD_Y + 14, f"shard {shard}", INK, size=12, weight="bold"),
        words(x + SHARD_WIDTH / 2, SHARD_Y + 72, "optimizer, versions, journal", INK, size=10),
    ]
    for place in range(2):
        index = 2 * shard + place
        left = x + 12 + place * (cell + 4)
        parts += [
            f'<rect x="{left:.0f}" y="{SHARD_Y + 28}" width="{cell:.0f}" height="32" rx="3" '
            f'fill="{SLICES[index]}"/>',
            words(left + cell / 2, SHARD_Y + 44, f"slice {index}", "white", weight="bold"),
        ]
    return parts


def _worker(rank: int, x: int) -> list[str]:
    cell = (WORKER_WIDTH - 24) / 4
    parts = [
        _box(x, WORKER_Y, WORKER_WIDTH, WORKER_HEIGHT, WORKER),
        words(x + WORKER_WIDTH / 2, WORKER_Y + 14, f"worker {rank}", INK, size=12, weight="bold"),
        words(x + WORKER_WIDTH / 2, WORKER_Y + 62, "your PyTorch script", INK, size=10),
    ]
    for index, color in enumerate(SLICES):
        left = x + 12 + index * cell
        parts.append(
            f'<rect x="{left:.0f}" y="{WORKER_Y + 28}" width="{cell - 2:.0f}" height="20" rx="2" '
            f'fill="{color}"/>'
        )
    return parts


def _exchange(x: int, rank: int, shard: int, shard_x: int) -> list[str]:
    """Returns a push up and a pull down between a worker and a shard."""
    low = x + WORKER_WIDTH / 2 + (shard - 0.5) * 60
    high = shard_x + SHARD_WIDTH / 2 + (rank - 1) * 52
    top, bottom = SHARD_Y + SHARD_HEIGHT + 3, WORKER_Y - 3
    return [
        arrow(low - 7, bottom, high - 7, top, GRAD, 1.8),
        arrow(high + 7, top, low + 7, bottom, WEIGHTS, 1.8, "5 3"),
    ]
