"""Tables for people in terminals of any width."""

import io
import string

import pytest
from rich.console import Console

from pscore.grid import Grid

WORDS = ("third", "a longer text of the last column", "of", string.ascii_letters[:22])


def printed(width: int) -> str:
    stream = io.StringIO()
    grid = Grid(("", "what it is", "of"), [["third", WORDS[1], WORDS[3]]], "job of 2")
    Console(file=stream, width=width).print(grid)
    return stream.getvalue()


@pytest.mark.parametrize("width", range(22, 120))
def test_no_word_is_cut_at_any_width(width: int) -> None:
    found = printed(width)
    assert set(" ".join(WORDS).split()) <= set(found.replace(";", " ").split())
    assert max(map(len, found.splitlines())) <= width
    assert ("- third; what it is" in " ".join(found.split())) == (width < 43)


def test_where_there_is_room_each_row_is_one_line() -> None:
    assert [line for line in printed(78).splitlines() if WORDS[1] in line and WORDS[3] in line]
