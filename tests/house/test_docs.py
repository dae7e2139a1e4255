"""Rule 9: the pages agree with the code: commands, files, links, variables, generated tables."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from benchmarks import pages
from pscore import variables
from psserver.commands import cli as psserver_cli
from psserver.exits import Exit as ServerExit
from psserver.process.settings import SECTIONS
from psworker import DistributedOptimizer
from psworker.commands import cli as psworker_cli
from psworker.exits import Exit as WorkerExit
from tests.house.source import PACKAGES, ROOT, modules, parse

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands(page: str, program: str) -> set[str]:
    """Returns what follows `program` where a command is shown, up to a comment."""
    shown = re.findall(rf"(?:^|`){program} ([a-z][^`#\n]*)", page, re.MULTILINE)
    return {line.strip() for line in shown}


@pytest.mark.parametrize(("page", "lines"), [("ARCHITECTURE.md", 400), ("docs/dataplane.md", 120)])
def test_the_lengths_are_kept(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= lines


def test_the_front_page_takes_a_minute() -> None:
    assert len(README.split()) <= 650


def test_every_make_target_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needs = {README: {"run", "test"}, CONTRIBUTING: {"setup", "test-fast", "check"}}
    for text, needed in needs.items():
        assert needed <= set(re.findall(r"\bmake ([a-z-]+)", text)) <= set(targets)


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
        command = known[subcommand]
        items = command.get_params(typer.Context(command))
        options = {option for item in items for option in item.opts}
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


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_generated_table_is_the_one_that_its_program_makes(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert pages.MARKED.search(text)
    assert pages.filled(text) == text, "run `python -m benchmarks.pages`"


def test_every_page_with_a_generated_table_is_checked() -> None:
    marked = [name(path) for path in PAGES if "<!-- begin " in path.read_text(encoding="utf-8")]
    assert sorted(marked) == sorted(pages.PAGES)


def test_every_exit_code_stands_in_the_reference() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)}
    assert codes == {*map(int, ServerExit), *map(int, WorkerExit)}


def variables_in_code() -> set[str]:
    """Returns the names of our variables that stand in a string of the packages, or of a setting.

    A docstring counts too: it must not name a variable that is gone.
    """
    strings = [
        node.value
        for path in modules(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = set(re.findall(r"\bPACELINE_[A-Z_]*[A-Z]\b", "\n".join(strings)))
    settings = {
        f"{kind.model_config['env_prefix']}{field.upper()}"
        for kind in SECTIONS.values()
        for field in kind.model_fields
    }
    return named | settings


def test_the_reference_has_every_variable_that_the_code_reads_and_no_other() -> None:
    shown = set(re.findall(r"`(PACELINE_[A-Z_]+)`", REFERENCE))
    assert shown == variables_in_code()


def test_a_misspelt_variable_is_compared_with_every_one_that_the_code_reads() -> None:
    assert {f"{variables.PREFIX}{name}" for name in variables.NAMES} == variables_in_code()


def test_refused_variables_are_names_of_arguments_options_or_settings() -> None:
    run = get_command(psworker_cli.app).commands["run"]  # type: ignore[attr-defined]
    names = {*inspect.signature(DistributedOptimizer).parameters, *(it.name for it in run.params)}
    assert {name.lower() for name in variables.ELSEWHERE} <= names
    assert set(variables.OF_OTHER_SHARDS) <= set(variables.NAMES)
    assert not set(variables.ELSEWHERE) & set(variables.NAMES)


def test_the_variables_of_other_launchers_stand_in_the_reference() -> None:
    source = parse(ROOT / "psworker" / "job" / "environment.py")
    read = {
        node.value
        for node in ast.walk(source)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(DMLC|TORCHELASTIC|LOCAL|WORLD)_\w+|RANK", node.value)
    }
    assert read - {"DMLC_"}
    assert not [variable for variable in read - {"DMLC_"} if f"`{variable}`" not in REFERENCE]
