"""Log lines: structlog to standard error, as text for people or JSON for machines.

Text from peers (names, reasons) is escaped and cut here, in every line.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from pscore.text import printable
from psserver.logs.floods import Floods
from psserver.logs.patient import Patient
from psserver.logs.rotation import RotatingLog

TRACEBACK_LENGTH_MAX = 1 << 16
KIND_LENGTH_MAX = 256
_floods = Floods()
_floods_lock = threading.Lock()
Line = structlog.typing.EventDict


class Forward(logging.Handler):
    """Turns the lines of libraries that use `logging` into ours.

    A peer can have gRPC write one for each message that it sends, so they are sparse, and of an
    exception they say what and where it was.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Passes one line on."""
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info and (problem := record.exc_info[1]) is not None:
            frames = traceback.extract_tb(problem.__traceback__)
            where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            fields["problem"] = f"{problem!r}{where}"
        kind = f"{record.name}: {record.msg}"[:KIND_LENGTH_MAX]
        sparsely(record.getMessage(), level=record.levelno, kind=kind, **fields)


def sparsely(
    event: str, peer: str = "", *, level: int = logging.WARNING, kind: str = "", **fields: object
) -> None:
    """Logs an event that a peer can cause as often as it likes.

    Args:
        peer: The peer; one line in a while is written for each.
        kind: Name of the group of such lines, if that is not the event.
    """
    with _floods_lock:
        left_out = _floods.admit(kind or event, peer, time.monotonic())
    if left_out is None:
        return
    if peer:
        fields["peer"] = peer
    if left_out:
        fields["left_out"] = left_out
    structlog.get_logger().log(level, event, **fields)


def tell_left_out() -> None:
    """Logs how many lines `sparsely` has left out, once they have stopped; call it now and then."""
    with _floods_lock:
        over = _floods.settle(time.monotonic())
    for (event, peer), left_out in over:
        structlog.get_logger().warning(event, peer=peer, left_out=left_out)


def rotating(file: str | Path | None, max_mb: int) -> RotatingLog | None:
    """Returns a stream for a log file of bounded size; None if there is no file."""
    return None if file is None else RotatingLog(Path(file), max_mb << 20)


def configure(
    log_format: str, level: str, stream: RotatingLog | None = None, **always: object
) -> None:
    """Sets up logging for this process.

    Args:
        log_format: `text` or `json`.
        stream: Where lines go; else standard error.
        always: Keys that every line carries, such as `shard=0`.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            _adding(always),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _escaping,
            *_renderers(log_format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", stream or Patient(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [Forward()]
    root.setLevel(max(number, logging.WARNING))


def _adding(always: dict[str, object]) -> Callable[[Any, str, Line], Line]:
    def add(_logger: object, _method: str, line: Line) -> Line:
        return {**always, **line}

    return add


def _escaping(_logger: object, _method: str, line: Line) -> Line:
    trace = line.pop("exception", None)
    escaped = {key: _escaped(value) for key, value in line.items()}
    if trace is not None:
        escaped["exception"] = printable(str(trace), TRACEBACK_LENGTH_MAX, keep="\n")
    return escaped


def _escaped(value: object) -> object:
    """Returns a value that is shown as it is, or by `repr`, which escapes and may be long."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list | tuple):
        return [_escaped(one) for one in value]
    return value if isinstance(value, int | float | None) else printable(repr(value))


def _renderers(log_format: str) -> list[structlog.typing.Processor]:
    if log_format == "json":
        return [structlog.processors.JSONRenderer()]
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            pad_event_to=0,
            exception_formatter=structlog.dev.plain_traceback,  # `format_exc_info` has made it.
        )
    ]
