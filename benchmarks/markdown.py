"""Markdown that programs write."""

from __future__ import annotations

import re


def machine(described: str) -> str:
    """Returns the cores and the load of a machine; its result file describes it in full."""
    return ", ".join(re.findall(r"\d+ cores|load [\d.]+", described)) or described


def table(head: list[str], rows: list[list[str]], align: str = "") -> str:
    """Returns a Markdown table.

    Args:
        head: Titles of the columns.
        rows: Cells; a `|` in a cell is escaped.
        align: One letter a column, `l` or `r`; left where it is shorter.
    """
    marks = [
        "--:" if letter == "r" else "---" for letter in align.ljust(len(head), "l")[: len(head)]
    ]
    lines = [head, marks, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
