"""Parts that `psserver` and `psworker` share: wide help, a version, and errors in one sentence."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from pscore.text import printable

DEBUG = "PACELINE_DEBUG"  # A variable, so that the processes that a command starts have it too.
WIDTH_MAX = 240  # Largest width of help, in columns; less where the terminal has less.
INTERRUPTED = 130  # As in a shell: 128 and the number of SIGINT.
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH_MAX}


def open_standard_streams() -> None:
    """Opens /dev/null instead of a standard stream that is closed; call this first.

    Otherwise the next file or socket would get its number, and would receive text for people.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number.
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(number), "w", encoding="utf-8"))


def run(app: Any, name: str) -> None:
    """Runs one command of a `typer.Typer`; reports if Ctrl-C ends it.

    Args:
        app: With all of its commands.
        name: Name of the program.
    """
    for group in (app, *(entry.typer_instance for entry in app.registered_groups)):
        for command in group.registered_commands:  # Whole sentences, where typer cuts them off.
            command.short_help = (inspect.getdoc(command.callback) or "").partition("\n")[0]
    try:
        app(prog_name=name)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            tell_interrupted(name)
        raise


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Makes Ctrl-C end this process at once with one sentence: around imports that take seconds.

    Modules that are being imported catch KeyboardInterrupt, or make an ImportError of it.

    Args:
        name: Name of the program.
    """

    def end(number: int, frame: FrameType | None) -> None:
        tell_interrupted(name)
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # It is ignored, or the program has its own.
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show_version(wanted: bool) -> None:
    """Prints the version of Paceline and ends the process, if that is wanted."""
    if wanted:
        import importlib.metadata

        sys.stdout.write(f"paceline {importlib.metadata.version('paceline')}\n")
        sys.stdout.flush()
        sys.exit(0)


def set_debug(wanted: bool) -> None:
    """Makes this process, and those that it starts, show tracebacks, if that is wanted."""
    if wanted:
        os.environ[DEBUG] = "1"


def is_debugging() -> bool:
    """Returns whether an error comes with its traceback."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def tell_interrupted(name: str) -> None:
    """Reports that Ctrl-C has ended this process."""
    sys.stderr.write(f"{name}: interrupted by Ctrl-C\n")


def tell_error(name: str, problem: BaseException) -> None:
    """Writes `name: problem` to standard error, below its traceback if that is wanted."""
    if is_debugging():
        traceback.print_exception(problem)
    shown = printable(str(problem), keep="\n")
    sys.stderr.write(f"{name}: {shown}\n")
    sys.stderr.flush()
