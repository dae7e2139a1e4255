"""The question to the shards to publish a table."""

from types import SimpleNamespace
from typing import Any

from pscore.pb.ps.v1 import control_pb2, publish_pb2
from psworker.connection.exchange.publishing import begin_publication


def test_the_lowest_rank_asks_each_shard_and_others_none() -> None:
    asked: list[tuple[int, publish_pb2.BeginRequest]] = []

    def link(shard: int) -> Any:
        begin = SimpleNamespace(Begin=lambda request: asked.append((shard, request)))
        return SimpleNamespace(publications=begin, call=lambda method, request: method(request))

    links = [link(0), link(1)]
    for rank, is_leader, asks in ((2, True, False), (1, False, False), (1, True, True)):
        session: Any = SimpleNamespace(
            job="night", rank=rank, incarnation=77, links=links,
            beat=lambda: control_pb2.HeartbeatReply(first=1),
            group=SimpleNamespace(is_leader=is_leader),
        )  # fmt: skip
        begin_publication(session, 3, 4)
        assert bool(asked) == asks
    request = publish_pb2.BeginRequest(job="night", worker=1, incarnation=77, table=3, every=4)
    assert asked == [(0, request), (1, request)]
