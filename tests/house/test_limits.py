"""Rules 2 and 4: columns, lines of a function, public names of a class; ASCII; unique classes."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, modules_or_skip, name, parse, tree_of

COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
CLASS_NAMES_MAX = 20
PROGRAMS = ("examples", "benchmarks", "scripts")
OUTSIDE_PACKAGES = ("tests", *PROGRAMS)


def too_wide(text: str) -> list[str]:
    return [
        f"line {number}: {len(line)} columns"
        for number, line in enumerate(text.splitlines(), start=1)
        if len(line) > COLUMNS_MAX
    ]


def too_long(text: str) -> list[str]:
    functions = [
        node
        for node in ast.walk(tree_of(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {node: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    return [
        f"line {node.lineno}: {node.name} has {length} lines"
        for node, length in lengths.items()
        if length > FUNCTION_LINES_MAX
    ]


def problems_of(check: Callable[[str], list[str]], paths: list[Path]) -> list[str]:
    return [
        f"{name(path)} {problem}"
        for path in paths
        for problem in check(path.read_text(encoding="utf-8"))
    ]


def test_no_line_is_wider_than_100_columns() -> None:
    assert not problems_of(too_wide, modules_or_skip(*PACKAGES, *OUTSIDE_PACKAGES))


def test_no_function_is_longer_than_70_lines() -> None:
    assert not problems_of(too_long, modules_or_skip(*PACKAGES, *OUTSIDE_PACKAGES))


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in modules_or_skip(*PACKAGES):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                yield f"{name(path)}:{node.name}", node


def test_no_class_shows_more_than_20_names() -> None:
    numbers = {
        where: sum(
            not item.name.startswith("_")
            for item in node.body
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        for where, node in classes()
    }
    over = {where: number for where, number in numbers.items() if number > CLASS_NAMES_MAX}
    assert not over


def packed(text: str) -> list[str]:
    """Returns the calls with arguments that are packed into a literal and unpacked at once."""
    return [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(tree_of(text))
        if isinstance(node, ast.Call)
        if any(
            isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List)
            for argument in node.args
        )
    ]


def test_no_arguments_are_packed_to_be_unpacked_at_once() -> None:
    assert not problems_of(packed, modules_or_skip(*PACKAGES, *PROGRAMS))
    assert packed("f(*(a, b))") == ["line 1: f"]
    assert not packed("f(*a, *(b for b in c))")


def test_source_is_ascii() -> None:
    paths = modules_or_skip(*PACKAGES)
    assert not [name(path) for path in paths if not path.read_text(encoding="utf-8").isascii()]


@pytest.mark.parametrize(("lines", "problems"), [(70, 0), (71, 1)])
def test_the_function_limit_is_reached_and_not_passed(lines: int, problems: int) -> None:
    text = "class A:\n    def f(self):\n" + "        pass\n" * (lines - 1)
    assert len(too_long(text)) == problems


@pytest.mark.parametrize(("columns", "problems"), [(100, 0), (101, 1)])
def test_the_column_limit_is_reached_and_not_passed(columns: int, problems: int) -> None:
    assert len(too_wide("x" * columns + "\n")) == problems


# Plug-ins that are named alike on purpose, and both programs' exit codes. It may only shrink.
TWINS = {"DelayedNesterov", "Exit", "Mirror", "SlowMo"}


def test_a_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in modules_or_skip(*PACKAGES):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name(path))
    twins = {cls: found for cls, found in places.items() if len(found) > 1}
    assert set(twins) == TWINS, twins
