"""The metrics of published weights and of their readers."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pscore.pb.ps.v1 import data_pb2
from pscore.pb.ps.v1 import publish_pb2 as pb
from psserver.publish.publications import Publications
from psserver.service.publications import PublicationsServicer
from psserver.service.publish_metrics import PublicationCollector
from tests.unit.psserver.front import JOB, Context, Front, grad, played, push_header

TABLE: dict[str, Any] = {"job": JOB, "table": "model"}


def shown(*publications: Publications) -> dict[str, float]:
    """Returns the samples of a page, by name and labels beside the table's."""
    registry = CollectorRegistry()
    registry.register(PublicationCollector(*publications))
    return {
        " ".join([one.name, *(f"{k}={v}" for k, v in one.labels.items() if k not in TABLE)]): (
            one.value
        )
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for one in family.samples
        if TABLE.items() <= one.labels.items()
    }


async def make_step(front: Front, step: int) -> None:
    """Makes an update, and waits until its publication is made."""
    await front.push(push_header(0, step), grad(1.0))
    await asyncio.wrap_future(front.executor.submit(lambda: None))


@played
async def test_the_page_shows_each_reader_its_lag_and_the_bytes_by_form(front: Front) -> None:
    publications = Publications(front.engine, {JOB: 2})
    servicer: Any = PublicationsServicer(front.engine, publications, front.servicer.locate)
    await front.ready(num_workers=1)

    async def read(number: int, reader: int, resyncs: int = 0) -> pb.WatchReply:
        one = pb.Reader(id=reader, host="far", pid=9, number=number, resyncs=resyncs)
        reply: pb.WatchReply = await servicer.Watch(
            pb.WatchRequest(**TABLE, after=-1, reader=one), Context()
        )
        return reply

    lineage = (await read(-1, 0xA)).lineage
    whole = data_pb2.HeldSlice(slice=0, number=-1)
    publications.fetch(data_pb2.FetchHeader(**TABLE, lineage=lineage, target=0, slices=[whole]))
    await make_step(front, 0)
    await make_step(front, 1)
    await read(0, 0xA, resyncs=3)
    await read(1, 0xB)  # Of the same process.
    front.now_s = 4.0
    found = shown(publications)
    assert found["paceline_published_version"] == 1
    assert found["paceline_published_bytes_total form=whole"] == 64.0
    assert found["paceline_published_kept_bytes"] > 64.0
    both = shown(publications, publications)  # As the shards of a relay.
    assert both["paceline_published_version"] == 1
    assert both["paceline_published_bytes_total form=whole"] == 128.0
    assert len(both) == len(found)
    first, second = (f"host=far pid=9 reader={name}" for name in "ab")
    assert found[f"paceline_reader_lag_steps {first}"] == 2
    assert found[f"paceline_reader_lag_seconds {first}"] == 4.0
    assert found[f"paceline_reader_resyncs_total {first}"] == 3
    assert found[f"paceline_reader_lag_steps {second}"] == 0
    assert found[f"paceline_reader_lag_seconds {second}"] == 0.0
    await servicer.Watch(pb.WatchRequest(**TABLE, reader=pb.Reader(id=0xA, leaves=True)), Context())
    left = shown(publications)
    assert [name for name in left if "reader" in name and "=a" in name] == []
    assert f"paceline_reader_lag_steps {second}" in left
