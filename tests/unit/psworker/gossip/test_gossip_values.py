"""Arrays of other workers that are not what they should be: refused in words, and never mixed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from pscore.errors import RemoteProtocolError
from pscore.rules import parse_mode
from pscore.types import FloatArray
from psworker.gossip import GOSSIPS
from psworker.gossip.base import Gathering, Gossip, Meet, Model, Tag, Waits, Want
from psworker.pipeline.run import wire

NUMEL = 8
WRONG = "worker {} has sent {} numbers, {} wanted"
NONE: list[float] = []


class FakePost:
    """Two workers that know each other; nothing leaves."""

    has_moved = is_short = False

    def members(self) -> list[int]:
        return [0, 1]

    def open_store(self) -> int:
        return 1

    def is_far(self, to: int) -> bool:
        return False

    def give(self, to: int, tag: Tag, values: FloatArray) -> None:
        """Sends nothing."""

    def offer(self, to: int, number: int, part: int, values: FloatArray) -> None:
        """Sends nothing."""


def met(
    mode: str, positions: dict[int, int] | None = None, *, rank: int = 0
) -> tuple[Gossip, Waits]:
    """Returns one of two workers in a mode, and the rest of its start behind the meeting."""
    weights = torch.ones(NUMEL)

    def unpack(values: FloatArray) -> None:
        weights.copy_(torch.from_numpy(values[:NUMEL]))

    model = Model(
        weights=weights,
        first_step=0,
        update=lambda: None,
        gather=lambda: np.ones(NUMEL, np.float32),
        scatter=lambda total: None,
        pack=lambda: weights.numpy().copy(),
        unpack=unpack,
        lock=nullcontext(),
    )
    rule: Any = parse_mode(mode)
    gossip = GOSSIPS[rule.exchange_name](rule, rank, model, FakePost())
    start = gossip.start()
    assert isinstance(next(start), Meet)
    with pytest.raises(StopIteration) if positions is None else nullcontext():
        start.send([Gathering(1, positions or {0: -1, 1: -1})])
    return gossip, start


def first_want(gossip: Gossip) -> Waits:
    """Returns a step that has come to its first wait for an array of worker 1."""
    gossip.begin()
    step = gossip.step()
    wanted = next(step)
    assert isinstance(wanted, Want)
    assert wanted.source == 1
    return step


@pytest.mark.parametrize(
    ("mode", "numel", "wanted"),
    [
        ("allreduce", 0, "1 to 4"),
        ("allreduce", 5, "1 to 4"),
        ("allreduce(order=ranks)", 3, "4"),
        ("dpsgd", 0, "8"),
        ("dpsgd", 9, "8"),
        ("dpsgd(order=atc)", 7, "8"),
        ("sgp", 8, "9"),
    ],
)
def test_an_array_of_a_wrong_length_is_an_error_that_names_its_worker(
    mode: str, numel: int, wanted: str
) -> None:
    step = first_want(met(mode)[0])
    with pytest.raises(RemoteProtocolError, match=WRONG.format(1, numel, wanted)):
        step.send(np.zeros(numel, np.float32))


def test_a_port_that_is_none_is_an_error_that_names_its_worker() -> None:
    step = met("allreduce(backend=gloo)", rank=1)[0].step()
    assert isinstance(next(step), Want)
    with pytest.raises(RemoteProtocolError, match=WRONG.format(0, 2, 1)):
        step.send(np.zeros(2, np.float32))


def test_a_result_or_a_model_of_a_wrong_length_is_an_error_that_names_its_worker() -> None:
    _, newcomer = met("allreduce", {0: -1, 1: 3})
    newcomer.send(np.zeros(NUMEL - 1, np.float32))
    with pytest.raises(RemoteProtocolError, match=WRONG.format(1, 7, "8 to inf")):
        newcomer.send(np.zeros(0, np.float32))
    gossip, _ = met("allreduce")
    gossip.post.has_moved = True  # type: ignore[misc]
    step = gossip.step()
    assert isinstance(next(step), Meet)
    assert isinstance(step.send([Gathering(2, {0: 0, 1: 1})]), Want)
    step.send(np.zeros(NUMEL + 1, np.float32))
    with pytest.raises(RemoteProtocolError, match=WRONG.format(1, 9, "8")):
        step.send(np.zeros(0, np.float32))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["dpsgd", "dpsgd(order=atc)", "sgp"])
def test_a_model_with_nan_or_inf_is_left_out_of_the_mix(mode: str, value: float) -> None:
    gossip, _ = met(mode)
    step = first_want(gossip)
    came = np.ones(NUMEL + (mode == "sgp"), np.float32)
    came[3] = value
    with pytest.raises(StopIteration):
        step.send(came)
    assert gossip.number == 1
    assert gossip.stats.refused == {1}
    assert torch.equal(gossip.model.weights, torch.ones(NUMEL))


@pytest.mark.parametrize("mode", ["adpsgd", "adpsgd(exchange=atomic)"])
@pytest.mark.parametrize(
    ("part", "values", "reason"),
    [
        (1, NUMEL * [0.0], "worker 1 offers part 1 of a model of 1 parts"),
        (-1, NUMEL * [0.0], "worker 1 offers part -1 of a model of 1 parts"),
        (0, NONE, WRONG.format(1, 0, 8)),
        (0, 9 * [0.0], WRONG.format(1, 9, 8)),
        (0, [*7 * [0.0], math.nan], "worker 1 offers a model with NaN or Inf"),
        (0, [-math.inf, *7 * [0.0]], "worker 1 offers a model with NaN or Inf"),
    ],
)
def test_a_wrong_offer_is_refused_and_mixes_nothing(
    mode: str, part: int, values: list[float], reason: str
) -> None:
    gossip: Any = met(mode)[0]
    before = gossip.shared.copy()
    with pytest.raises(RemoteProtocolError, match=reason):
        gossip.on_offer(1, 11, 1, part, np.array(values, np.float32))
    assert (gossip.shared == before).all()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([NONE], "worker 1 has sent a tensor without a shape"),
        ([[math.nan] * wire.SHAPE_NUMEL], "worker 1 has sent a tensor without a shape"),
        ([[99.0] * wire.SHAPE_NUMEL], "worker 1 has sent a tensor without a shape"),
        ([[1.0, -4.0, *14 * [0.0]]], "worker 1 has sent a tensor without a shape"),
        ([[1.0, 2.0, *14 * [0.0], 1.0, 1.0, 1.0]], WRONG.format(1, 3, 2)),
        ([[1.0, 4.0, *14 * [0.0]], NONE], "worker 1 has sent 0 numbers, 1 to "),
        ([[1.0, 4.0, *14 * [0.0]], 5 * [0.0]], WRONG.format(1, 5, 4)),
    ],
)
def test_a_tensor_of_another_stage_that_is_none_is_an_error_that_names_its_worker(
    parts: list[list[float]], reason: str
) -> None:
    *begin, last = (np.array(part, np.float32) for part in parts)
    waits = wire.receive(1, 1, 0)
    next(waits)
    for part in begin:
        waits.send(part)
    with pytest.raises(RemoteProtocolError, match=reason):
        waits.send(last)
