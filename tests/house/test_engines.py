"""Rule 9: The pages of the engines answer the same questions, and the concepts show every mode."""

import re

import pytest

import psworker
from scripts.printed import commands
from tests.house.source import ROOT

DOCS = ROOT / "docs"
OVERVIEW = (DOCS / "engines.md").read_text(encoding="utf-8")
ENGINES = re.findall(r"^\| [^|]*\| [^|]*?\[(\w+\.md)\]", OVERVIEW, re.MULTILINE)


def first_cells(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [cell.strip().lower() for cell in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)]


def test_every_engine_has_a_page() -> None:
    pages = {"torchrun.md", "systemd.md", "deploy.md", "kubernetes.md", "slurm.md", "ray.md"}
    assert set(ENGINES) == {"machines.md", *pages}


def test_the_overview_answers_for_every_engine_and_names_commands_of_its_page() -> None:
    tables = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
        for table in re.findall(r"(?:^\|.*\n)+", OVERVIEW, re.MULTILINE)
    ]
    pages, who, where = tables
    assert [row[0] for row in who] == [row[0] for row in where]
    assert all(all(row) for table in tables for row in table)
    for row in pages:
        (page,) = re.findall(r"\((\w+\.md)\)", row[1])
        text = (DOCS / page).read_text(encoding="utf-8")
        named = re.findall(r"`([^`]+)`", row[2])
        assert named, row
        assert all(command in text for command in named), row


@pytest.mark.parametrize("page", ENGINES)
@pytest.mark.parametrize(
    "row",
    [
        r"scale\b",
        r"stop\b",
        r".*\b(?:node|host|machine)\b.*\b(?:lost|drained|goes|crashes)",
        r".*\bsecrets\b",
        r"state\b",
        r"logs\b",
    ],
)
def test_a_page_says_how_to_scale_and_stop_and_where_things_lie(page: str, row: str) -> None:
    assert any(re.match(row, cell) for cell in first_cells(page)), f"no row {row} in {page}"


@pytest.mark.parametrize("page", ENGINES)
def test_a_page_begins_with_a_file_or_a_command(page: str) -> None:
    assert re.search(r"^```(?:bash|python)$", (DOCS / page).read_text(encoding="utf-8"), re.M)


CALL = re.compile(r'commands\(\s*"(\S+\.md)"(?:, "([^"]+)")?(?:, "(\w+)")?\)')


@pytest.mark.parametrize(
    "path", ["scripts/check_engine.py", *sorted(ROOT.glob("tests/deploy/*.py"))], ids=str
)
def test_the_commands_that_a_check_runs_are_on_their_pages(path: str) -> None:
    for words in CALL.findall((ROOT / path).read_text(encoding="utf-8")):
        assert commands(*filter(None, words)), words


def test_the_concepts_have_a_drawing_and_a_link_for_every_mode() -> None:
    concepts = (DOCS / "concepts.md").read_text(encoding="utf-8")
    for mode in psworker.modes():
        name = getattr(mode, "name", str(mode))
        assert f"pictures/rule-{name}.svg" in concepts, name
        assert f"rules/{name}.md" in concepts, name
