"""Lists the benchmarks and how each is run.

python -m benchmarks
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent
COMMAND = re.compile(r"python -m benchmarks[^`\n#]*")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One program of this folder."""

    name: str
    about: str  # The first line of its docstring.
    commands: tuple[str, ...]  # As its docstring shows them.


def find(folder: Path = FOLDER) -> list[Benchmark]:
    """Returns the programs: modules that have a `main`; nothing is imported."""
    found = []
    for path in sorted(folder.glob("[!_]*.py")):
        module = ast.parse(path.read_text())
        names = {item.name for item in module.body if isinstance(item, ast.FunctionDef)}
        text = ast.get_docstring(module) or ""
        if "main" in names and text:
            commands = tuple(line.strip() for line in COMMAND.findall(text))
            about = re.sub(r": `.*`", "", text.splitlines()[0])
            found.append(Benchmark(path.stem, about, commands))
    return found


def main() -> None:
    """Prints them."""
    grid = Table("benchmark", "what it measures, and how it is run", box=box.SIMPLE_HEAD)
    for item in find():
        grid.add_row(item.name, "\n".join([item.about, *item.commands]))
    Console(highlight=False).print(grid, markup=False)
    print("Each prints a table; --json adds one line of JSON at the end.")


if __name__ == "__main__":
    main()
