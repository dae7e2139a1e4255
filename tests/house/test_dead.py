"""Promises to users and peers are kept: every error is raised, every verdict is given."""

import ast
import functools
import inspect

import pytest

from pscore import errors
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Verdict
from tests.house.source import PACKAGES, modules, name, parse

# Bases; only their subclasses are raised.
BASES = {"PacelineError"}
KINDS = [
    kind.__name__
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__name__ not in BASES
]


@functools.cache
def raised() -> frozenset[str]:
    """Returns the classes that some module makes an instance of."""
    return frozenset(
        node.func.id
        for path in modules(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )


def given() -> set[str]:
    """Returns the verdicts that the shard's decisions name."""
    return {
        node.attr
        for path in modules("psserver")
        if name(path) == "psserver/decisions/slice_clock.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "Verdict"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_tree_is_raised_somewhere(kind: str) -> None:
    assert kind in raised()


def test_every_verdict_is_given_and_travels() -> None:
    assert {verdict.name for verdict in Verdict} == given()
    assert [f"VERDICT_{verdict.name}" for verdict in Verdict] == data_pb2.Verdict.keys()
