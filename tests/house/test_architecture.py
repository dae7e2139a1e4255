"""Rule 9: ARCHITECTURE.md has every folder, every thread and every duty that the code has."""

import ast
import re
from collections.abc import Iterator

import pytest

import psserver.decisions
from tests.house.source import PACKAGES, ROOT, modules, name, parse

PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Returns the text of a section."""
    found = re.search(rf"^## {title}\n(.*?)(?=^#+ )", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def test_every_folder_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+/\w+)` \|", section("Folders"), re.MULTILINE)
    folders = {
        "/".join(path.relative_to(ROOT).parts[:2])
        for path in modules(*PACKAGES)
        if len(path.relative_to(ROOT).parts) > 2
    }
    assert sorted(rows) == sorted(folders - {"pscore/pb"})


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yields the names that threads are given; `data-*` where a part is made at run time."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: word.value for word in node.keywords}
        value: ast.expr | None = None
        if called(node) == "OwnedThread":
            value = given.get("name", node.args[1] if len(node.args) > 1 else None)
            assert value is not None, f"line {node.lineno}: a thread without a name"
        elif called(node) == "ThreadPoolExecutor":
            value = given.get("thread_name_prefix")
        elif called(node) == "DaemonExecutor" and len(node.args) == 2:
            value = node.args[1]
        if isinstance(value, ast.Constant):
            yield str(value.value)
        elif isinstance(value, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "*" for part in value.values
            )


def test_the_table_of_threads_is_that_of_the_code() -> None:
    code = {found for path in modules(*PACKAGES) for found in names_in(parse(path))}
    column = re.findall(r"^\| [^|]+ \| ([^|]+) \|", section("Threads and locks"), re.MULTILINE)
    shown = set(re.findall(r"`([a-z][a-z-]*)`", "\n".join(column)))
    patterns = {found for found in code if "*" in found}
    made = {one for one in shown for p in patterns if re.fullmatch(p.replace("*", r"\w+"), one)}
    assert code - patterns <= shown
    assert shown <= (code - patterns) | made
    assert made or not patterns


def makes_lock(node: ast.AST) -> bool:
    """Returns whether a node makes a lock: `threading.Lock()`, `default_factory=threading.Lock`."""
    made = node.func if isinstance(node, ast.Call) else None
    if isinstance(node, ast.keyword) and node.arg == "default_factory":
        made = node.value
    kinds = [f"threading.{kind}" for kind in ("Lock", "RLock", "Condition", "Semaphore")]
    return made is not None and ast.unparse(made) in kinds


def test_every_lock_stands_in_the_table() -> None:
    page = section("Threads and locks").partition("| lock | file |")[2]
    shown = sorted(re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \|", page, re.MULTILINE))
    code = {p for p in modules(*PACKAGES) if any(map(makes_lock, ast.walk(parse(p))))}
    assert sorted(set(shown)) == sorted(map(name, code))


def test_a_thread_without_a_name_is_found() -> None:
    with pytest.raises(AssertionError, match="without a name"):
        list(names_in(ast.parse("OwnedThread(f)")))
    text = 'OwnedThread(f, f"data-{x}", g); DaemonExecutor(2, "push"); ThreadPoolExecutor(3)'
    assert list(names_in(ast.parse(text))) == ["data-*", "push"]


def duties(text: str) -> list[str]:
    """Returns numbered items, without emphasis and line breaks."""
    items = re.findall(r"^\d\. (.*?)(?=^\d\. |^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return [" ".join(re.sub(r"[*`]", "", item).split()) for item in items]


def test_the_duties_of_a_driver_are_as_many_as_in_the_code() -> None:
    code = duties(psserver.decisions.__doc__ or "")
    if not code:
        pytest.skip("psserver/decisions/__init__.py does not number them")
    assert len(duties(section("Duties of a driver"))) == len(code)
