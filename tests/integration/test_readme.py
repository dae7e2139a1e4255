"""What README and ARCHITECTURE say about commands, files and variables is so."""

import ast
import re
from pathlib import Path

import pytest
from typer.main import get_command

from psserver.commands import cli as psserver_cli
from psserver.exits import Exit as ServerExit
from psworker.commands import cli as psworker_cli
from psworker.commands.run import Exit as WorkerExit
from tests.house.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands(page: str, program: str) -> set[str]:
    """Returns what follows `program` where a command is shown, up to a comment."""
    shown = re.findall(rf"(?:^|`){program} ([a-z][^`#\n]*)", page, re.MULTILINE)
    return {line.strip() for line in shown}


def test_the_lengths_are_kept() -> None:
    assert len(README.splitlines()) <= 250
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 300


def test_every_make_target_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"run", "test", "setup", "check"} <= named <= set(targets)


@pytest.mark.parametrize(
    ("program", "app"), [("psserver", psserver_cli.app), ("psworker", psworker_cli.app)]
)
def test_every_command_and_its_options_exist(program: str, app: object) -> None:
    known = get_command(app).commands  # type: ignore[attr-defined, arg-type]
    shown = commands(TEXT, program)
    assert shown
    for line in shown:
        subcommand, *words = re.split(r"[\s|]+", line.partition(" -- ")[0])
        assert subcommand in known, line
        options = {option for item in known[subcommand].params for option in item.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options | {"--"}, line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


def test_every_source_file_that_is_named_exists() -> None:
    named = re.findall(
        r"`((?:psserver|psworker|pscore|tests|examples|benchmarks)/[\w/]+\.py)", TEXT
    )
    assert named
    assert not [path for path in named if "NAME" not in path and not (ROOT / path).exists()]


def test_every_exit_code_stands_in_the_table() -> None:
    table = README.partition("| exit code |")[2].partition("\n\n")[0]
    codes = {
        int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in row.split(",")
    }
    assert codes == {*map(int, ServerExit), *map(int, WorkerExit)}


def test_every_variable_that_a_worker_reads_stands_in_the_table() -> None:
    source = ast.parse((ROOT / "psworker" / "environment.py").read_text())
    literals = [node.value for node in ast.walk(source) if isinstance(node, ast.Constant)]
    read = {
        text for text in literals if isinstance(text, str) and re.fullmatch(r"PACELINE_\w+", text)
    }
    table = README.partition("| variable |")[2].partition("\n\n")[0]
    assert read
    assert not [variable for variable in read if f"`{variable}`" not in table]
