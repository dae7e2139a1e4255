"""Writes the tables that pages show of the code or of a result: `python -m benchmarks.pages`.

A page marks the place of such a table with two comments, `<!-- begin NAME -->` and
`<!-- end NAME -->`. This program replaces the text between them. Nothing is measured. With
`--check` it writes nothing and ends with 1 if a page differs; a test does the same.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from typer.main import get_command

from psserver import exits as psserver_exits
from psserver.commands import cli as psserver_cli
from psserver.process.settings import SECTIONS
from psworker.commands import cli as psworker_cli
from psworker.commands import run as psworker_exits

ROOT = Path(__file__).resolve().parents[1]


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


# ----- settings, commands and exit codes: docs/reference.md


def settings() -> str:
    """Returns the settings of `psserver start`, from the classes that check them."""
    rows = []
    for section, kind in SECTIONS.items():
        prefix = "" if section == "server" else f"{section}-"
        for name, field in kind.model_fields.items():
            rows.append(
                [
                    f"`--{prefix}{name.replace('_', '-')}`",
                    f"`{kind.model_config['env_prefix']}{name.upper()}`",
                    f"`{section}.{name}`",
                    _default(field),
                    _bounds(field),
                    " ".join((field.description or "").split()),
                ]
            )
    return table(["flag", "variable", "in the file", "default", "range", "meaning"], rows)


def _default(field: FieldInfo) -> str:
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _bounds(field: FieldInfo) -> str:
    bounds = {
        key: getattr(item, key)
        for item in field.metadata
        for key in ("ge", "le")
        if hasattr(item, key)
    }
    if bounds:
        return f"{bounds['ge']:.12g} to {bounds['le']:.12g}"
    choices = getattr(field.annotation, "__args__", ())
    return ", ".join(f"`{choice}`" for choice in choices if isinstance(choice, str))


def exit_codes() -> str:
    """Returns every exit code of both programs."""
    meanings = {
        program: {int(code): meaning for code, meaning in listed.items()}
        for program, listed in (
            ("psserver", psserver_exits.MEANINGS),
            ("psworker", psworker_exits.MEANINGS),
        )
    }
    codes = sorted({code for listed in meanings.values() for code in listed})
    rows = [[str(code), *(listed.get(code, "") for listed in meanings.values())] for code in codes]
    return table(["exit code", "`psserver`", "`psworker`"], rows, "r")


def commands() -> str:
    """Returns every command of both programs with its arguments and options."""
    rows = []
    for program, app in (("psserver", psserver_cli.app), ("psworker", psworker_cli.app)):
        for words, command in _leaves([program], get_command(app)):
            first = " ".join((command.help or "").split("\n\n")[0].split())
            given = [_shown(item) for item in command.params if not getattr(item, "hidden", False)]
            if words == ["psserver", "start"]:
                given = ["`--detach`, `--config FILE`, and the settings above"]
            rows.append([f"`{' '.join(words)}`", first, ", ".join(given)])
    return table(["command", "what it does", "arguments and options"], rows)


def _leaves(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from _leaves([*words, name], inner)


def _shown(item: Any) -> str:
    if item.param_type_name == "option":
        return f"`{max(item.opts, key=len)}`"
    return f"`{(item.name or '').upper()}`"


# ----- the blocks, and their pages


BLOCKS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "exit codes": exit_codes,
    "commands": commands,
}
PAGES = ("docs/reference.md",)
MARKED = re.compile(r"(<!-- begin (?P<name>[\w ]+) -->\n).*?(\n<!-- end (?P=name) -->)", re.DOTALL)


def filled(text: str) -> str:
    """Returns a page with its blocks as they are made now.

    Raises:
        KeyError: A block has a name that nothing here makes.
    """
    return MARKED.sub(lambda found: found[1] + BLOCKS[found["name"]]() + found[3], text)


def main() -> None:
    """Writes the blocks of all pages, or checks them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    changed = []
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        if (wanted := filled(text)) != text:
            changed.append(name)
            if not args.check:
                (ROOT / name).write_text(wanted, encoding="utf-8")
    print(f"pages that differed: {', '.join(changed) or 'none'}")
    if args.json:
        print(json.dumps({"changed": changed}))
    if args.check and changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
