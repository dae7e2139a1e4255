"""The names that a training script finds in `psworker` and on `DistributedOptimizer`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import psworker
import psworker.training.modes  # A module does not take the place of a name.
from psworker.training import figures, optimizer

# Beside those of `torch.optim.Optimizer`.
OURS = {
    "clock",
    "close",
    "global_weights",
    "missed",
    "report_to",
    "no_sync",
    "report",
    "rule",
    "samples",
    "samples_seen",
    "set_mode",
    "skip_step",
    "steps",
    "traffic",
}
PARTS = ((optimizer, "DistributedOptimizer"), (figures, "WorkerFigures"))
OF_TORCH = {"add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"}


def names_of(tree: ast.ClassDef) -> set[str]:
    """Returns the names of methods, and of attributes that some method sets."""
    names = {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}
    return names | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_the_optimizer_shows_only_what_a_user_may_call() -> None:
    found = set()
    for module, name in PARTS:
        tree = ast.parse(Path(str(module.__file__)).read_text())
        (its,) = [i for i in tree.body if isinstance(i, ast.ClassDef) and i.name == name]
        found |= names_of(its)
    assert {name for name in found if not name.startswith("_")} == OURS | OF_TORCH


def imports_for_a_type_checker() -> Iterator[tuple[str, str]]:
    """Yields module and name of each import of `psworker` for a type checker only."""
    tree = ast.parse(Path(psworker.__file__).read_text())
    for block in (item for item in tree.body if isinstance(item, ast.If)):
        for item in block.body:
            if isinstance(item, ast.ImportFrom):
                yield from ((str(item.module), alias.name) for alias in item.names)


def test_names_for_the_type_checker_exist_in_the_same_module() -> None:
    lazy = {(module, name) for module, names in psworker._FROM.items() for name in names}
    every = {(module, "*") for module in psworker._PLUGINS}
    assert set(imports_for_a_type_checker()) == lazy | every
    assert {name for _, name in lazy} < set(dir(psworker))
    taken: dict[str, object] = {}
    exec("from psworker import *", taken)
    assert taken.keys() - {"__builtins__"} == set(dir(psworker))
    for module, name in lazy:
        assert getattr(psworker, name) is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="'psworker' has no attribute 'nonesuch'"):
        psworker.nonesuch  # type: ignore[attr-defined]  # noqa: B018


LIGHT = """
import sys
import psworker.__main__ as program
import psworker.commands.run
heavy = {"torch", "numpy", "numba", "grpc", "rich"}
for words in (["--help"], ["run", "--help"], ["--version"]):
    sys.argv[1:] = words
    try:
        program.main()
    except SystemExit as end:
        assert not end.code, words
    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())
"""


def test_help_version_and_the_launcher_do_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "paceline " in done.stdout
