"""Log lines: structlog to standard error, as text for people or JSON for machines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

import structlog

Line = structlog.typing.EventDict


class Forward(logging.Handler):
    """Turns the lines of libraries that use `logging` into ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Passes one line on."""
        log = structlog.get_logger()
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


class Patient:
    """A stream for log lines that drops what cannot be written: a full disk ends nobody."""

    def __init__(self, stream: TextIO) -> None:
        """Writes to what `stream` writes to, without keeping anything in memory."""
        buffer = getattr(stream, "buffer", None)
        self._raw: Any = getattr(buffer, "raw", None)
        self._stream = stream
        self._num_lost = 0

    def write(self, text: str) -> None:
        """Writes a text; says first how many could not be written before it."""
        lost, self._num_lost = self._num_lost, 0
        if lost:
            text = f"\n({lost} lines before this could not be written)\n{text}"
        try:
            if self._raw is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                self._write_all(text.encode(errors="backslashreplace"))
        except (OSError, ValueError):  # Full, or closed.
            self._num_lost = lost + 1

    def flush(self) -> None:
        """Does nothing: each text has left."""

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[self._raw.write(data) or 0 :]


def configure(log_format: str, level: str, **always: object) -> None:
    """Sets up logging for this process.

    Args:
        log_format: `text` or `json`.
        level: The lowest level that is written.
        always: Keys that every line carries, such as `shard=0`.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            _adding(always),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(log_format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", Patient(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [Forward()]
    root.setLevel(max(number, logging.WARNING))


def _adding(always: dict[str, object]) -> Callable[[Any, str, Line], Line]:
    def add(_logger: object, _method: str, line: Line) -> Line:
        return {**always, **line}

    return add


def _renderers(log_format: str) -> list[structlog.typing.Processor]:
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=plain
        )
    ]
