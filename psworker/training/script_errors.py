"""Prints one sentence instead of a traceback when a Paceline error or Ctrl-C ends a script.

The frames of such a traceback are Paceline's own and say little to the author of a script. The
sentence names the script's own line; PACELINE_DEBUG=1 shows the traceback. All other exceptions
are handled as before. `psworker run` asks for it with PACELINE_SHORT_ERRORS=1; a script that is
started in another way calls `psworker.print_short_errors()`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import TracebackType

from pscore.commandline import DEBUG, is_debugging
from pscore.errors import PacelineError

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
# Folders of code that is not the script's: Paceline, Python, and installed packages.
OTHERS = (
    *(os.path.join(_HERE, package, "") for package in ("psworker", "pscore")),
    os.path.join(sysconfig.get_path("stdlib"), ""),
    "<frozen",
)
SHORT = "PACELINE_SHORT_ERRORS"  # Set: `import psworker` calls `print_short_errors`.
INSTALLED = ("site-packages", "dist-packages")


def print_short_errors() -> None:
    """Prints a Paceline error that ends the script in one sentence: replaces `sys.excepthook`."""
    global _former
    if sys.excepthook is not _hook:
        _former, sys.excepthook = sys.excepthook, _hook


def sentence_of(problem: BaseException) -> str:
    """Returns the message: the reason, the line of the script, and how to see more."""
    reason = "interrupted by Ctrl-C" if isinstance(problem, KeyboardInterrupt) else str(problem)
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(problem.__traceback__)
        if is_of_script(frame.f_code.co_filename)
    ]
    # Some code has no file: of dataclasses, or of `python -c`.
    lines = [found for found in lines if not found[0].startswith("<")] or lines
    place = f"{lines[-1][0]}, line {lines[-1][1]}; " if lines else ""
    return f"psworker: {reason} ({place}{DEBUG}=1 shows the traceback)"


def is_of_script(path: str) -> bool:
    """Returns whether a file is the script's, and not Paceline's, Python's or a package's."""
    return not path.startswith(OTHERS) and not any(folder in path for folder in INSTALLED)


def _hook(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(problem, PacelineError | KeyboardInterrupt):
        _former(kind, problem, trace)
        return
    if is_debugging():
        _former(kind, problem, trace)
    sys.stderr.write(f"{sentence_of(problem)}\n")
    sys.stderr.flush()


_former = sys.excepthook
