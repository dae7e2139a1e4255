"""The metrics page of one shard, for Prometheus: `/metrics`, and `/healthz` beside it.

Nothing is kept here. The page shows a copy of the shard's numbers (`reading.figures`) that is made
when it is asked for, so that counting costs the pushes next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import ssl
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pscore.errors import AccessError
from pscore.net import wire
from pscore.types import Verdict
from pscore.version import VERSION
from psserver.access.authorizer import Authorizer
from psserver.engine import reading
from psserver.engine.counters import Counters, Histogram
from psserver.engine.engine import Engine
from psserver.engine.views import ShardView
from psserver.service.job_metrics import job_metrics

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily, Metric

REQUEST_NBYTES_MAX = 8 << 10
REQUEST_S_MAX = 5.0
CONNECTIONS_MAX = 32
TEXT = "text/plain; charset=utf-8"


class ShardCollector:
    """Reads one shard when Prometheus asks."""

    def __init__(self, engine: Engine, journal_nbytes: int = 0) -> None:
        """Reads `engine`, whose journals take `journal_nbytes`."""
        self._engine = engine
        self._journal_nbytes = journal_nbytes

    def collect(self) -> Iterator[Metric]:
        """Yields every metric of the shard."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        shard, figures = self._engine.shard, reading.figures(self._engine)
        counters = figures.counters
        yield from _requests(counters)
        wire_bytes = CounterMetricFamily(
            "paceline_wire_bytes", "Bytes of push and pull frames.", labels=["direction"]
        )
        wire_bytes.add_metric(["received"], counters.received_nbytes)
        wire_bytes.add_metric(["sent"], counters.sent_nbytes)
        yield wire_bytes
        yield CounterMetricFamily(
            "paceline_updates", "Updates of slices by the optimizer.", value=counters.num_updates
        )
        yield _histogram(
            "paceline_apply_seconds",
            "Seconds to decode and add one push, with the update where both are one pass.",
            counters.apply_s,
        )
        yield _histogram(
            "paceline_staleness_steps",
            "Number of updates between the weights that a gradient was computed from and "
            "those it is applied to.",
            counters.staleness,
        )
        yield GaugeMetricFamily("paceline_jobs", "Jobs on this shard.", value=len(figures.live))
        workers = GaugeMetricFamily(
            "paceline_workers_live", "Workers that hold a lease.", labels=["job"]
        )
        for name, live in figures.live.items():
            workers.add_metric([name], live)
        yield workers
        yield from job_metrics(figures.shard)
        yield from self._resources(figures.shard)
        about = {
            "version": VERSION,
            "protocol": str(wire.PROTOCOL),
            "shard": str(shard.index),
            "num_shards": str(shard.num_shards),
        }
        yield InfoMetricFamily("paceline_build", "The shard and its version.", value=about)

    def _resources(self, view: ShardView) -> Iterator[Metric]:
        """Yields memory, its limits, the clock and the recoveries of the shard."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        limits = self._engine.shard.limits
        for name, text, value in (
            (
                "paceline_under_way_bytes",
                "Bytes of pushes and answers that wait.",
                view.under_way_nbytes,
            ),
            (
                "paceline_under_way_limit_bytes",
                "Limit of paceline_under_way_bytes (--under-way-mb).",
                limits.under_way_nbytes,
            ),
            (
                "paceline_table_bytes",
                "Memory that the tables of all jobs take.",
                sum(job.memory_nbytes for job in view.jobs),
            ),
            (
                "paceline_table_limit_bytes",
                "Limit of paceline_table_bytes (--memory-mb); +Inf without one.",
                limits.memory_nbytes or math.inf,
            ),
            (
                "paceline_journal_bytes",
                "Bytes of the journals on disk or in memory.",
                self._journal_nbytes,
            ),
            ("paceline_time_seconds", "The shard's clock, in seconds since 1970.", time.time()),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        yield CounterMetricFamily(
            "paceline_recoveries",
            "Processes of this shard that have continued jobs from their journals.",
            value=view.num_recoveries,
        )


def _requests(counters: Counters) -> Iterator[Metric]:
    """Yields the pushes and pulls of each job; those of ended ones are counted under no name.

    So there are as many series as jobs with live workers, and no sum ever falls.
    """
    from prometheus_client.core import CounterMetricFamily

    shares = counters.jobs.values()
    pushes = CounterMetricFamily(
        "paceline_push_requests", "Pushes answered, by job and verdict.", labels=["job", "verdict"]
    )
    for verdict in Verdict:
        rest = counters.pushes[verdict] - sum(share.pushes[verdict] for share in shares)
        pushes.add_metric(["", verdict.name.lower()], rest)
        for name, share in counters.jobs.items():
            pushes.add_metric([name, verdict.name.lower()], share.pushes[verdict])
    pushes.add_metric(["", "refused"], counters.num_pushes_refused)
    yield pushes
    pulls = CounterMetricFamily(
        "paceline_pull_requests",
        "Pulls answered, by job, with weights or with `not yet`.",
        labels=["job", "answer"],
    )
    answered = sum(share.num_pulls_answered for share in shares)
    put_off = sum(share.num_pulls_put_off for share in shares)
    pulls.add_metric(["", "weights"], counters.num_pulls_answered - answered)
    pulls.add_metric(["", "not_yet"], counters.num_pulls_put_off - put_off)
    for name, share in counters.jobs.items():
        pulls.add_metric([name, "weights"], share.num_pulls_answered)
        pulls.add_metric([name, "not_yet"], share.num_pulls_put_off)
    yield pulls


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    from prometheus_client.core import HistogramMetricFamily

    running, buckets = 0, []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", running))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)


class MetricsPage:
    """A small HTTP server inside the shard's event loop."""

    def __init__(
        self,
        engine: Engine,
        is_ready: Callable[[], bool],
        authorizer: Authorizer | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Shows `engine`.

        Args:
            engine: The shard.
            is_ready: Unless it is, `/healthz` says 503.
            authorizer: `/metrics` needs a bearer token for everything; `/healthz` needs none.
            context: TLS; None: none.
        """
        self._engine = engine
        self._authorizer = Authorizer() if authorizer is None else authorizer
        self._context = context
        self._is_ready = is_ready
        self._server: asyncio.Server | None = None
        self._num_open = 0

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port.

        Raises:
            OSError: The port cannot be bound.
        """
        limits = {} if self._context is None else {"ssl_handshake_timeout": REQUEST_S_MAX}
        self._server = await asyncio.start_server(
            self._serve, host, port, limit=REQUEST_NBYTES_MAX, ssl=self._context, **limits
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open < CONNECTIONS_MAX:
            self._num_open += 1
            try:
                await self._serve_one(reader, writer)
            finally:
                self._num_open -= 1
        writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            async with asyncio.timeout(REQUEST_S_MAX):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(request))
                await writer.drain()

    async def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            status, kind, body = "405 Method Not Allowed", TEXT, b"GET or HEAD\n"
        elif path == b"/metrics" and (refusal := self._refusal(request)):
            status, kind, body = "401 Unauthorized", TEXT, refusal
        elif path == b"/metrics":
            status, (kind, body) = "200 OK", await self._metrics()
        elif path == b"/healthz":
            ready = self._is_ready()
            status, kind = ("200 OK" if ready else "503 Service Unavailable"), TEXT
            body = b"ready\n" if ready else b"draining\n"
        else:
            status, kind, body = "404 Not Found", TEXT, b"/metrics or /healthz\n"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == b"HEAD" else body)

    def _refusal(self, request: bytes) -> bytes:
        """Returns why a peer may not see the numbers; empty if it may."""
        secret = ""
        for line in request.decode("latin-1").split("\r\n")[1:]:
            name, _, value = line.partition(":")
            if name.strip().lower() == "authorization":
                secret = value.strip().removeprefix("Bearer ").strip()
        try:
            self._authorizer.admit(secret).require_control("/metrics")
        except AccessError as error:
            self._authorizer.refused(error, "/metrics")
            return f"{error}; send it as Authorization: Bearer TOKEN\n".encode()
        return b""

    async def _metrics(self) -> tuple[str, bytes]:
        # Its import takes longer than a push may wait.
        prometheus = await asyncio.to_thread(importlib.import_module, "prometheus_client")
        registry = prometheus.CollectorRegistry(auto_describe=False)
        # A disk may take its time.
        nbytes = await asyncio.to_thread(self._engine.recovery.journal_nbytes)
        registry.register(ShardCollector(self._engine, nbytes))
        prometheus.ProcessCollector(registry=registry)
        return str(prometheus.CONTENT_TYPE_LATEST), bytes(prometheus.generate_latest(registry))
