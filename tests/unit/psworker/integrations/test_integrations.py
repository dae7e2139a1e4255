"""The parts of the integrations that need none of their libraries."""

import importlib.util
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

import psworker
from pscore.rules import ASGD, SSGD
from pscore.rules.base import Rule
from psworker.integrations import DEVICES, PLACES, hide_launcher, lightning, ray, transformers
from psworker.job.environment import Environment
from tests.integration.command import free_ports

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "night",
}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*TORCHRUN, *PLACES.values(), DEVICES):
        monkeypatch.setenv(name, "")  # So that it is restored after the test.
        monkeypatch.delenv(name)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_paceline_has_the_place_that_torchrun_gave_and_no_library_sees_it(
    launcher: pytest.MonkeyPatch,
) -> None:

    before = Environment.read()
    hide_launcher()
    assert Environment.read() == before
    assert (before.rank, before.num_workers, before.local_workers, before.job) == (5, 8, 4, "night")
    assert not TORCHRUN.keys() & os.environ.keys()
    assert os.environ[DEVICES] == "1"
    hide_launcher()  # A second call changes nothing.
    assert Environment.read() == before


def test_each_worker_keeps_one_of_the_devices_that_it_may_use(launcher: pytest.MonkeyPatch) -> None:

    launcher.setenv(DEVICES, "4,6,7")
    hide_launcher()
    assert os.environ[DEVICES] == "6"


@pytest.mark.parametrize(
    ("library", "make"),
    [
        ("lightning", lightning.PacelineCallback),
        ("transformers", lambda: transformers.PacelineTrainer(None)),
    ],
)
def test_without_its_library_an_integration_names_it(library: str, make: object) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here; test_heavy_recipes.py uses it")
    assert callable(make)
    with pytest.raises(psworker.ConfigError, match=f"needs `pip install {library}"):
        make()


@pytest.mark.parametrize(("rule", "clipped"), [(SSGD(), ["mean"]), (ASGD(), ["own"])])
def test_lightning_clips_the_mean_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, clipped: list[str]
) -> None:
    """The trainer calls `clip_grad_by_norm` of its precision plugin, between backward and step."""
    seen: list[str] = []
    wrapper: Any = SimpleNamespace(rule=rule)
    monkeypatch.setattr(lightning, "Callback", type)
    monkeypatch.setattr(lightning, "rank_zero_only", SimpleNamespace(rank=0), raising=False)
    monkeypatch.setattr(psworker, "DistributedOptimizer", lambda *_: wrapper)
    monkeypatch.setattr(psworker, "rank", lambda: 0)

    def clip(optimizer: Any, max_norm: float) -> None:
        assert (optimizer, max_norm) == (wrapper, 0.5)
        seen.append("mean")

    monkeypatch.setattr(psworker, "clip_grad_norm_", clip)
    plugin = SimpleNamespace(clip_grad_by_norm=lambda optimizer, value: seen.append("own"))
    strategy = SimpleNamespace(precision_plugin=plugin)
    trainer = SimpleNamespace(world_size=1, optimizers=[object()], strategy=strategy)
    module = SimpleNamespace(named_parameters=list)
    lightning.PacelineCallback().on_fit_start(trainer, module)
    plugin.clip_grad_by_norm(SimpleNamespace(optimizer=wrapper), 0.5)  # Lightning's wrapper.
    plugin.clip_grad_by_norm(wrapper, 0.5)
    assert seen == clipped * 2


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        get_runtime_context=lambda: SimpleNamespace(was_current_actor_reconstructed=False),
    )
    monkeypatch.setattr(ray, "ray", here)
    monkeypatch.setattr(ray, "READY_S", 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("actor")
def test_a_shard_of_ray_whose_settings_are_refused_is_not_started_again() -> None:
    with pytest.raises(psworker.ServerUnavailableError, match="it refuses its settings"):
        ray.ShardActor(0, free_ports(1)[0], {"PACELINE_TLS_CERT": "none.pem"})


@pytest.mark.usefixtures("actor")
def test_a_shard_of_ray_names_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(psworker.ServerUnavailableError) as raised:
            ray.ShardActor(1, port, {})
    assert str(raised.value).startswith(f"shard 1 does not start at 127.0.0.1:{port}: another")
