"""Shards that the tests of one session share: jobs are separate by name."""

from collections.abc import Iterator

import pytest

from tests.integration.cluster import Shards


@pytest.fixture(scope="session")
def shards() -> Iterator[Shards]:
    """Two shards."""
    with Shards(2) as started:
        yield started
        started.require_alive()
