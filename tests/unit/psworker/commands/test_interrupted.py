"""Tracebacks of workers that Ctrl-C has ended, as the launcher passes them on."""

from psworker.commands.interrupted import Interrupted

PLAIN = """Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    import torch
  File "/usr/lib/python3/site-packages/torch/__init__.py", line 9, in <module>
    import numpy
KeyboardInterrupt
"""
CHAINED = """Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    import torch
KeyboardInterrupt

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    import torch
ImportError: a part is missing
"""
OTHER = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    save()

OSError: no space left
"""
SENTENCE = (
    "psworker: interrupted by Ctrl-C (/home/me/train.py, line 3; "
    "PACELINE_DEBUG=1 shows the traceback)\n"
)


def passed_on(text: str) -> str:
    output = Interrupted()
    lines = [line for fed in text.splitlines(keepends=True) for line in output.feed(fed)]
    return "".join([*lines, *output.end()])


def test_a_traceback_of_ctrl_c_becomes_a_sentence_with_the_scripts_line() -> None:
    assert passed_on(PLAIN) == SENTENCE


def test_a_chain_with_ctrl_c_in_it_becomes_one_sentence() -> None:
    assert passed_on(CHAINED) == SENTENCE


def test_other_tracebacks_and_lines_stay_as_they_are() -> None:
    text = f"saving\n{OTHER}\nsaved\n"
    assert passed_on(text) == text


def test_tracebacks_that_follow_each_other_are_told_apart() -> None:
    assert passed_on(f"{PLAIN}{OTHER}{PLAIN}left\n") == f"{SENTENCE}{OTHER}{SENTENCE}left\n"


def test_a_traceback_that_is_cut_off_is_passed_on() -> None:
    cut = "".join(OTHER.splitlines(keepends=True)[:2])
    assert passed_on(cut) == cut
