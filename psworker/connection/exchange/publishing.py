"""Asks the shards to publish a table of this worker's job to readers."""

from __future__ import annotations

from pscore.pb.ps.v1 import publish_pb2
from psworker.connection.membership import taking_part
from psworker.connection.membership.session import Session


def begin_publication(session: Session, table: int, every: int) -> None:
    """Publishes a table on all shards; again with the same `every` changes nothing.

    The lowest rank asks for it; other processes return.

    Args:
        every: Updates from one version to the next; seconds in an asynchronous mode.

    Raises:
        ConfigError: The shards do not hold its weights.
        PacelineError: A shard does not answer, or refuses this worker.
    """
    if not (session.group.is_leader and taking_part.is_first(session)):
        return
    for link in session.links:
        request = publish_pb2.BeginRequest(
            job=session.job,
            worker=session.rank,
            incarnation=session.incarnation,
            table=table,
            every=every,
        )
        link.call(link.publications.Begin, request)
