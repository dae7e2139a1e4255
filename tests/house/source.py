"""Reads our own source text: its files, their imports and their definitions."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pscore", "psserver", "psworker", "pssim")
GENERATED = ROOT / "pscore" / "pb"


def modules(*places: str) -> list[Path]:
    """Returns our Python files at or below `places` (relative to the root), not generated ones."""
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [path for path in found if not path.is_relative_to(GENERATED)]


def modules_or_skip(*places: str) -> list[Path]:
    """Returns `modules`, or skips the test while nobody has written any."""
    found = modules(*places)
    if not found:
        pytest.skip(f"no Python file at {', '.join(places)} yet")
    return found


def name(path: Path) -> str:
    """Returns the path as it is written in messages."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(text: str) -> ast.Module:
    """Returns the syntax tree of a text, which nobody changes."""
    return ast.parse(text)


@functools.cache
def parse(path: Path) -> ast.Module:
    """Returns the syntax tree of a file, which nobody changes."""
    return tree_of(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Yields the dotted name of everything imported anywhere in `tree`.

    `from a import b` yields `a.b`. `package` is what a relative import counts from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -(node.level - 1) or None] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@functools.cache
def file_imports(path: Path) -> frozenset[str]:
    """Returns `imports` of one of our files."""
    return frozenset(imports(parse(path), ".".join(path.relative_to(ROOT).parent.parts)))


def path_of(dotted: str) -> Path:
    """Returns the file of ours that an import of `dotted`, a module or a name in one, loads."""
    parts = dotted.split(".")
    while parts:
        path = ROOT.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        parts.pop()
    raise LookupError(f"no module of ours is {dotted}")


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yields the names that a module defines, those in classes as `Class.name`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign):
            yield from (prefix + t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id
