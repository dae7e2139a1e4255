"""Shards that the tests of one session share: jobs are separate by name."""

import multiprocessing
from collections.abc import Iterator

import pytest

from tests.integration.cluster import Shards


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Has torch and psworker imported once for all worker processes."""
    multiprocessing.set_forkserver_preload(["tests.integration.preload"])


@pytest.fixture(scope="session")
def shards() -> Iterator[Shards]:
    """Two shards."""
    with Shards(2) as started:
        yield started
