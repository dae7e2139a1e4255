"""Prometheus sees whether a shard that is to have a standby has one."""

import pytest
from prometheus_client import CollectorRegistry

from psserver.service.standby_metrics import StandbyCollector, StandbyView


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (StandbyView(), (None, None, None)),
        (StandbyView(is_wanted=True, lag_s=0.5, epoch=7), (0.0, 0.5, 7.0)),
        (StandbyView(is_wanted=True, is_in_sync=True), (1.0, 0.0, None)),
        (StandbyView(epoch=3), (None, None, 3.0)),
    ],
    ids=str,
)
def test_a_standby_is_seen(view: StandbyView, wanted: tuple[float | None, ...]) -> None:
    registry = CollectorRegistry()
    registry.register(StandbyCollector(lambda: view))
    names = ("standby_in_sync", "standby_lag_seconds", "shard_epoch")
    assert tuple(registry.get_sample_value(f"paceline_{name}") for name in names) == wanted
