"""Rule 5: how docstrings begin, and clauses with *who* or *what* and no noun before it."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, ROOT, modules, name, parse

# The first word says what the thing does: returns, sends, records. These say something else.
OPENINGS = {
    *("Is", "Are", "Has", "Have", "Lets", "Goes", "Gets", "Lends", "Comes", "Tells", "Told"),
    *("What", "Who", "Whose", "Whom", "Whoever", "Wherever"),
}
TAKES = re.compile(r"Takes (?!(?:the|a|an|its|this|no)? ?(?:\w+ )?(?:lock|argument))")
# A clause that begins with one of these words begins without a noun: it is at the begin of a
# sentence, or behind a mark, a conjunction or a preposition. A question may begin so, and a clause
# behind a noun and a comma: ", who send two values".
BEFORE = (
    r"(?:^|[.;:(] |\b(?:and|or|but|of|to|by|with|for|from|than|in|on|at|as|about|behind|beside) )"
)
HEADLESS = re.compile(
    rf"(?:{BEFORE}(?:who|whom|whose|what)|(?:{BEFORE}|, )(?:whoever|whomever|whatever)|, what)"
    r"\b(?!:)(?![^.;:]*\?)",
    re.IGNORECASE,
)


def docstrings(path: Path) -> Iterator[str]:
    """Yields the docstrings of a file, each in one line."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(parse(path)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield " ".join(text.split())


@functools.cache
def comments(path: Path) -> list[str]:
    """Returns the comments of a file, those of following lines as one."""
    found, text, last = [], "", -2
    reader = io.StringIO(path.read_text(encoding="utf-8")).readline
    for token in tokenize.generate_tokens(reader):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                found.append(text)
                text = ""
            text = f"{text} {token.string.lstrip('# ')}".strip()
            last = token.start[0]
    return [*found, text]


def begins_badly(docstring: str) -> bool:
    return docstring.partition(" ")[0] in OPENINGS or TAKES.match(docstring) is not None


def openings(package: str) -> list[str]:
    """Returns the docstrings of a package that begin with a word of the list."""
    return [
        f"{name(path)}: {text[:60]}"
        for path in modules(package)
        for text in docstrings(path)
        if begins_badly(text)
    ]


def headless(package: str) -> list[str]:
    """Returns the clauses of a package that begin without a noun, as far as a pattern can tell."""
    return [
        f"{name(path)}: {text[max(0, found.start() - 20) : found.end() + 30]}"
        for path in modules(package)
        for text in (*docstrings(path), *comments(path))
        for found in HEADLESS.finditer(text)
    ]


OUTSIDE = ("benchmarks", "examples", "scripts")
PLACES = (*PACKAGES, *OUTSIDE, "tests")


@pytest.mark.parametrize("package", PLACES)
def test_a_docstring_begins_with_an_ordinary_verb(package: str) -> None:
    found = openings(package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PLACES)
def test_a_clause_has_a_noun_before_who_and_what(package: str) -> None:
    found = headless(package)
    assert not found, "\n".join(found)


PRIVATE = re.compile(
    r"\b(?:vault|crew|desk|debts?|debtors?|lent|lends?|lending|owe[sd]?|owing|saboteur)\b",
    re.IGNORECASE,
)


def test_no_word_is_a_metaphor_that_only_we_know() -> None:
    """Names and text use the field's words: journal, executor, residual, view."""
    places = (*PACKAGES, *OUTSIDE, "proto", "docs")
    found = [
        f"{name(path)}: {word[0]}"
        for place in places
        for path in sorted((ROOT / place).rglob("*"))
        if path.suffix in (".py", ".md", ".proto")
        if path != Path(__file__)
        for word in PRIVATE.finditer(re.sub(r"[_.]", " ", path.read_text(encoding="utf-8")))
    ]
    assert not found


@pytest.mark.parametrize("package", PLACES)
def test_the_description_of_an_argument_is_a_noun_phrase(package: str) -> None:
    """`rank: Of the worker.` has no noun; `rank: Rank of the worker.` has one."""
    found = [
        f"{name(path)}: {text}"
        for path in modules(package)
        for text in re.findall(r"^ +\w+: Of .*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not found, "\n".join(found)


def test_a_name_of_a_test_begins_with_a_subject() -> None:
    found = [
        f"{name(path)}: {node.name}"
        for path in modules("tests")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and re.match(r"test_(?:who|whom|whose|whoever|what|whatever)_", node.name)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Who holds a lease reads.", 1),
        ("Returns what is left of it, and what was sent.", 1),
        ("The worker who pushed last.", 0),
        ("The authors, who send two values.", 0),
        ("what: Its kind.", 0),
        ("What is pushed here?", 0),
        ("Sends the residuals of whoever asks.", 1),
    ],
)
def test_the_pattern_finds_clauses_without_a_noun(text: str, count: int) -> None:
    assert len(HEADLESS.findall(text)) == count


def test_the_first_word_is_looked_at() -> None:
    assert begins_badly("Has nobody wait.")
    assert begins_badly("Takes one message off the wire.")
    assert not begins_badly("Takes the engine lock and runs.")
    assert not begins_badly("Returns what it has.")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_comment_is_no_genitive_without_a_noun(package: str) -> None:
    """`lr = 0.1  # Of the shards.` has no noun; `# The shards' rate.` has one."""
    found = [
        f"{name(path)}: {text[:60]}"
        for path in modules(package)
        for text in comments(path)
        if text.startswith("Of ")
    ]
    assert not found, "\n".join(found)
