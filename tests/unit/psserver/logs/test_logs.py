"""Log lines: one for repeated messages; no content breaks a line or controls a terminal."""

import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from psserver.logs import floods, setup
from psserver.logs.floods import EVERY_S, Floods


@pytest.fixture(name="written", params=["text", "json"])
def _written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, io.StringIO]]:
    """A log file in one format; logging is as before afterwards."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(setup, "_floods", Floods())
    root = logging.getLogger()
    before = (root.handlers, root.level)
    setup.configure(request.param, "info", shard=3)
    yield request.param, stream
    root.handlers, _ = before
    root.setLevel(before[1])
    structlog.reset_defaults()


def test_text_of_a_peer_is_escaped_and_cut(written: tuple[str, io.StringIO]) -> None:
    log_format, stream = written
    structlog.get_logger().warning(
        "worker left",
        job="\x1b[31mred\nshard ready",
        reason="r" * 3_000_000,
        others=["\x9b2J", 4],
        kind=ValueError("\x1b"),
    )
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert "(3000000 characters)" in line
    assert len(line) < 4096
    if log_format == "json":
        values = json.loads(line)
        assert (values["shard"], values["others"]) == (3, [r"\x9b2J", 4])
        assert values["job"] == r"\x1b[31mred\nshard ready"


def test_a_traceback_keeps_its_lines_and_nothing_else(written: tuple[str, io.StringIO]) -> None:
    log_format, stream = written
    try:
        raise ValueError("\x1b[2J")
    except ValueError as problem:
        structlog.get_logger().error("shard broke", exc_info=problem)
    text = stream.getvalue()
    if log_format == "json":
        text = json.loads(text)["exception"]
    assert all(line.isprintable() for line in text.splitlines())
    assert "Traceback (most recent call last):\n" in text
    assert r"ValueError: \x1b[2J" in text


def test_a_line_of_a_library_comes_once_and_without_a_traceback(
    written: tuple[str, io.StringIO],
) -> None:
    _, stream = written
    for number in range(50):
        try:
            raise ValueError("noise")
        except ValueError:
            logging.getLogger("grpc").exception("message %d is none", number)
    (line,) = stream.getvalue().splitlines()
    assert "message 0 is none" in line
    assert "ValueError('noise') at " in line


def test_a_library_may_say_that_a_line_has_no_exception(written: tuple[str, io.StringIO]) -> None:
    """As OpenTelemetry does, whose thread would end with an error of ours."""
    _, stream = written
    logging.getLogger("otlp").error("no collector", exc_info=False)
    (line,) = stream.getvalue().splitlines()
    assert "no collector" in line


def test_a_peer_that_does_something_all_the_time_is_told_of_once(
    written: tuple[str, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stream = written
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for _ in range(1000):
        for peer in ("10.0.0.1", "10.0.0.2"):
            setup.sparsely("connection refused", peer, reason="no frame")
    setup.tell_left_out()
    assert len(stream.getvalue().splitlines()) == 2
    now_s += EVERY_S
    setup.sparsely("connection refused", "10.0.0.1", reason="no frame")
    setup.tell_left_out()
    told = stream.getvalue().splitlines()[2:]
    assert len(told) == 2
    assert all("left_out" in line and "999" in line for line in told)


def test_kinds_are_told_apart_and_forgotten_in_time() -> None:
    kept = Floods()
    assert [kept.admit("a", "x", 0.0), kept.admit("b", "x", 0.0), kept.admit("a", "y", 0.0)] == [
        0
    ] * 3
    assert [kept.admit("a", "x", 1.0), kept.admit("a", "x", 2.0)] == [None, None]
    assert kept.settle(EVERY_S - 1.0) == []
    assert kept.settle(EVERY_S) == [(("a", "x"), 2)]
    assert kept.admit("a", "x", EVERY_S) == 0


def test_so_many_peers_that_they_share_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floods, "KINDS_MAX", 2)
    kept = Floods()
    answers: list[Any] = [kept.admit("a", str(number), 0.0) for number in range(6)]
    assert answers == [0, 0, 0, None, None, None]
    assert kept.settle(EVERY_S) == [(("a", ""), 3)]
