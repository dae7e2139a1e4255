"""Rule 12: No broad except, nothing unpickled or evaluated, no machine's paths."""

import ast
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, ROOT, modules_or_skip, name, parse

# The first reports a bug in a method of the service; the process then ends with a log line.
# The last one calls a module of the user's, which may raise anything.
BROAD_EXCEPTS_ALLOWED = {
    "pscore/threads.py": 1,
    "psserver/service/refusals.py": 1,
    "psworker/transports/daemon_threads.py": 1,
    "pscore/registry.py": 1,  # A plug-in of another package.
    # A user's own code: a factory, a forward that is traced in two ways.
    "psworker/commands/models.py": 1,
    "psworker/pipeline/run/chain.py": 2,
    "psworker/training/changes/recovery.py": 1,  # It raises again what a signal's handler raised.
}
BROAD = {"Exception", "BaseException"}

UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save"}

# Written so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|farm)/|[.]library/|/opt/(wheels|pypi)")


def broad_excepts(tree: ast.AST) -> list[int]:
    """Returns the lines of handlers that catch everything."""
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return [node.lineno for node in handlers if node.type is None or names(node.type) & BROAD]


def names(caught: ast.expr) -> set[str]:
    """Returns the plain names that a handler catches."""
    return {node.id for node in ast.walk(caught) if isinstance(node, ast.Name)}


def unsafe(tree: ast.AST) -> list[str]:
    """Returns what in `tree` could run code that came as data."""
    problems: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            problems += [a.name for a in node.names if a.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            wanted = {f"{node.module}.{alias.name}" for alias in node.names}
            problems += sorted(wanted & UNSAFE_CALLS)
            problems += [m for m in [node.module or ""] if m.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.Call):
            problems += sorted({ast.unparse(node.func)} & UNSAFE_CALLS)
            problems += [k.arg for k in node.keywords if k.arg == "allow_pickle" and true(k.value)]
    return problems


def true(value: ast.expr) -> bool:
    """Returns whether an argument may be anything but a plain False."""
    return not (isinstance(value, ast.Constant) and value.value is False)


def tracked() -> list[Path]:
    """Returns the files that git tracks or would add."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for entry in listed.split("\0") if entry and (path := ROOT / entry).is_file()]


def test_nothing_catches_everything() -> None:
    counts = Counter(
        {name(path): len(broad_excepts(parse(path))) for path in modules_or_skip(*PACKAGES)}
    )
    assert not counts - Counter(BROAD_EXCEPTS_ALLOWED)


def test_nothing_is_unpickled_or_evaluated() -> None:
    problems = {name(path): unsafe(parse(path)) for path in modules_or_skip(*PACKAGES)}
    assert not {path: calls for path, calls in problems.items() if calls}


def test_no_file_names_a_path_of_one_machine() -> None:
    texts = {path: path.read_bytes().decode("utf-8", errors="ignore") for path in tracked()}
    found = {name(path): MACHINE_PATHS.search(text) for path, text in texts.items()}
    assert not {path: match[0] for path, match in found.items() if match}


@pytest.mark.parametrize(
    ("handler", "count"),
    [
        ("except:", 1),
        ("except Exception:", 1),
        ("except (ValueError, BaseException) as error:", 1),
        ("except ValueError:", 0),
    ],
)
def test_a_broad_except_is_seen(handler: str, count: int) -> None:
    assert len(broad_excepts(ast.parse(f"try:\n    f()\n{handler}\n    pass\n"))) == count


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_a_way_to_run_data_is_seen(text: str) -> None:
    assert len(unsafe(ast.parse(text))) == 1


def test_safe_loading_is_not_refused() -> None:
    assert not unsafe(ast.parse("import json\nnp.load(path, allow_pickle=False)\nmodel.eval()\n"))


def test_a_path_of_one_machine_is_seen() -> None:
    assert MACHINE_PATHS.search("cd " + "/".join(["", "work", "main"]))
    for parts in (["src", "work", "plan.py"], ["http:", "", "example.org", "work", "a"]):
        assert not MACHINE_PATHS.search("/".join(parts))


# Its reader is the other half of the demo, which shows a loss that is no number.
OWN_JSON = {"psworker/commands/demo/train.py"}


@pytest.mark.parametrize(
    "path",
    modules_or_skip("psserver/commands", "psserver/dashboard", "psworker/commands"),
    ids=name,
)
def test_json_for_others_is_written_in_one_place(path: Path) -> None:
    found = re.findall(r"\bjson\.dumps?\(", path.read_text(encoding="utf-8"))
    assert bool(found) == (name(path) in OWN_JSON)
