"""All that a shard publishes: how often, and how that outlives the shard's process."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from psserver.durability.sealed import read_json
from psserver.publish import publications
from psserver.publish.publications import FILE, Publications
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


def test_a_lineage_that_had_no_room_on_the_disk_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed shard would continue an older lineage else, which readers take for a late answer."""

    def full(path: Path, meta: object) -> None:
        raise OSError("No space left on device")

    async def scene(front: Front) -> None:
        table = Publications(front.engine, {JOB: 4}, tmp_path, now_s=lambda: 1e6)
        table.begin()
        with monkeypatch.context() as disk, capture_logs() as lines:
            disk.setattr(publications, "write_json", full)
            await front.ready(num_workers=1)
            for _ in range(3):
                table.tick()
        assert [line["log_level"] for line in lines].count("error") == 1
        assert not (tmp_path / FILE).exists()
        table.tick()
        ((_, _, found),) = table.listed()
        kept = read_json(tmp_path / FILE)
        assert kept == {f"{JOB}/model": [found.publication.lineage, 4, 4]}

    play(scene)
