"""A shard moves and is lost while models are trained in every mode at once, rows among them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import psworker
from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1.standby_pb2 import MoveRequest
from pscore.rules import parse_mode
from psserver.remote.drain import move
from tests.integration.cluster import Station
from tests.integration.command import free_ports
from tests.integration.row_models import Net, batch, make_tables
from tests.integration.test_drain import Place, Scene
from tests.integration.test_mode_pairs import MODES
from tests.integration.test_rows import values_of, wrap
from tests.integration.test_standby import lose, register

__all__ = ["register"]  # The fixture.
NUMEL, STEPS = 20_000, 40  # Of each model a part lies on each shard.
PAUSES = (12, 24)  # Workers wait after these steps.
Arrays = dict[str, npt.NDArray[np.float32]]
CASES: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in MODES},
    "2bit": {"compression": "2bit", "compress_min_nbytes": 0},
    "whole pulls in 2bit": {"pull_compression": "2bit", "compress_min_nbytes": 0},
    "on the workers": {"optimizer_on": "worker"},
}


class Model:
    """One parameter that is trained on drawn gradients, or counts those of each worker."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        rule = parse_mode(options.get("mode", "ssgd"))
        counts = not (rule.by_step or rule.outer_optimizer or rule.gossip)
        self.weight = torch.nn.Parameter(torch.zeros(NUMEL))
        values: dict[str, Any] = {"lr": 1.0} if counts else {"lr": 0.05, "momentum": 0.9}
        self.optimizer = psworker.DistributedOptimizer(
            torch.optim.SGD([self.weight], **values), [("weight", self.weight)], **options
        )
        self._ones = torch.zeros(NUMEL)
        self._ones[rank::2] = -1.0
        self._drawn = None if counts else torch.Generator().manual_seed(rank)

    def step(self) -> None:
        if self._drawn is None:
            self.weight.grad = self._ones.clone()
        else:
            self.weight.grad = torch.randn(NUMEL, generator=self._drawn)
        self.optimizer.step()

    def values(self) -> npt.NDArray[np.float32]:
        with self.optimizer.global_weights():
            found: npt.NDArray[np.float32] = self.weight.detach().numpy().copy()
        return found


def train(me: Station) -> Arrays:
    """Makes a step of every model in turn; says each, and waits after some."""
    torch.set_num_threads(1)
    models = {name: Model(me.rank, options) for name, options in CASES.items()}
    net = Net(make_tables())
    rows, _ = wrap(net, "adagrad")
    for step in range(1, STEPS + 1):
        for model in models.values():
            model.step()
        rows.zero_grad()
        torch.autograd.backward(net(batch(me.rank, step)))
        rows.step()
        me.tell(step)
        if step in PAUSES:
            me.hear()
    psworker.barrier("trained")
    found = {name: model.values() for name, model in models.items()}
    found |= values_of(net)
    psworker.barrier("read")
    return found


def go_on(scene: Scene) -> None:
    for worker in scene.workers:
        worker.tell()


def trained(folder: Path, register: Path | None = None) -> list[Arrays]:
    """Returns the models of both workers; the second shard moves, and is lost, with a register."""
    with ExitStack() as stack:
        scene = Scene(folder, stack, work=train)
        place = Place(folder, 1, free_ports(1)[0], "d")
        if register is not None:
            scene.reach(2)
            scene.drain()
            scene.reach(PAUSES[0])
            stack.enter_context(place.running())
        go_on(scene)
        if register is not None:
            wanted = MoveRequest(same_host=True, register=str(register), failover_s=1.0)
            move(scene.empty.address, place.address, 0, ANYONE, print, standby=wanted)
            scene.reach(PAUSES[1])
        go_on(scene)
        if register is not None:
            scene.reach(PAUSES[1] + 4)
            lose(scene.target)
        found: list[Arrays] = scene.results()  # type: ignore[assignment]
        return found


@pytest.mark.slow
def test_every_mode_ends_as_without_a_move_and_a_loss(tmp_path: Path, register: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed, moved = trained(tmp_path / "undisturbed"), trained(tmp_path, register)
    differ = {
        name
        for there, here in zip(undisturbed, moved, strict=True)
        for name in there
        if not np.array_equal(there[name], here[name])
    }
    by_arrival = {"adpsgd", "delayed_nesterov(steps=2)"}
    assert differ <= by_arrival
    assert all(np.isfinite(one[name]).all() for one in moved for name in by_arrival)
