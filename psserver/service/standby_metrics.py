"""The metrics of a shard's standby; metrics.py serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyView:
    """How the standby of a shard is."""

    is_wanted: bool = False  # Whether the shard is to have one.
    is_in_sync: bool = False  # Whether that has everything that is answered.
    lag_s: float = 0.0  # Seconds since the oldest change that it lacks; 0: it lacks none.
    # Epoch of the newest claim in the register that is known here; 0: there is none.
    epoch: int = 0
    stands_by: bool = False  # Whether this process is a standby, and has everything.
    # Whether new workers may share memory with it: they could not follow the shard to another host.
    shares_memory: bool = True


class StandbyCollector:
    """Reads the state of one shard's standby when Prometheus asks."""

    def __init__(self, view: Callable[[], StandbyView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yields every metric of the standby; values only for a shard that is to have one."""
        from prometheus_client.core import GaugeMetricFamily

        view = self._view()
        in_sync = GaugeMetricFamily(
            "paceline_standby_in_sync",
            "1 while the shard's standby has everything that is answered, 0 while it is away.",
        )
        lag = GaugeMetricFamily(
            "paceline_standby_lag_seconds",
            "Seconds since the oldest change that the shard's standby lacks.",
        )
        epoch = GaugeMetricFamily(
            "paceline_shard_epoch",
            "Epoch of the newest claim on the shard in its register, as its process knows it.",
        )
        if view.is_wanted:
            in_sync.add_metric([], int(view.is_in_sync))
            lag.add_metric([], view.lag_s)
        if view.epoch:
            epoch.add_metric([], view.epoch)
        yield from (in_sync, lag, epoch)
