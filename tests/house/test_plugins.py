"""Rule 6: Every plug-in names its source, and nothing asks for a plug-in's name."""

import ast
import re
from pathlib import Path

import pytest

from pscore.compressors import COMPRESSORS
from pscore.local import LOCAL_UPDATES
from pscore.optimizers import OPTIMIZERS
from pscore.overlaps import OVERLAPS
from pscore.rules import RULES
from tests.house.source import PACKAGES, modules, name, parse

PLACES = ("pscore/rules", "pscore/compressors", "pscore/local", "pscore/overlaps")
NAMES = {*COMPRESSORS, *LOCAL_UPDATES, *OPTIMIZERS, *OVERLAPS, *RULES}
PLUGINS = [path for path in modules(*PLACES) if path.stem not in {"__init__", "base"}]

# A year, a preprint, or ourselves.
SOURCE = re.compile(r"\b(19|20)\d\d\b|arXiv:\d{4}\.\d{4,5}|\bPaceline\b")


def cites(tree: ast.Module) -> bool:
    return SOURCE.search(ast.get_docstring(tree) or "") is not None


@pytest.mark.parametrize("path", PLUGINS, ids=name)
def test_a_plugin_cites_its_source(path: Path) -> None:
    assert cites(parse(path)), f"{name(path)}: no year, arXiv number or 'Paceline' in its docstring"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""Ho et al., NeurIPS 2013."""', True),
        ('"""See arXiv:1609.08326."""', True),
        ('"""Ours: Paceline\'s own."""', True),
        ('"""Makes training faster by 12345 percent."""', False),
        ("# Ho et al., NeurIPS 2013", False),
    ],
)
def test_a_citation_is_told_from_its_absence(text: str, expected: bool) -> None:
    assert cites(ast.parse(text)) is expected


def branches(tree: ast.Module) -> list[int]:
    """Returns the lines that compare something's `name` with the name of a plug-in."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Attribute) and part.attr == "name" for part in ast.walk(node))
        and any(isinstance(part, ast.Constant) and part.value in NAMES for part in ast.walk(node))
    ]


def test_nothing_branches_on_the_name_of_a_plugin() -> None:
    found = {name(path): branches(parse(path)) for path in modules(*PACKAGES)}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('if compressor.name == "none": pass', [1]),
        ('x = [1 for a in b if "2bit" != a.rule.name]', [1]),
        ('is_dense = job.rule.name in ("ssgd", "od")', [1]),
        ('if name == "none" or spec.name == "weight": pass', []),
        ("if spec.name == other.name: pass", []),
    ],
)
def test_a_branch_on_a_name_is_seen(text: str, expected: list[int]) -> None:
    assert branches(ast.parse(text)) == expected
