"""Rules 1 and 3: Permitted imports, read from the files and from a fresh interpreter."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house.source import (
    PACKAGES,
    ROOT,
    file_imports,
    imports,
    modules,
    modules_or_skip,
    name,
    path_of,
)

# Imports that each package must not have, anywhere in it.
FORBIDDEN = {
    "pscore": {"psserver", "psworker", "pssim"},
    "psserver": {"psworker", "pssim", "torch"},
    "psworker": {"psserver", "pssim"},
    "pssim": {"benchmarks", "tests"},
}

# The core: message in, replies out; no I/O, no clock, no randomness, no threads. Nothing in it, nor
# any module of ours that it imports, directly or not, imports an impure one.
CORE = (
    "pscore/rules",
    "pscore/graphs",
    "pscore/compressors",
    "pscore/optimizers",
    "pscore/local",
    "pscore/overlaps",
    "pscore/partition.py",
    "psserver/decisions",
    "psworker/replica",
    "psworker/gossip",
    "pscore/subscription/assembly.py",
    "psworker/pipeline/plan/verdict.py",
    "psworker/pipeline/run/stage.py",
)
IMPURE = {
    "asyncio",
    "concurrent",
    "grpc",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "select",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
}


def forbidden(imported: Iterable[str], banned: set[str]) -> list[str]:
    return sorted(dotted for dotted in imported if dotted.split(".")[0] in banned)


def loaded(importing: list[str], watched: set[str]) -> set[str]:
    """Returns which of `watched` a fresh interpreter has loaded after importing `importing`."""
    program = (
        f"import importlib, sys\nfor name in {importing!r}: importlib.import_module(name)\n"
        f"print(*({watched!r} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def dotted_names(*places: str) -> list[str]:
    stems = [name(path).removesuffix(".py").removesuffix("/__init__") for path in modules(*places)]
    return [stem.replace("/", ".") for stem in stems]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_downwards(package: str) -> None:
    problems = {
        name(path): forbidden(file_imports(path), FORBIDDEN[package])
        for path in modules_or_skip(package)
    }
    assert not {path: names for path, names in problems.items() if names}


def reached(paths: list[Path]) -> set[Path]:
    """Returns these modules, and those of ours that they import, directly or not."""
    found: set[Path] = set()
    left = list(paths)
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for dotted in file_imports(path):
            if dotted.split(".")[0] in PACKAGES and not dotted.startswith("pscore.pb"):
                left.append(path_of(dotted))
    return found


@pytest.mark.parametrize("place", CORE)
def test_the_core_imports_nothing_impure(place: str) -> None:
    paths = reached(modules_or_skip(place))
    problems = {name(path): forbidden(file_imports(path), IMPURE) for path in paths}
    assert not {path: names for path, names in problems.items() if names}


def test_modules_are_reached_through_others() -> None:
    start = ROOT / "psserver/decisions/shard.py"
    assert ROOT / "pscore/plugins.py" in reached([start])
    assert ROOT / "psserver/engine/engine.py" not in reached([start])


def test_the_shared_core_loads_without_grpc() -> None:
    names = dotted_names("pscore/types.py", "pscore/errors.py", "pscore/net/wire.py", *CORE[:6])
    if not names:
        pytest.skip("pscore has no core module yet")
    assert not loaded(names, {"grpc"})


@pytest.mark.parametrize("module", ["psserver.decisions.shard", "psserver.decisions.membership"])
def test_a_shard_loads_without_torch_or_grpc(module: str) -> None:
    modules_or_skip(module.replace(".", "/") + ".py")
    assert not loaded([module], {"grpc", "torch"})


def test_imports_are_seen_in_every_form() -> None:
    text = """
import os.path as p
from grpc import aio
from . import a
from ..b import c
def f():
    if True:
        import time
"""
    found = set(imports(ast.parse(text), "pscore.rules"))
    assert found == {"os.path", "grpc.aio", "pscore.rules.a", "pscore.b.c", "time"}
    assert forbidden(found, IMPURE) == ["grpc.aio", "os.path", "time"]


def test_modules_that_an_interpreter_loads_are_seen() -> None:
    assert loaded(["json", "email"], {"json", "grpc"}) == {"json"}
