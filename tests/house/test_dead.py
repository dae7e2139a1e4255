"""Rule 10: errors are raised, verdicts are given, functions and classes are used."""

import ast
import functools
import inspect
import re
from dataclasses import dataclass

import pytest

from pscore import errors
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Verdict
from tests.house.source import PACKAGES, ROOT, modules, name, parse, tree_of

# Bases; only their subclasses are raised.
BASES = {"PacelineError"}
KINDS = [
    kind.__name__
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__name__ not in BASES
]


@dataclass(frozen=True)
class Names:
    """The names in a file."""

    defined: frozenset[str]  # Its functions and classes, also those in classes.
    used: frozenset[str]  # Those that it reads, imports, passes or writes as a whole string.
    called: frozenset[str]


def names_of(text: str) -> Names:
    """Returns the names in a file with this text."""
    defined, used, called = set(), set(), set()
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.alias):
            used.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    return Names(frozenset(defined), frozenset(used), frozenset(called))


@functools.cache
def files() -> dict[str, Names]:
    """Returns the names in each file of the packages, and of the programs beside them."""
    paths = modules(*PACKAGES, "benchmarks", "examples", "scripts")
    return {name(path): names_of(path.read_text(encoding="utf-8")) for path in paths}


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
    """Some module makes an instance of it."""
    ours = [names.called for where, names in files().items() if where.startswith(PACKAGES)]
    assert kind in frozenset().union(*ours)


def test_every_verdict_is_given_and_travels() -> None:
    assert {verdict.name for verdict in Verdict} == given()
    assert [f"VERDICT_{verdict.name}" for verdict in Verdict] == data_pb2.Verdict.keys()


# Libraries call these by name.
CALLED_BY_LIBRARIES = {
    *("intercept_unary_unary", "intercept_service"),  # gRPC
    *("extra_repr",),  # torch.nn.Module.
    *("do_GET", "log_message", "handle_error", "emit"),  # The standard library.
    *("on_fit_start", "on_validation_start", "on_validation_end"),  # Lightning.
    *("on_exception", "on_save_checkpoint", "on_fit_end", "on_train_start"),
    *("backend_cls", "on_start"),  # Ray Train.
    *("init_transfer_engine", "start_weight_update"),  # VLLM.
    *("update_weights", "finish_weight_update", "register_vllm"),
    *("forward_one_chunk", "backward_one_chunk"),  # Torch's pipeline schedules.
    *("perform_reduce_grad", "clear_runtime_states"),
    "config_show",  # Click: the command `config show`.
}


def unused(names: dict[str, Names], known: set[str]) -> set[str]:
    """Returns the functions and classes of our packages that no file uses and `known` lacks."""
    used = known.union(*(each.used for each in names.values()))
    return {
        f"{where}: {defined}"
        for where, each in names.items()
        if where.startswith(PACKAGES)
        for defined in each.defined - used
        if not defined.startswith("__")
    }


def test_every_function_and_class_is_used_or_documented() -> None:
    """A name that tests alone use is not part of the product."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    documented = {
        word
        for page in pages
        for code in re.findall(r"`([^`]+)`|^    .*$", page.read_text(encoding="utf-8"), re.M)
        for word in re.findall(r"\w+", code)
    }
    assert not unused(files(), documented | CALLED_BY_LIBRARIES)
    text = "def has_hyper(): ...\nclass Nobody: ...\nNobody()"
    assert unused({"pscore/a.py": names_of(text)}, set()) == {"pscore/a.py: has_hyper"}
