"""Markdown that programs write."""

from __future__ import annotations


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
