"""Log lines: structlog to standard error, as text for people or JSON for machines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import structlog

Line = structlog.typing.EventDict


class Forward(logging.Handler):
    """Turns the lines of libraries that use `logging` into ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Passes one line on."""
        log = structlog.get_logger()
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


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
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
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
