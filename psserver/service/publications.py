"""Published weights on the network: proto messages to calls of `Publications` and back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pscore.pb.ps.v1 import publish_pb2 as pb
from pscore.pb.ps.v1 import publish_pb2_grpc
from pscore.text import printable
from psserver.engine.engine import Engine
from psserver.publish.publications import Publications
from psserver.publish.tables import Published, PublishedTables, ReaderState, View

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

WAIT_S_MAX = 10.0  # One call; the reader asks again.
HOST_LENGTH_MAX = 256


class ReadersServicer(publish_pb2_grpc.PublicationsServicer):
    """The service of published weights for readers; made on the event loop's thread."""

    def __init__(self, publications: PublishedTables[Any]) -> None:
        self._publications = publications
        self._loop = asyncio.get_running_loop()
        self._new = asyncio.Event()  # Set at the next version of any table, and replaced then.
        publications.on_version = self._wake

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended, and the process ends.
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._new.set()
        self._new = asyncio.Event()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> pb.WatchReply:
        """Returns the newest version, when there is a newer one than the reader's or time is up."""
        if request.reader.leaves:
            self._publications.forget(request.job, request.table, request.reader.id)
            return pb.WatchReply(newest=-1)
        end_s = self._loop.time() + min(request.wait_ms / 1000, WAIT_S_MAX)
        while True:
            new = self._new
            view = self._view(request)
            left_s = end_s - self._loop.time()
            if view.is_newer(request.lineage, request.after) or left_s <= 0:
                return _reply(view, request.fingerprint)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(new.wait(), left_s)

    def _view(self, request: pb.WatchRequest) -> View:
        reader = ReaderState(
            host=printable(request.reader.host, HOST_LENGTH_MAX),
            pid=request.reader.pid,
            heard_s=self._publications.now(),
            lineage=request.reader.lineage,
            number=request.reader.number,
            resyncs=request.reader.resyncs,
            relays=request.reader.relays,
        )
        return self._publications.watch(request.job, request.table, request.reader.id, reader)

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListReply:
        """Returns the publications of the shard, each with its readers."""
        return pb.ListReply(publications=statuses(self._publications))


class PublicationsServicer(ReadersServicer):
    """The service of published weights of one shard, for workers too."""

    def __init__(
        self, engine: Engine, publications: Publications, locate: Callable[[pb.WatchReply], None]
    ) -> None:
        """Serves what `publications` has, and adds tables of `engine` to it.

        Args:
            locate: Adds to an answer which shard this is, and where it will be.
        """
        super().__init__(publications)
        self._engine, self._tables, self._locate = engine, publications, locate

    async def Watch(self, request: pb.WatchRequest, context: Context) -> pb.WatchReply:
        """Returns the newest version as for any reader, and where the shard will be."""
        reply = await super().Watch(request, context)
        self._locate(reply)
        return reply

    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.BeginReply:
        """Publishes a table of a worker."""
        job = self._engine.heard(request.job, request.worker, request.incarnation)
        self._tables.publish(job, request.table, request.every)
        return pb.BeginReply()


def statuses(publications: PublishedTables[Any]) -> list[pb.PublicationStatus]:
    """Returns the publications of a shard, each with its readers."""
    now_s = publications.now()
    return [_status(*found, now_s) for found in publications.listed()]


def _reply(view: View, known: str) -> pb.WatchReply:
    reply = pb.WatchReply(
        lineage=view.lineage,
        newest=view.newest,
        every=view.every,
        exact=view.exact,
        waiting_for=view.waiting_for,
    )
    if view.spec is not None and known != view.spec.fingerprint:
        reply.table.CopyFrom(view.spec.to_proto())
    return reply


def _status(job: str, table: str, published: Published[Any], now_s: float) -> pb.PublicationStatus:
    publication = published.publication
    newest = publication.newest
    reply = pb.PublicationStatus(
        job=job,
        table=table,
        lineage=publication.lineage,
        newest=-1 if newest is None else newest.number,
        step=0 if newest is None else newest.step,
        every=publication.every,
        exact=publication.exact,
        nbytes=published.nbytes,
        memory_nbytes=publication.nbytes,
    )
    for number, reader in sorted(published.readers.items()):
        lag = -1 if reader.number < 0 else max(0, reply.newest - reader.number)
        reply.readers.add(
            reader=pb.Reader(
                id=number,
                host=reader.host,
                pid=reader.pid,
                lineage=reader.lineage,
                number=reader.number,
                resyncs=reader.resyncs,
                relays=reader.relays,
            ),
            silent_s=now_s - reader.heard_s,
            lag=lag,
            lag_steps=max(0, lag) * publication.every if publication.exact else 0,
            lag_s=0.0 if reader.behind_s is None else now_s - reader.behind_s,
        )
    return reply
