"""Parts of the drawings, as SVG text: the same input gives the same text."""

from __future__ import annotations

import math

INK, PALE, LINE = "#333333", "#f2f2f2", "#b0b0b0"
HEAD_LENGTH, HEAD_HALF = 7.0, 3.4  # Of an arrow's head, in pixels.
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    'width="{width}" height="{height}" '
    'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n'
    "<title>{title}</title>\n"
    '<rect width="{width}" height="{height}" rx="6" fill="white"/>\n'
)


def words(
    x: float,
    y: float,
    text: str,
    fill: str,
    *,
    anchor: str = "middle",
    size: int = 11,
    weight: str = "normal",
) -> str:
    """Returns a line of text whose middle is at height `y`."""
    return (
        f'<text x="{x:.1f}" y="{y + 0.35 * size:.1f}" font-size="{size}" fill="{fill}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{text}</text>'
    )


def arrow(
    x: float, y: float, end_x: float, end_y: float, color: str, width: float, dash: str = "none"
) -> str:
    """Returns an arrow, drawn without SVG markers, which some viewers do not know."""
    length = math.hypot(end_x - x, end_y - y)
    along_x, along_y = (end_x - x) / length, (end_y - y) / length
    base_x, base_y = end_x - HEAD_LENGTH * along_x, end_y - HEAD_LENGTH * along_y
    head = " ".join(
        f"{base_x + side * HEAD_HALF * along_y:.1f},{base_y - side * HEAD_HALF * along_x:.1f}"
        for side in (1, -1)
    )
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{base_x:.1f}" y2="{base_y:.1f}" '
        f'stroke="{color}" stroke-width="{width}" stroke-dasharray="{dash}"/>'
        f'<polygon points="{end_x:.1f},{end_y:.1f} {head}" fill="{color}"/>'
    )
