"""Every thread reports its failure to its owner: it is made in pscore/threads.py."""

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import PACKAGES, modules, name, parse

MAKERS = ("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "ThreadingMixIn")
# Files with makers of their own, and the way in which a failure there reaches those who wait.
OWN = {
    "pscore/threads.py": "the one place",
    "psserver/copies/copier.py": "the outcome of each attempt is read",
    "psserver/mending/mender.py": "the result of each restore is read",
    "psserver/process/daemon.py": "`SliceQueue.run` reports the failure of an action itself",
    "psserver/process/checkpoint_schedule.py": "the outcome of each checkpoint is read",
    "psserver/remote/checkpoint.py": "the result of each call is read",
    "pscore/subscription/reader.py": "the result of each call is read",
}


def makers(tree: ast.AST) -> Iterator[int]:
    """Yields the lines at which threads are made, or classes that make them."""
    for node in ast.walk(tree):
        named: list[ast.expr] = []
        if isinstance(node, ast.Call):
            named = [node.func]
        elif isinstance(node, ast.ClassDef):
            named = node.bases
        for one in named:
            if (one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "")) in MAKERS:
                yield one.lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_threads_are_made_in_one_place(package: str) -> None:
    found = {name(path): list(makers(parse(path))) for path in modules(package)}
    assert {path: lines for path, lines in found.items() if lines and path not in OWN} == {}


def test_the_exceptions_make_threads_still() -> None:
    made = {name(path) for path in modules(*PACKAGES) if any(makers(parse(path)))}
    assert made >= OWN.keys()


def test_a_thread_of_another_kind_is_found() -> None:
    text = "import threading\nthreading.Timer(1.0, f)\nclass A(threading.Thread): pass\nThread()"
    assert sorted(makers(ast.parse(text))) == [2, 3, 4]
