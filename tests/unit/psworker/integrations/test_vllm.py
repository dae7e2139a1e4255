"""The weight transfer engine of vLLM, with the parts of vLLM that it uses as plain classes."""

import importlib
import queue
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscore.publish.codec import round_to_bf16
from pscore.subscription.assembly import WeightsVersion
from psworker import integrations
from psworker.integrations import vllm as ours


class Base:
    """The base class, as vLLM 0.32 has it."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.parallel_config, self.model_config = vllm_config.parallel_config, None
        self.device, self.model = device, model

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return ours.PacelineEngine.update_info_cls(**info)


class Reader:
    """A reader of versions that the test makes."""

    made: "Reader"

    def __init__(self, servers: str, **about: Any) -> None:
        self.about, self.queue = about | {"servers": servers}, queue.Queue[Any]()
        self.is_closed = False
        Reader.made = self

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def wait(self, newer_than: Any, timeout_s: float) -> Any:
        try:
            found = self.queue.get(timeout=0.05)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(found, Exception):
            raise found
        bits = round_to_bf16(np.full(4, found, np.float32))
        version = WeightsVersion(lineage=5, number=found)
        return SimpleNamespace(version=version, arrays={"w": bits.reshape(2, 2)})


class Model:
    """A model that keeps the tensors that it is given."""

    loaded: dict[str, torch.Tensor]

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.loaded = dict(tensors)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    registered: dict[str, Any] = {}
    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: setattr(model, "is_open", True),
        finalize_layerwise_reload=lambda model, config: setattr(model, "is_open", False),
    )
    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {
            "WeightTransferEngineFactory": SimpleNamespace(
                register_engine=lambda name, *where: registered.update({name: where})
            )
        },
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Base,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {"reload": reload},
    }
    for name, contents in parts.items():
        made = ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)
    integrations.register_vllm()
    assert registered == {"paceline": (ours.__name__, "PacelineEngine")}
    importlib.reload(ours)
    monkeypatch.setattr(ours, "Reader", Reader)
    yield ours
    monkeypatch.undo()
    importlib.reload(ours)


def engine_of(module: Any, num_processes: int = 1) -> Any:
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=num_processes))
    return module.PacelineEngine(None, config, torch.device("cpu"), Model())


def test_an_update_loads_the_version_that_it_names_or_the_newest(module: Any) -> None:
    engine = engine_of(module)
    with pytest.raises(psworker.ConfigError, match="call init_weight_transfer_engine"):
        engine.update_weights({})
    engine.init_transfer_engine(module.ReaderInfo(servers="a:1", job="night"))
    assert Reader.made.about["dtype"] == "bf16"
    for number in (1, 2, 3):
        Reader.made.queue.put(number)
    engine.start_weight_update()
    assert engine.model.is_open
    engine.update_weights({"number": 3, "lineage": 5})
    engine.finish_weight_update()
    assert not engine.model.is_open
    loaded = engine.model.loaded["w"]
    assert loaded.dtype is torch.bfloat16
    assert (loaded == torch.full((2, 2), 3.0)).all()
    engine.update_weights({"number": 2})
    assert engine.loaded.version == (5, 2)
    engine.update_weights({})
    assert engine.loaded.version == (5, 3)
    for gone in ({"number": 1}, {"number": 9, "lineage": 4}):
        with pytest.raises(psworker.ConfigError, match=r"no longer here, the newest is \(5, 3\)"):
            engine.update_weights(gone)
    with pytest.raises(TimeoutError, match=r"no version \(None, 4\) within 0.1 s"):
        engine.update_weights({"number": 4, "timeout_s": 0.1})
    assert engine.loaded.version == (5, 3)
    engine.shutdown()
    assert Reader.made.is_closed


def test_several_processes_need_a_number_and_a_refusal_is_told(module: Any) -> None:
    engine = engine_of(module, num_processes=2)
    engine.init_transfer_engine(module.ReaderInfo(servers="a:1", job="night"))
    with pytest.raises(psworker.ConfigError, match="2 processes that must load the same version"):
        engine.update_weights({})
    Reader.made.queue.put(psworker.ConfigError("the token is not known"))
    with pytest.raises(psworker.ConfigError, match="the token is not known"):
        engine.update_weights({"number": 1})
    engine.init_transfer_engine(module.ReaderInfo(servers="a:1", job="night"))
    Reader.made.queue.put(1)
    engine.update_weights({"number": 1})
    engine.shutdown()
