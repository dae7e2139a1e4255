"""Rule 7: every plug-in names its source."""

import ast
import re
from pathlib import Path

import pytest

from tests.house.source import modules, name, parse

PLACES = ("pscore/rules", "pscore/compressors", "pscore/local")
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
