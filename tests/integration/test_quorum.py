"""Rounds with a quorum through real shards: the order in which messages of a late worker come."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import psworker
from pscore.pb.ps.v1 import data_pb2
from psworker.transports import OutgoingPush, PullCall, Transport
from tests.inside import table_of
from tests.integration.cluster import Shards, Station, results_of

MODE = "local(steps=1, quorum=1, window=0.0)"
NUMEL = 64


class Overtaken:
    """Holds the pushes of a transport back until the shard has decided about a pull behind them."""

    def __init__(self, transport: Transport) -> None:
        self._push, self._pull = transport.push, transport.pull
        self._held: list[OutgoingPush] = []
        self.was_answered: list[bool] = []  # Each pull, before the push in front of it was sent.
        transport.push = self.push  # type: ignore[method-assign]
        transport.pull = self.pull  # type: ignore[method-assign]

    def push(self, push: OutgoingPush) -> None:
        self._held.append(push)

    def pull(self, call: PullCall) -> None:
        self._pull(call)
        header = data_pb2.PullHeader()
        header.CopyFrom(call.header)
        header.look, header.shared = True, False
        # A look is answered at once: behind it on the connection, the pull is decided.
        look = PullCall(header=header, weights=np.zeros(NUMEL, np.float32), state=[])
        self._pull(look)
        look.done.result()
        self.was_answered.append(call.done.done())
        for push in self._held:
            self._push(push)
        self._held.clear()


def move_late(me: Station) -> tuple[npt.NDArray[Any], list[bool]]:
    """Makes a round, worker 1 when worker 0's has closed; each moves an element of its own by 1."""
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)], mode=MODE
    )
    table = table_of(optimizer)
    table.session.barrier("both are here")
    weight.grad = torch.zeros(NUMEL)
    weight.grad[me.rank] = -1.0
    answered = []
    if me.rank:
        me.hear()
        overtaken = [Overtaken(link.transport) for link in table.session.links]
        optimizer.step()
        answered = [was for each in overtaken for was in each.was_answered]
    else:
        optimizer.step()
        me.tell("closed")
    seen = weight.detach().numpy().copy()
    table.session.barrier("both have moved")
    return seen, answered


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["tcp", "local"])
def test_a_late_worker_begins_with_its_own_move_though_its_pull_overtakes_it(
    shards: Shards, plane: str
) -> None:
    env = {"PACELINE_DATA_PLANE": plane}
    with shards.workers(move_late, env=env) as workers:
        workers[0].hear()
        workers[1].tell("go")
        (first, _), (second, answered) = results_of(workers)
    assert first[:2].tolist() == [1.0, 0.0], "the first round closes with a quorum of one"
    assert answered == [False], "the weights of before do not have the move"
    assert second[:2].tolist() == [1.0, 1.0]
