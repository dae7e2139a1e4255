"""The choice of a data plane, as far as it needs no shard."""

import platform

import pytest

from pscore.errors import ConfigError
from psworker.transports import Endpoint, choose
from psworker.transports.retry import RetryPolicy

ADDRESS = "host:1"


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_shared_memory_is_refused_where_loads_may_pass_each_other(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    endpoint = Endpoint(host="127.0.0.1", port=0, local="somewhere")
    with pytest.raises(ConfigError, match=f"local: this host is {machine}, .* needs x86-64"):
        choose("local", ADDRESS, lambda: endpoint, RetryPolicy(ADDRESS, 1.0))


def test_a_plane_that_is_none_is_refused_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, local, tcp, grpc"):
        choose("carrier pigeon", ADDRESS, lambda: pytest.fail("asked"), RetryPolicy(ADDRESS, 1.0))
