"""A reader that waits says why, and asks a shard one thing at a time."""

import logging
import threading

import pytest

from pscore.awake import AwakeClock
from pscore.errors import ShardMapError
from pscore.subscription import reader
from pscore.subscription.lines import ReaderLine
from pscore.subscription.reader import Reader


class ToldError(Exception):
    """A line of the log."""


class Raising(logging.Handler):
    """Ends the wait that logs something."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ToldError(record.getMessage())


def test_a_wait_for_a_server_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "QUIET_S", 0.0)
    monkeypatch.setattr(reader, "explain_silence", lambda address: f"{address} is closed")
    monkeypatch.setattr(reader.log, "handlers", [Raising()])
    message = r"no version of job 'night'%s: shard 0 does not answer: .*; 127.0.0.1:1 is closed$"
    with Reader("127.0.0.1:1", job="night") as found:
        with pytest.raises(TimeoutError, match=message % " within 0 s"):
            found.wait(timeout_s=0.0)
        with pytest.raises(ToldError, match=message % " yet"):
            found.wait()


def test_a_wait_behind_one_that_has_failed_waits_for_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard refuses while another has yet to answer, whose line is used by one thread only."""
    is_asked, may_answer = threading.Event(), threading.Event()
    asked: list[int] = []

    def watch(line: ReaderLine, *_: object) -> None:
        asked.append(line.index)
        if line.index == 0:
            is_asked.wait()
            raise ShardMapError("another shard")
        is_asked.set()
        may_answer.wait()

    monkeypatch.setattr(ReaderLine, "watch", watch)
    monkeypatch.setattr(ReaderLine, "close", lambda *_: None)
    monkeypatch.setattr(reader, "ANSWER_S", 0.0)
    with Reader("127.0.0.1:1,127.0.0.1:2", job="night") as found:
        try:
            with pytest.raises(ShardMapError):
                found.wait()
            with pytest.raises(TimeoutError, match="yet to answer a call of the wait before"):
                found.wait(timeout_s=0.0)
            assert sorted(asked) == [0, 1]
        finally:
            may_answer.set()
        with pytest.raises(ShardMapError):
            found.wait()
        assert sorted(asked) == [0, 0, 1, 1]


def test_a_wait_goes_on_after_its_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would say that there was no version, and had asked for none since."""
    now_s = [0.0]
    asked: list[float] = []

    def watch(*_: object) -> None:
        asked.append(now_s[0])
        now_s[0] += 1000.0 if len(asked) == 2 else 1.0  # It is stopped while it waits.
        clock.tick()

    clock = AwakeClock(now=lambda: now_s[0])
    monkeypatch.setattr(reader, "awake_s", clock.read_s)
    monkeypatch.setattr(ReaderLine, "watch", watch)
    monkeypatch.setattr(ReaderLine, "close", lambda *_: None)
    message = "no version of job 'night' within 5 s"
    with Reader("127.0.0.1:1", job="night") as found, pytest.raises(TimeoutError, match=message):
        found.wait(timeout_s=5.0)
    assert asked == [0.0, 1.0, 1001.0, 1002.0]
