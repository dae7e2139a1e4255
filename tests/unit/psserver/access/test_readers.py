"""A token that only reads published weights."""

from pathlib import Path

import pytest

from pscore.errors import AccessError, ConfigError
from pscore.net.credentials import Token, pick
from psserver.access.authorizer import Authorizer

READS, TRAINS = "r" * 20, "t" * 20
TOKENS = [Token(job="night:read", secret=READS), Token(job="night", secret=TRAINS)]


def test_it_reads_its_job_and_nothing_else() -> None:
    grant = Authorizer(TOKENS).admit(READS)
    grant.require_read("night")
    with pytest.raises(AccessError):
        grant.require("night")
    with pytest.raises(AccessError):
        grant.require_read("day")
    with pytest.raises(AccessError):
        grant.require_control("Status")
    Authorizer(TOKENS).admit(TRAINS).require_read("night")


def test_a_reader_takes_its_line_and_a_worker_does_not() -> None:
    path = Path("tokens")
    assert pick(TOKENS, "night", path, reads=True) == READS
    assert pick(TOKENS, "night", path) == TRAINS
    with pytest.raises(ConfigError, match="no token for job 'night'"):
        pick(TOKENS[:1], "night", path)
