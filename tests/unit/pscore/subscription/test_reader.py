"""A reader that waits says why, also if its wait has no end."""

import logging

import pytest

from pscore.subscription import reader
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
