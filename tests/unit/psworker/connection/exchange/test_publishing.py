"""The question to the shards to publish a table."""

from types import SimpleNamespace
from typing import Any

from pscore.pb.ps.v1 import publish_pb2
from psworker.connection.exchange.publishing import begin_publication


def test_the_lowest_rank_asks_each_shard_and_others_none() -> None:
    asked: list[tuple[int, publish_pb2.BeginRequest]] = []

    def link(shard: int) -> Any:
        begin = SimpleNamespace(Begin=lambda request: asked.append((shard, request)))
        return SimpleNamespace(publications=begin, call=lambda method, request: method(request))

    session: Any = SimpleNamespace(job="night", rank=0, incarnation=77, links=[link(0), link(1)])
    for is_leader, is_first in ((False, True), (True, False)):
        session.is_leader, session.is_first = is_leader, lambda is_first=is_first: is_first
        begin_publication(session, 3, 4)
    assert not asked
    session.is_first = lambda: True
    begin_publication(session, 3, 4)
    request = publish_pb2.BeginRequest(job="night", worker=0, incarnation=77, table=3, every=4)
    assert asked == [(0, request), (1, request)]
