"""Draws the folders of the packages and their imports: `python -m benchmarks.structure`.

A box is a folder, with its files and lines of code and, where it has folders inside, their names.
An arrow is an import; a folder stands below all that import from it. Nothing is measured.

    python -m benchmarks.structure                                      # this checkout
    python -m benchmarks.structure --root ../old --out before.svg       # another one
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.drawing.svg import HEAD, INK, LINE, arrow, words

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"psworker": "#dfe8f1", "psserver": "#f3e6d8", "pscore": "#e4efe0"}
GENERATED = "pb"
WIDTH, MARGIN, GAP = 1180, 16, 28
BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT = 150, 46, 84
TITLE_HEIGHT = 30
PANEL_WIDTH = (WIDTH - 3 * MARGIN) / 2
ARROW = "#8a8a8a"


@dataclass(slots=True)
class Folder:
    """A folder of a package; its files and those of the folders inside it."""

    num_files: int = 0  # Python files.
    num_lines: int = 0  # Their lines.
    rooms: set[str] = field(default_factory=set)  # Names of the folders inside.
    # Names of the folders of the same package that it imports from.
    imports: set[str] = field(default_factory=set)


def read(root: Path, package: str) -> dict[str, Folder]:
    """Returns the folders of a package by name; files in no folder are left out."""
    folders: dict[str, Folder] = defaultdict(Folder)
    for path in sorted((root / package).rglob("*.py")):
        inner = path.relative_to(root / package).parent.parts
        if not inner or inner[0] == GENERATED:
            continue
        text = path.read_text(encoding="utf-8")
        folder = folders[inner[0]]
        folder.num_files += 1
        folder.num_lines += text.count("\n")
        folder.rooms |= set(inner[1:2])
        folder.imports |= set(_imported(ast.parse(text), package)) - {inner[0]}
    for folder in folders.values():
        folder.imports &= folders.keys()
    return dict(folders)


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields the first part below `package` of each name that a module imports from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == package and rest:
                yield rest[0]


def levels(folders: dict[str, Folder]) -> list[list[str]]:
    """Returns the folders in rows: each stands below all that import from it.

    Raises:
        ValueError: Folders import each other in a circle.
    """
    left, rows = dict(folders), []
    while left:
        wanted = {name for folder in left.values() for name in folder.imports}
        row = sorted(left.keys() - wanted, key=lambda name: -left[name].num_lines)
        if not row:
            raise ValueError(f"folders import each other: {', '.join(sorted(left))}")
        rows.append(row)
        left = {name: folder for name, folder in left.items() if name not in row}
    return rows


def draw(root: Path) -> str:
    """Returns the picture of a checkout as SVG."""
    found = {package: read(root, package) for package in PACKAGES}
    rows = {package: levels(folders) for package, folders in found.items()}
    upper = TITLE_HEIGHT + ROW_HEIGHT * max(len(rows["psworker"]), len(rows["psserver"]))
    lower = TITLE_HEIGHT + ROW_HEIGHT * len(rows["pscore"])
    height = upper + lower + 3 * MARGIN
    parts: list[str] = []
    places = {
        "psworker": (MARGIN, MARGIN, PANEL_WIDTH),
        "psserver": (2 * MARGIN + PANEL_WIDTH, MARGIN, PANEL_WIDTH),
        "pscore": (MARGIN, 2 * MARGIN + upper, WIDTH - 2 * MARGIN),
    }
    for package, (x, y, width) in places.items():
        parts += _panel(package, found[package], rows[package], (x, y, width))
        if package != "pscore":
            middle = x + width / 2
            parts.append(arrow(middle, y + upper, middle, y + upper + MARGIN, INK, 2))
    head = HEAD.format(width=WIDTH, height=height, title="Folders of the packages, and imports")
    return head + "\n".join(parts) + "\n</svg>\n"


def _panel(
    package: str,
    folders: dict[str, Folder],
    rows: list[list[str]],
    place: tuple[float, float, float],
) -> list[str]:
    x, y, width = place
    height = TITLE_HEIGHT + ROW_HEIGHT * len(rows)
    num_lines = sum(folder.num_lines for folder in folders.values())
    parts = [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="8" '
        f'fill="none" stroke="{LINE}"/>',
        words(
            x + 10, y + 15, f"{package}: {num_lines:,} lines", INK, anchor="start", weight="bold"
        ),
    ]
    spots: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        step = min(BOX_WIDTH + GAP, (width - GAP) / len(row))
        left = x + (width - step * len(row)) / 2
        for place_in_row, name in enumerate(row):
            spots[name] = (
                left + step * (place_in_row + 0.5),
                y + TITLE_HEIGHT + number * ROW_HEIGHT,
            )
    for name, folder in folders.items():
        for other in sorted(folder.imports):
            from_x, from_y = spots[name]
            to_x, to_y = spots[other]
            parts.append(arrow(from_x, from_y + BOX_HEIGHT, to_x, to_y, ARROW, 0.7))
    for name, folder in folders.items():
        parts += _box(name, folder, spots[name], PACKAGES[package])
    return parts


def _box(name: str, folder: Folder, spot: tuple[float, float], fill: str) -> list[str]:
    x, y = spot
    rooms = ", ".join(sorted(folder.rooms))
    left = x - BOX_WIDTH / 2
    lines = [(name, 12, "bold"), (f"{folder.num_files} files, {folder.num_lines:,} lines", 9, "")]
    if rooms:
        lines.append((rooms, 8, ""))
    return [
        f'<rect x="{left:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
        f'fill="{fill}" stroke="{LINE}"/>',
        *(
            words(x, y + 12 + 14 * number, text, INK, size=size, weight=weight or "normal")
            for number, (text, size, weight) in enumerate(lines)
        ),
    ]


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to draw")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "structure.svg")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    args.out.write_text(draw(args.root), encoding="utf-8")
    print(f"wrote {args.out}")
    if args.json:
        print(json.dumps({"out": str(args.out)}))


if __name__ == "__main__":
    main()
