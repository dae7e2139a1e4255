"""The metrics of published weights and of their readers; metrics.py serves them.

There are series for the readers that a shard has heard of lately, at most 1,024 for a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pscore.pb.ps.v1 import publish_pb2 as pb
from psserver.publish.tables import PublishedTables
from psserver.service.publications import statuses

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class PublicationCollector:
    """Reads the publications of one shard, or of all of a relay, when Prometheus asks."""

    def __init__(self, *publications: PublishedTables[Any]) -> None:
        """Reads `publications`: one of each shard of the process."""
        self._publications = publications

    def collect(self) -> Iterator[Metric]:
        """Yields every metric of published weights."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        table, reader = ["job", "table"], ["job", "table", "host", "pid", "reader"]
        version = GaugeMetricFamily(
            "paceline_published_version",
            "Number of the newest published version of a table on this shard; -1: none yet.",
            labels=table,
        )
        sent = CounterMetricFamily(
            "paceline_published_bytes",
            "Bytes sent to readers, by form: whole weights, or one of the forms of differences.",
            labels=[*table, "form"],
        )
        kept = GaugeMetricFamily(
            "paceline_published_kept_bytes",
            "Memory of the versions that a shard keeps for readers.",
            labels=table,
        )
        lag = GaugeMetricFamily(
            "paceline_reader_lag_steps",
            "Steps of training from the version that a reader uses to the newest one; in an "
            "asynchronous mode 0.",
            labels=reader,
        )
        lag_s = GaugeMetricFamily(
            "paceline_reader_lag_seconds",
            "Seconds since there is a version that a reader does not use yet.",
            labels=reader,
        )
        resyncs = CounterMetricFamily(
            "paceline_reader_resyncs",
            "Slices that a reader got whole, from any shard, although it had held them.",
            labels=reader,
        )
        for one in self._merged():
            key = [one.job, one.table]
            version.add_metric(key, one.newest)
            kept.add_metric(key, one.memory_nbytes)
            for form, nbytes in sorted(one.nbytes.items()):
                sent.add_metric([*key, form], nbytes)
            for state in one.readers:
                it = state.reader
                names = [*key, it.host, str(it.pid), f"{it.id:x}"]
                lag.add_metric(names, state.lag_steps)
                lag_s.add_metric(names, state.lag_s)
                resyncs.add_metric(names, it.resyncs)
        yield from (version, sent, kept, lag, lag_s, resyncs)

    def _merged(self) -> Iterator[pb.PublicationStatus]:
        """Yields the tables of the first shard with the bytes of all; each has the same readers."""
        first, *others = map(statuses, self._publications)
        for one in first:
            for other in itertools.chain.from_iterable(others):
                if (other.job, other.table) == (one.job, one.table):
                    one.memory_nbytes += other.memory_nbytes
                    for form, nbytes in other.nbytes.items():
                        one.nbytes[form] += nbytes
            yield one
