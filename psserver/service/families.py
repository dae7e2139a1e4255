"""Metrics as tables: each has a kind, a name, a help text, and a value of every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from prometheus_client.core import Metric

T = TypeVar("T")
Rows = Sequence[tuple[Sequence[str], T]]  # With the values of their labels.
# By kind and name, such as `gauge paceline_jobs`: the help text, and the value of a row, if any.
Columns = Mapping[str, tuple[str, Callable[[T], float | None]]]


def families(labels: Sequence[str], rows: Rows[T], columns: Columns[T]) -> Iterator[Metric]:
    """Yields each metric of `columns` with the values of the rows."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    for title, (text, value_of) in columns.items():
        kind, name = title.split()
        metric = kinds[kind](name, text, labels=labels)
        for key, row in rows:
            if (value := value_of(row)) is not None:
                metric.add_metric(key, value)
        yield metric
