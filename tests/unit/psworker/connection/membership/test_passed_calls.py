"""Requests of a worker at a barrier, by the answers to its heartbeats."""

from types import SimpleNamespace
from typing import Any

import pytest

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules import parse_mode
from pscore.rules.asgd import ASGD
from pscore.rules.ssgd import SSGD
from psworker.connection.membership.passed_calls import (
    ASKED_BEATS,
    LATER_STEPS,
    WAIT_MS_MAX,
    PassedCalls,
)


def link(**answers: Any) -> Any:
    named = {"awaited_at": [], "awaited_by": [], "others_step": False, "num_beats": 5}
    return SimpleNamespace(**named | answers)


def passed_of(links: list[Any], specs: dict[int, Any], *, came_late: bool = True) -> PassedCalls:
    heartbeats: Any = SimpleNamespace(hurry=lambda all_shards: None)
    member: Any = SimpleNamespace(asks=False, num_workers=3, job="run", rank=0, incarnation=1)
    passed = PassedCalls(member, links, heartbeats, specs)
    passed.came_late = passed.at_start = came_late
    return passed


def ask(passed: PassedCalls, links: list[Any]) -> tuple[bool, list[int]]:
    """Returns whether the worker withdraws, and the workers that it excuses."""
    request = pb.BarrierRequest()
    with passed.asked():
        for _ in range(2):
            passed.ask(request)
            for one in links:
                one.num_beats += ASKED_BEATS
        passed.ask(request)
    return request.withdraws, sorted(request.excuses)


def test_a_late_worker_withdraws_where_others_wait_for_it_elsewhere() -> None:
    links = [link(), link(awaited_at=["model"])]
    passed = passed_of(links, {})
    assert ask(passed, links) == (True, [])
    assert passed.places == ["model"]


def test_a_late_worker_withdraws_at_its_start_and_excuses_others_behind_it() -> None:
    """One that has come back waits for it; only behind its first step this one was there before."""
    links = [link(awaited_at=["model"], awaited_by=[2])]
    passed = passed_of(links, {})
    assert ask(passed, links)[0]
    passed.at_start = False
    assert ask(passed, links) == (False, [2])


def test_a_late_worker_asks_once_where_the_others_wait() -> None:
    """They stay there until it comes, and it need not ask at each tensor of its script's start."""
    specs: dict[int, Any] = {}
    passed = passed_of([], specs)
    assert not passed.settled("start")
    passed.note("start", ["model", "barrier 'epoch'", "tensor.mean"])
    assert passed.settled("tensor.buffer")
    assert not passed.settled("epoch")
    assert not passed.settled("tensor.mean")
    passed.note("tensor.mean", ["tensor.mean"])  # They go on from there.
    assert not passed.settled("tensor.buffer")
    passed.note("start", [LATER_STEPS])
    assert passed.settled("tensor.buffer")
    specs[0] = SimpleNamespace(name="model", rule=SSGD())
    assert not passed.settled("tensor.buffer")
    passed.note("start", ["model"])
    passed.at_start = False
    assert not passed.settled("tensor.buffer")


def test_answers_to_heartbeats_that_were_under_way_do_not_count() -> None:
    one, request = link(awaited_at=["model"]), pb.BarrierRequest()
    passed = passed_of([one], {})
    with passed.asked():
        one.num_beats += ASKED_BEATS - 1
        passed.ask(request)
    assert not request.withdraws
    assert passed.wait_ms < WAIT_MS_MAX


def test_a_late_worker_leaves_a_change_of_the_job_only_before_its_first_step() -> None:
    links, request = [link(awaited_at=["model"])], pb.BarrierRequest(holds=True)
    passed = passed_of(links, {})
    for passed.at_start in (False, True):
        with passed.asked():
            links[0].num_beats += ASKED_BEATS
            passed.ask(request)
        assert request.withdraws == passed.at_start


def test_a_worker_that_waits_for_a_tensor_has_late_ones_excused_there() -> None:
    links, sent = [link(awaited_by=[2]), link(awaited_by=[1, 2])], list[pb.BarrierRequest]()
    for one in links:
        one.control = SimpleNamespace(Barrier=None)
        one.call = lambda _, request: sent.append(request)
    passed = passed_of(links, {}, came_late=False)
    with passed.asked():
        passed.excuse_at("tensor.mean")
        assert not sent, "no heartbeat has been answered yet"
    with passed.asked():
        for one in links:
            one.num_beats += ASKED_BEATS
        passed.excuse_at("tensor.mean")
        passed.excuse_at("tensor.mean")  # It is not time yet.
    assert [(one.table, sorted(one.excuses)) for one in sent] == [("tensor.mean", [1, 2])] * 2


def test_a_worker_that_began_with_the_others_excuses_late_ones_and_waits() -> None:
    links = [link(awaited_at=["model"], awaited_by=[2]), link(awaited_by=[2, 1])]
    assert ask(passed_of(links, {}, came_late=False), links) == (False, [1, 2])


@pytest.mark.parametrize(
    ("specs", "withdraws"),
    [
        ({}, True),
        ({0: SimpleNamespace(name="tensor.mean", rule=SSGD())}, True),
        ({0: SimpleNamespace(name="model", rule=ASGD())}, True),
        ({0: SimpleNamespace(name="model", rule=SSGD())}, False),
        ({0: SimpleNamespace(name="model", rule=SSGD(backup=1))}, True),
        ({0: SimpleNamespace(name="model", rule=parse_mode("diloco(steps=2, quorum=2)"))}, True),
        ({0: SimpleNamespace(name="model", rule=parse_mode("dpsgd"))}, False),
    ],
    ids=["no table", "a tensor", "asynchronous", "by step", "backup", "quorum", "exchange"],
)
def test_a_late_worker_waits_for_no_one_who_trains_on_without_it(
    specs: dict[int, Any], withdraws: bool
) -> None:
    """Where others may still come to it, and then need its step, it waits."""
    links = [link(others_step=True)]
    passed = passed_of(links, specs)
    assert ask(passed, links)[0] == withdraws
    passed.at_start = False
    assert not ask(passed, links)[0]
