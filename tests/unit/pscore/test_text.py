"""Text of others as people see it: nothing in it moves a cursor, and none of it is endless."""

import pytest

from pscore.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("job 7, caf\u00e9 \u6f22", "job 7, caf\u00e9 \u6f22"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("a\nb\r\tc\0", r"a\nb\r\tc\x00"),
        ("\x9b31m", r"\x9b31m"),  # An escape sequence in one character.
        ("abc\u202edef\u2028", r"abc\u202edef\u2028"),  # Turns the line around; ends it.
        ("\ud800", r"\ud800"),  # Half a character: it could not be written.
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    printable(text).encode()


def test_the_end_of_a_long_text_is_cut_off_and_its_length_told() -> None:
    assert printable("x" * 3_000_000, 10) == "xxxxxxxxxx... (3000000 characters)"
    assert printable("x" * 10, 10) == "x" * 10


def test_line_ends_may_stay() -> None:
    assert printable("a\n\x1bb", keep="\n") == "a\n\\x1bb"
