"""The thread that does a piece of work follows from the thresholds that a shard is given."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pscore.pb.ps.v1 import data_pb2
from psserver.engine.placement import Placement
from psserver.service.data_socket import DataService
from psserver.slices.store import SliceStore
from tests.unit.psserver.front import Front, grad, play, push_header

SMALL = Placement()
LARGE = dataclasses.replace(SMALL, inline_numel_max=1)  # Each slice of the model is large.


@pytest.mark.parametrize(("num_cores", "steps_there"), [(1, True), (2, True), (3, False)])
def test_only_on_few_cores_the_receiving_thread_makes_the_step(
    num_cores: int, steps_there: bool
) -> None:
    placement = Placement.for_cores(num_cores)
    assert placement == dataclasses.replace(SMALL, steps_on_receive_thread=steps_there)


class Noting:
    """Notes the thread that answers."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.answered = threading.Event()

    def pushed(self, reply: data_pb2.PushReply) -> None:
        self.threads.append(threading.get_ident())
        self.answered.set()

    def pulled(self, reply: object, arrays: Sequence[object], release: object) -> None:
        raise AssertionError("no pull was made")


@pytest.mark.parametrize(
    ("placement", "is_here"),
    [
        (SMALL, True),
        (LARGE, False),
        (dataclasses.replace(LARGE, steps_on_receive_thread=True), True),
    ],
)
def test_a_gradient_is_added_on_the_thread_that_the_placement_names(
    placement: Placement, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Front, "placement", placement)

    async def scene(front: Front) -> None:
        await front.ready(num_workers=1)
        reply = Noting()
        data = grad(1.0).view(np.uint8)
        front.engine.requests.on_push(push_header(0, 0), data, reply, here=True)
        assert reply.answered.wait(200.0)
        assert (reply.threads == [threading.get_ident()]) == is_here

    play(scene)


@pytest.mark.parametrize(
    ("placement", "is_under_lock"),
    [
        (SMALL, True),
        (dataclasses.replace(SMALL, steps_on_receive_thread=True), False),
        (LARGE, False),
        (dataclasses.replace(LARGE, steps_on_receive_thread=True), False),
    ],
)
def test_only_small_slices_are_summed_under_the_engines_lock(
    placement: Placement, is_under_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the head of requests.py says; where the receiving thread may do it, none are."""
    monkeypatch.setattr(Front, "placement", placement)
    found: list[bool] = []
    plain = SliceStore.add_and_update

    async def scene(front: Front) -> None:
        def note(store: SliceStore, *arguments: Any) -> None:
            found.append(front.engine.lock._is_owned())  # type: ignore[attr-defined]
            plain(store, *arguments)

        monkeypatch.setattr(SliceStore, "add_and_update", note)
        await front.ready(num_workers=1)
        reply = Noting()
        data = grad(1.0).view(np.uint8)
        front.engine.requests.on_push(push_header(0, 0), data, reply, here=True)
        assert reply.answered.wait(200.0)

    play(scene)
    assert found == [is_under_lock]


def test_connections_get_the_shards_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Front, "placement", dataclasses.replace(SMALL, queued_nbytes_min=7))

    async def scene(front: Front) -> None:
        assert DataService(front.engine).queued_nbytes_min == 7

    play(scene)
