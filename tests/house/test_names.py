"""Rules 4 and 9: docs/gradient.md names code that exists; public names are listed and sorted."""

import ast
import importlib
import re

import pytest

from tests.house.source import ROOT, definitions, modules_or_skip, parse

HEADING = re.compile(r"^#+ .*way of (one|a) gradient.*$", re.IGNORECASE | re.MULTILINE)
ENTRY = re.compile(r"`([\w/]+\.py):([\w.]+)`")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
PLACES = re.split("^## ", CONTRIBUTING.partition("## Where to find something")[2], flags=re.M)[0]


def gradient_entries(readme: str) -> list[tuple[str, str]] | None:
    """Returns the (path, name) pairs of the section's table, or None without the section."""
    heading = HEADING.search(readme)
    if heading is None:
        return None
    section = re.split(r"^#+ ", readme[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return ENTRY.findall("\n".join(rows))


def test_the_way_of_one_gradient_points_at_names_that_exist() -> None:
    entries = gradient_entries((ROOT / "docs" / "gradient.md").read_text(encoding="utf-8"))
    assert entries, "docs/gradient.md names no `path:Name`"
    gone = [
        f"{path}:{defined}"
        for path, defined in entries
        if not (ROOT / path).exists() or defined not in set(definitions(parse(ROOT / path).body))
    ]
    assert not gone, f"docs/gradient.md points at {gone}, which are gone"


@pytest.mark.parametrize("entry", ENTRY.findall(PLACES), ids=":".join)
def test_the_places_for_contributors_exist(entry: tuple[str, str]) -> None:
    path, defined = entry
    assert defined in set(definitions(parse(ROOT / path).body))


def test_contributors_find_ten_questions_about_places() -> None:
    rows = [line for line in PLACES.splitlines() if line.startswith("|")]
    assert sum("?" in row and "`" in row for row in rows) == 10


def test_psworker_lists_its_public_names_sorted() -> None:
    modules_or_skip("psworker/__init__.py")
    psworker = importlib.import_module("psworker")
    assert psworker.__all__ == sorted(psworker.__all__, key=str.casefold)
    assert not [listed for listed in psworker.__all__ if not hasattr(psworker, listed)]


def test_the_table_ends_where_its_section_ends() -> None:
    readme = """
# Paceline
| `a.py:A` |
## The way of one gradient
| hook | copies it into `pscore/b.py:B.c` |
Prose that names `d.py:D`.
## Words
| `e.py:E` |
"""
    assert gradient_entries(readme) == [("pscore/b.py", "B.c")]
    assert gradient_entries("# Paceline\n") is None


def test_definitions_are_found_in_modules_and_classes() -> None:
    text = "X = 1\nclass A:\n    y: int = 2\n    def f(self): ...\nasync def g(): ...\n"
    assert set(definitions(ast.parse(text).body)) == {"X", "A", "A.y", "A.f", "g"}
