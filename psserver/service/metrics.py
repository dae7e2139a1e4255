"""The metrics page of one shard, for Prometheus: `/metrics`, and `/healthz` beside it.

Nothing is kept here. The page shows a copy of the shard's numbers (`reading.figures`) that is made
when it is asked for, so that counting costs the pushes next to nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pscore.errors import AccessError
from pscore.net import wire
from pscore.types import Verdict
from pscore.version import VERSION
from psserver.access.authorizer import Authorizer
from psserver.engine import reading
from psserver.engine.counters import Counters, Histogram
from psserver.engine.engine import Engine
from psserver.engine.views import ShardView
from psserver.service.families import Columns, families
from psserver.service.job_metrics import job_metrics

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily, Metric

REQUEST_S_MAX = 5.0  # Limit for one connection.


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Facts about a shard's process that its engine does not have."""

    cluster: str = ""
    certificate_end_s: float | None = None  # Seconds since 1970; None: no TLS.


NAMELESS = Identity()


class Collector(Protocol):
    """A part of the page, read when Prometheus asks."""

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the part."""


WORKERS: Columns[int] = {"gauge paceline_workers_live": ("Workers that hold a lease.", float)}


class ShardCollector:
    """Reads one shard when Prometheus asks."""

    def __init__(
        self, engine: Engine, identity: Identity = NAMELESS, journal_nbytes: int = 0
    ) -> None:
        self._engine = engine
        self._identity = identity
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
        live = [([name], count) for name, count in figures.live.items()]
        yield from families(["job"], live, WORKERS)
        yield from self._identified(sum(figures.live.values()))
        yield from job_metrics(figures.shard)
        yield from self._resources(figures.shard)
        about = {
            "version": VERSION,
            "protocol": str(wire.PROTOCOL),
            "shard": str(shard.index),
            "num_shards": str(shard.num_shards),
        }
        yield InfoMetricFamily("paceline_build", "The shard and its version.", value=about)

    def _identified(self, num_live: int) -> Iterator[Metric]:
        """Yields what tells alerts that this shard is missing, or will be refused."""
        from prometheus_client.core import GaugeMetricFamily

        workers = GaugeMetricFamily(
            "paceline_shard_workers",
            "Workers of all jobs that hold a lease on this shard.",
            labels=["cluster", "shard"],
        )
        workers.add_metric([self._identity.cluster, str(self._engine.shard.index)], num_live)
        yield workers
        end = GaugeMetricFamily(
            "paceline_certificate_end_seconds",
            "Time when the first certificate that the shard uses ends, in seconds since 1970.",
        )
        if self._identity.certificate_end_s is not None:
            end.add_metric([], self._identity.certificate_end_s)
        yield end

    def _resources(self, view: ShardView) -> Iterator[Metric]:
        """Returns memory, its limits, the clock and the recoveries of the shard."""
        limits = self._engine.shard.limits
        columns: Columns[ShardView] = {
            "gauge paceline_under_way_bytes": (
                "Bytes of pushes and answers that wait.",
                lambda it: it.under_way_nbytes,
            ),
            "gauge paceline_under_way_limit_bytes": (
                "Limit of paceline_under_way_bytes (--under-way-mb).",
                lambda _: limits.under_way_nbytes,
            ),
            "gauge paceline_table_bytes": (
                "Memory that the tables of all jobs take.",
                lambda it: sum(job.memory_nbytes for job in it.jobs),
            ),
            "gauge paceline_table_limit_bytes": (
                "Limit of paceline_table_bytes (--memory-mb); +Inf without one.",
                lambda _: limits.memory_nbytes or math.inf,
            ),
            "gauge paceline_journal_bytes": (
                "Bytes of the journals on disk or in memory.",
                lambda _: self._journal_nbytes,
            ),
            "gauge paceline_copies_broken": (
                "1 while the newest checkpoints are not at the second place, else 0.",
                lambda it: int(it.copies is not None and bool(it.copies.problem)),
            ),
            "gauge paceline_time_seconds": (
                "The shard's clock, in seconds since 1970.",
                lambda _: time.time(),
            ),
            "counter paceline_recoveries": (
                "Processes of this shard that have continued jobs from their journals.",
                lambda it: it.num_recoveries,
            ),
            "counter paceline_mended_jobs": (
                "Jobs that were set back to a checkpoint because a shard had lost its part.",
                lambda it: it.num_mended,
            ),
        }
        return families((), [((), view)], columns)


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
    """The page of one shard, or of a relay."""

    def __init__(
        self,
        engine: Engine | None,
        is_ready: Callable[[], bool],
        authorizer: Authorizer | None = None,
        identity: Identity = NAMELESS,
        parts: Sequence[Collector] = (),
    ) -> None:
        """Shows `engine`.

        Args:
            engine: The shard; None: the page has only the other parts.
            is_ready: Unless it is, `/healthz` says 503.
            authorizer: `/metrics` needs a bearer token for everything; `/healthz` needs none.
            identity: The cluster and certificates of its process.
            parts: Parts of the page beside the engine.
        """
        self._parts = parts
        self._identity = identity
        self._engine = engine
        self._authorizer = Authorizer() if authorizer is None else authorizer
        self._is_ready = is_ready

    async def answer(self, request: Request) -> Response:
        """Returns the response to a request."""
        path = request.scope["path"]
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("GET or HEAD\n", 405)
        if path == "/metrics":
            if refusal := self._refusal(request.headers.get("authorization", "")):
                return PlainTextResponse(refusal, 401)
            kind, body = await self._metrics()
            return Response(body, headers={"content-type": kind})
        if path == "/healthz":
            ready = self._is_ready()
            return PlainTextResponse("ready\n" if ready else "draining\n", 200 if ready else 503)
        return PlainTextResponse("/metrics or /healthz\n", 404)

    def _refusal(self, authorization: str) -> str:
        """Returns why a peer may not see the numbers; empty if it may."""
        secret = authorization.strip().removeprefix("Bearer ").strip()
        try:
            self._authorizer.admit(secret).require_control("/metrics")
        except AccessError as error:
            self._authorizer.refused(error, "/metrics")
            return f"{error}; send it as Authorization: Bearer TOKEN\n"
        return ""

    async def _metrics(self) -> tuple[str, bytes]:
        # Its import takes longer than a push may wait.
        prometheus = await asyncio.to_thread(importlib.import_module, "prometheus_client")
        registry = prometheus.CollectorRegistry(auto_describe=False)
        for part in self._parts:
            registry.register(part)
        if self._engine is not None:  # A disk may take its time.
            nbytes = await asyncio.to_thread(self._engine.recovery.journal_nbytes)
            registry.register(ShardCollector(self._engine, self._identity, nbytes))
        prometheus.ProcessCollector(registry=registry)
        return str(prometheus.CONTENT_TYPE_LATEST), bytes(prometheus.generate_latest(registry))
