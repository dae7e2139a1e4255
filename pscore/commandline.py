"""Parts that `psserver` and `psworker` share: wide help, a version, and errors in one sentence."""

from __future__ import annotations

import codecs
import contextlib
import errno
import inspect
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pscore.errors import ConfigError
from pscore.text import printable
from pscore.variables import require_known

DEBUG = "PACELINE_DEBUG"  # A variable, so that the processes that a command starts have it too.
WIDTH_MAX = 240  # Largest width of help, in columns; less where the terminal has less.
INTERRUPTED = 130  # As in a shell: 128 and the number of SIGINT.
OUTPUT_FAILED = os.EX_IOERR  # Exit code if standard output cannot be written.
# Characters of `rich` and of bars, for a terminal that has ASCII only.
IN_ASCII = {0x2026: ".", **dict(zip(range(0x2581, 0x2589), "_.:-=+*#", strict=True))}
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH_MAX}


def replaceable(path: Path) -> Path:
    """Returns the file that a command may replace at a path, behind links such as /dev/stdout.

    Raises:
        OSError: A folder, a device or a pipe is there.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file that can be replaced", str(path))
    return path.resolve()


class OutputError(OSError):
    """Standard output cannot be written: its disk is full, or its reader has gone."""


class Output(io.TextIOWrapper):
    """Standard output of a command: an error names it, and each character can be written."""

    def __init__(self, former: io.TextIOWrapper) -> None:
        """Replaces another wrapper of the stream, which stays open with it."""
        super().__init__(
            former.buffer,
            encoding=former.encoding,
            errors="paceline",
            line_buffering=former.line_buffering,
            write_through=former.write_through,
        )
        self._former = former  # It would close the stream when it is collected.

    def write(self, text: str) -> int:
        """Writes text; raises `OutputError` where that fails."""
        with _named():
            return super().write(text)

    def flush(self) -> None:
        """Writes text that is kept in memory; raises `OutputError` where that fails."""
        with _named():
            super().flush()

    def close(self) -> None:
        """Leaves the stream open: the former wrapper has it too."""


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise OutputError(problem.errno, problem.strerror) from problem


def _write_in_ascii(problem: UnicodeError) -> tuple[str | bytes, int]:
    """Replaces characters that an encoding lacks: by a similar one, else by an escape."""
    assert isinstance(problem, UnicodeEncodeError)
    lacking = problem.object[problem.start : problem.end].translate(IN_ASCII)
    return lacking.encode("ascii", "backslashreplace").decode("ascii"), problem.end


def open_standard_streams() -> None:
    """Prepares standard output, and opens /dev/null for a stream that is closed; call this first.

    Otherwise the next file or socket would get its number, and would receive text for people.
    Beside our sentences gRPC writes nothing to standard error.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number.
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(number), "w", encoding="utf-8"))
    codecs.register_error("paceline", _write_in_ascii)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout = Output(sys.stdout)


def run(app: Any, name: str) -> None:
    """Runs one command of a `typer.Typer`; reports if Ctrl-C or a full disk ends it.

    Raises:
        ConfigError: A variable of the environment is misspelt, or the working directory is gone.
    """
    require_known(os.environ)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was deleted: change to another one") from None
    for group in (app, *(entry.typer_instance for entry in app.registered_groups)):
        for command in group.registered_commands:  # Whole sentences, where typer cuts them off.
            command.short_help = (inspect.getdoc(command.callback) or "").partition("\n")[0]
    try:
        try:
            app(prog_name=name)
        finally:
            sys.stdout.flush()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            tell_interrupted(name)
        raise
    except OutputError as problem:
        _end_without_output(name, problem)


def _end_without_output(name: str, problem: OutputError) -> None:
    """Ends the process: with a sentence, unless the reader of a pipe has gone."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)  # The interpreter writes the rest at its end.
    if problem.errno == errno.EPIPE:
        sys.exit(1)  # As typer ends a command.
    tell_error(name, OSError(f"cannot write standard output: {problem.strerror}"))
    sys.exit(OUTPUT_FAILED)


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Makes Ctrl-C end this process at once with one sentence: around imports that take seconds.

    Modules that are being imported catch KeyboardInterrupt, or make an ImportError of it.
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
