"""All that a shard publishes: how often, and how that outlives the shard's process."""

import asyncio
from pathlib import Path

import pytest

from psserver.publish.publications import Publications
from tests.unit.psserver.front import JOB, Front, play


@pytest.mark.parametrize(
    ("given", "later", "every", "continues"),
    [(4, 4, 2, True), (0, 0, 2, True), (4, 8, 8, False), (4, 2, 2, True)],
)
def test_a_killed_shard_continues_as_often_as_a_worker_has_asked(
    tmp_path: Path, given: int, later: int, every: int, continues: bool
) -> None:
    """Unless its operator has chosen another number since then."""
    lineages: list[int] = []

    async def scene(front: Front, *, asks: bool) -> None:
        settings = given if asks else later
        publications = Publications(front.engine, {JOB: settings} if settings else {}, tmp_path)
        if asks:
            publications.begin()
        await front.ready(num_workers=1)
        if asks:
            publications.publish(front.running, 0, 2)
        else:
            publications.begin()
        await asyncio.wrap_future(front.executor.submit(lambda: None))
        ((_, _, found),) = publications.listed()
        lineages.append(found.publication.lineage)
        assert found.publication.every == (2 if asks else every)
        with front.engine.lock:
            assert len(front.running.table(0).observers) == 1

    play(lambda front: scene(front, asks=True))
    play(lambda front: scene(front, asks=False))
    assert (lineages[0] == lineages[1]) == continues
