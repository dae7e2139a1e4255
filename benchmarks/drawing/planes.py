"""Draws the way of a gradient and of the weights on each data plane (`benchmarks.drawings`).

Every arrow that copies the model's bytes has a number: how many copies it is. Arrows without one
pass memory on without touching it.
"""

from __future__ import annotations

from benchmarks.drawing.svg import HEAD, INK, LINE, arrow, words

WIDTH, HEIGHT = 760, 168
UP_Y, DOWN_Y = 64, 122  # The gradient's row and the weights'.
BOX = 34  # Height.
FILL, SHARED, KERNEL = "#dfe8f1", "#d9efe4", "#f6e3d3"
COPY = "#d55e00"

# Of each plane: boxes as (x, width, row, text, fill), arrows as (from x, to x, row, copies).
Box = tuple[int, int, int, str, str]
Arrow = tuple[int, int, int, str]
WORKER, SHARD = (14, 300), (446, 300)  # Left edge and width of the two processes.
PLANES: dict[str, tuple[str, list[Box], list[Arrow]]] = {
    "local": (
        "local: worker and shard map each other's memory",
        [
            (26, 92, UP_Y, ".grad", FILL),
            (206, 96, UP_Y, "flat gradient", SHARED),
            (470, 250, UP_Y, "update, made from there", FILL),
            (26, 92, DOWN_Y, "parameters", FILL),
            (470, 250, DOWN_Y, "weights", SHARED),
        ],
        [
            (118, 206, UP_Y, "1 (keys)"),
            (302, 470, UP_Y, "2.5, read in place"),
            (470, 118, DOWN_Y, "1"),
        ],
    ),
    "tcp": (
        "tcp: frames between user memory, through both kernels",
        [
            (26, 70, UP_Y, ".grad", FILL),
            (178, 96, UP_Y, "flat gradient", FILL),
            (342, 76, UP_Y, "sockets", KERNEL),
            (486, 84, UP_Y, "payload", FILL),
            (648, 84, UP_Y, "update", FILL),
            (26, 248, DOWN_Y, "parameters", FILL),
            (342, 76, DOWN_Y, "sockets", KERNEL),
            (486, 246, DOWN_Y, "weights", FILL),
        ],
        [
            (96, 178, UP_Y, "1 (keys)"),
            (274, 342, UP_Y, "1"),
            (418, 486, UP_Y, "1"),
            (570, 648, UP_Y, "2.5"),
            (486, 418, DOWN_Y, "1"),
            (342, 274, DOWN_Y, "1"),
        ],
    ),
    "grpc": (
        "grpc: a call a slice; the library copies each frame at least once a side",
        [
            (26, 66, UP_Y, "flat", FILL),
            (130, 66, UP_Y, "frame", FILL),
            (234, 66, UP_Y, "library", KERNEL),
            (460, 66, UP_Y, "library", KERNEL),
            (564, 66, UP_Y, "frame", FILL),
            (668, 66, UP_Y, "update", FILL),
            (26, 66, DOWN_Y, "param.", FILL),
            (130, 66, DOWN_Y, "frame", FILL),
            (234, 66, DOWN_Y, "library", KERNEL),
            (460, 66, DOWN_Y, "library", KERNEL),
            (564, 66, DOWN_Y, "frame", FILL),
            (668, 66, DOWN_Y, "weights", FILL),
        ],
        [
            (92, 130, UP_Y, "1"),
            (196, 234, UP_Y, "1"),
            (300, 460, UP_Y, "2"),
            (526, 564, UP_Y, "1"),
            (630, 668, UP_Y, "2.5"),
            (668, 630, DOWN_Y, "1"),
            (564, 526, DOWN_Y, "1"),
            (460, 300, DOWN_Y, "2"),
            (234, 196, DOWN_Y, "1"),
            (130, 92, DOWN_Y, "1"),
        ],
    ),
}


def draw(plane: str) -> str:
    """Returns the drawing of a plane as SVG."""
    title, boxes, arrows = PLANES[plane]
    parts = [words(14, 16, title, INK, anchor="start", weight="bold")]
    for name, (x, width) in (("worker", WORKER), ("shard", SHARD)):
        parts += [
            f'<rect x="{x}" y="28" width="{width}" height="124" rx="6" fill="none" '
            f'stroke="{LINE}" stroke-dasharray="3 3"/>',
            words(x + 6, 37, name, INK, anchor="start", size=10),
        ]
    for x, width, y, text, fill in boxes:
        parts += [
            f'<rect x="{x}" y="{y - BOX / 2:.0f}" width="{width}" height="{BOX}" rx="4" '
            f'fill="{fill}" stroke="{LINE}"/>',
            words(x + width / 2, y, text, INK),
        ]
    for x, end_x, y, text in arrows:
        parts.append(arrow(x, y, end_x, y, COPY, 2.0))
        parts.append(words((x + end_x) / 2, y - 9, text, COPY, weight="bold"))
    return HEAD.format(width=WIDTH, height=HEIGHT, title=title) + "\n".join(parts) + "\n</svg>\n"
