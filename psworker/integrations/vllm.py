"""A weight transfer engine of vLLM that reads published weights; its backend is `paceline`.

    llm = LLM(model, weight_transfer_config=WeightTransferConfig(backend="paceline"))
    llm.init_weight_transfer_engine({"init_info": {"servers": "10.0.0.1:7070", "job": "night"}})
    ...
    llm.start_weight_update()
    llm.update_weights({"update_info": {"number": 12}})
    llm.finish_weight_update(weight_version="12")

vLLM finds it by the entry point `vllm.general_plugins`. Each process of the engine fetches and
checks versions in a thread while it serves; an update loads one that is there already, through the
model's own loader, so fused and divided tensors are vLLM's affair. The names of the parameters are
those of the model's checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pscore.errors import ConfigError, PacelineError
from pscore.subscription.assembly import WeightsVersion
from pscore.subscription.reader import TABLE, Reader
from pscore.subscription.weights import PublishedWeights
from pscore.threads import OwnedThread

try:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader import reload
except ModuleNotFoundError:  # Nothing makes an instance.
    WeightTransferEngine = WeightTransferInitInfo = WeightTransferUpdateInfo = object

VERSIONS_KEPT = 2  # So that processes that are a version apart can load the same one.
POLL_S = 1.0
TIMEOUT_S = 60.0


@dataclass
class ReaderInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The arguments of a reader, as `Subscriber` has them."""

    servers: str
    job: str
    table: str = TABLE
    token_file: str | None = None


@dataclass
class VersionInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to load; without a number, the newest that this process has."""

    # Its number. An engine of several processes needs it: they fetch at their own pace.
    number: int | None = None
    lineage: int | None = None  # Its lineage; None: any.
    timeout_s: float = TIMEOUT_S  # The longest wait for it, in seconds.

    def names(self, weights: PublishedWeights) -> bool:
        """Returns whether this is the version of `weights`."""
        lineage, number = weights.version
        return self.number in (None, number) and self.lineage in (None, lineage)

    def is_before(self, newest: WeightsVersion) -> bool:
        """Returns whether `newest` is newer than this version."""
        wanted = newest.lineage if self.lineage is None else self.lineage, self.number
        return self.number is not None and newest > wanted


class PacelineEngine(WeightTransferEngine):  # type: ignore[misc]
    """Reads published weights in a process of vLLM.

    Attributes:
        loaded: The version that the model has; None: that of its checkpoint.
    """

    init_info_cls = ReaderInfo
    update_info_cls = VersionInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """Reads nothing yet; arguments are those of the base class."""
        super().__init__(config, vllm_config, device, model)
        self.loaded: PublishedWeights | None = None
        self._changed = threading.Condition()
        self._versions: deque[PublishedWeights] = deque(maxlen=VERSIONS_KEPT)
        self._problem: Exception | None = None
        self._over = threading.Event()
        self._thread: OwnedThread | None = None

    def init_transfer_engine(self, init_info: ReaderInfo) -> None:
        """Starts to read; raises ConfigError if an argument is wrong."""
        self.shutdown()
        reader = Reader(
            init_info.servers,
            job=init_info.job,
            table=init_info.table,
            token_file=init_info.token_file,
            dtype="bf16",
        )
        self._over = threading.Event()
        self._thread = OwnedThread(partial(self._follow, reader), "engine-reader", self._broke)
        self._thread.start()

    def _follow(self, reader: Reader) -> None:
        """Fetches each new version until the reading ends."""
        newest = None
        with reader:
            while not self._over.is_set():
                try:
                    weights = reader.wait(newer_than=newest, timeout_s=POLL_S)
                except TimeoutError:
                    continue
                except PacelineError as problem:
                    self._broke(problem)
                    return
                newest = weights.version
                with self._changed:
                    self._versions.append(weights)
                    self._changed.notify_all()

    def _broke(self, problem: Exception) -> None:
        """Fails the waits for versions."""
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def start_weight_update(self) -> None:
        """Prepares the layers for a checkpoint's tensors."""
        reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Ends the update: layers are as vLLM's kernels need them."""
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a version; that of the base class needs an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Loads a version that this process has, or waits for it.

        Raises:
            ConfigError: Nothing is read, no number is given to one of several processes, or newer
                versions have taken the place of this one. The model is as it was.
            TimeoutError: The version has not come in time. The model is as it was.
            PacelineError: A shard refuses this reader.
        """
        if update_info.number is None and self.parallel_config.world_size > 1:
            raise ConfigError(
                f"update_info has no number, and the engine has {self.parallel_config.world_size} "
                "processes that must load the same version: give that of a Subscriber"
            )
        weights = self._wait_for(update_info)
        self.model.load_weights(
            (name, torch.from_numpy(array.copy()).view(torch.bfloat16).to(self.device))
            for name, array in weights.arrays.items()
        )
        self.loaded = weights

    def _wait_for(self, info: VersionInfo) -> PublishedWeights:
        if self._thread is None:
            raise ConfigError("no job is read: call init_weight_transfer_engine first")
        end_s = time.monotonic() + info.timeout_s
        with self._changed:
            while True:
                for weights in reversed(self._versions):
                    if info.names(weights):
                        return weights
                if self._problem is not None:
                    raise self._problem
                wanted = info.lineage, info.number
                newest = self._versions[-1].version if self._versions else None
                if newest is not None and info.is_before(newest):
                    raise ConfigError(
                        f"version {wanted} is no longer here, the newest is {tuple(newest)}"
                    )
                if not self._changed.wait(max(0.0, end_s - time.monotonic())):
                    raise TimeoutError(f"no version {wanted} within {info.timeout_s:g} s")

    def shutdown(self) -> None:
        """Ends the reading."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._problem = None, None
        self._versions.clear()
