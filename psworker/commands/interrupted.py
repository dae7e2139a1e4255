"""Replaces the tracebacks of workers that Ctrl-C has ended by one sentence each.

A script that has imported `psworker` prints such a sentence itself. Before that, most often while
it imports torch, Python prints the frames of the import. The launcher cannot change that, but it
passes on the lines that a worker writes, so it leaves these frames out.
"""

from __future__ import annotations

import re

from pscore.commandline import DEBUG
from psworker.training.script_errors import is_of_script

HEADER = "Traceback (most recent call last):"
INTERRUPT = "KeyboardInterrupt"
FRAME = re.compile(r'\s+File "(?P<path>.*)", line (?P<line>\d+)')
# Lines between two tracebacks of one chain of exceptions.
LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class Interrupted:
    """The standard error of one worker after Ctrl-C: holds each traceback until it is complete.

    A traceback whose chain has a `KeyboardInterrupt` becomes a sentence with the script's
    line; every other line stays as it is. The state is that of a parser: `_held` has the lines of
    the chain so far, and `_is_open` tells whether its last traceback still lacks its exception.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_open = False

    def feed(self, line: str) -> list[str]:
        """Returns the lines to pass on after one more line, none while a traceback is held."""
        text = line.rstrip("\r\n")
        if self._is_open:
            self._held.append(line)
            self._is_open = not text or text[0].isspace()
            return []
        if text == HEADER:
            is_chained = any(line.strip() in LINKS for line in self._held[-3:])
            before = [] if is_chained else self.end()
            self._held.append(line)
            self._is_open = True
            return before
        if self._held and (not text or text in LINKS):
            self._held.append(line)
            return []
        return [*self.end(), line]

    def end(self) -> list[str]:
        """Returns the lines to pass on of the held traceback, at the end of the output as well."""
        held, self._held, self._is_open = self._held, [], False
        if not any(line.split(":")[0].strip() == INTERRUPT for line in held):
            return held
        return [f"psworker: interrupted by Ctrl-C ({_place(held)}{DEBUG}=1 shows the traceback)\n"]


def _place(held: list[str]) -> str:
    """Returns the last line of the script that the tracebacks name, with a semicolon."""
    frames = [frame for line in held if (frame := FRAME.match(line))]
    own = [frame for frame in frames if is_of_script(frame["path"])]
    return f"{own[-1]['path']}, line {own[-1]['line']}; " if own else ""
