"""The link is measured through real shards, by each data plane."""

import pytest

from psworker.commands.bench_compressors import measure_wire_to
from tests.integration.cluster import Shards


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["local", "tcp", "grpc"])
def test_the_link_to_shards_is_measured(
    shards: Shards, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DATA_PLANE", plane)
    wire = measure_wire_to(shards.addresses)
    what = "shared memory" if plane == "local" else plane
    assert wire.name == f"{what} to {shards.addresses[0]}, measured"
    for speed in (wire.raw_up, wire.raw_down, wire.packed_up, wire.packed_down):
        assert speed > 0
    assert wire.latency_s > 0
