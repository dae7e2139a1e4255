"""The command that waits for a move ends with it, also if it has not seen its end."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1 import standby_pb2, standby_pb2_grpc
from psserver.exits import CommandError, Exit
from psserver.remote import drain


def answer_with(monkeypatch: pytest.MonkeyPatch, *phases: str, **more: Any) -> None:
    """Makes a shard answer with these phases, the last one for ever."""
    answers = itertools.chain(phases, itertools.repeat(phases[-1]))

    def move(request: standby_pb2.MoveRequest, timeout: float) -> standby_pb2.MoveReply:
        return standby_pb2.MoveReply(phase=next(answers), **more)

    monkeypatch.setattr(standby_pb2_grpc, "StandbyStub", lambda _: SimpleNamespace(Move=move))
    monkeypatch.setattr(drain, "ASK_S", 0.0)
    monkeypatch.setattr(drain, "AGAIN_S", 0.0)


def test_a_move_whose_end_was_not_seen_is_over_when_its_standby_is_filled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_with(monkeypatch, "followed", "frozen", "copying", "followed")
    told: list[str] = []
    with pytest.raises(CommandError, match="the shard stays at here: the move was given up"):
        drain.move("here", "there", 0, ANYONE, told.append)
    assert told == ["followed", "frozen"]


def test_a_move_goes_on_through_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "copying", "followed", "asking", "frozen", "given", "moved")
    assert drain.move("here", "there", 0, ANYONE, print).phase == "moved"


def test_a_process_that_is_to_end_waits_until_its_standby_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The standby is away at first, and goes away again in the middle of a move."""
    away, lost = ("serving", "serving"), ("followed", "copying", "followed", "copying")
    answer_with(monkeypatch, *away, *lost, "followed", "followed", "frozen", "moved", num_live=1)
    told: list[str] = []
    reply = drain.leave("here", 60.0, 0, ANYONE, told.append)
    assert reply is not None
    assert reply.phase == "moved"
    problems = [text for text in told if text.endswith("tried again for 60 s")]
    assert "no standby" in problems[0]
    assert "given up" in problems[1]


def test_a_process_that_is_to_end_does_so_at_once_without_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_with(monkeypatch, "serving")
    assert drain.leave("here", 60.0, 0, ANYONE, print) is None


def test_a_process_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed comes back, and is asked again until then."""
    here = standby_pb2.MoveReply(phase="serving", num_live=1)
    asked = [here, None, None, here, here, None]

    def move(request: standby_pb2.MoveRequest, timeout: float) -> standby_pb2.MoveReply:
        reply = asked.pop(0) if asked else None
        if reply is None:
            raise CommandError(Exit.NO_ANSWER, "nothing answers")
        return reply

    monkeypatch.setattr(standby_pb2_grpc, "StandbyStub", lambda _: SimpleNamespace(Move=move))
    monkeypatch.setattr(drain, "AGAIN_S", 0.0)
    with pytest.raises(CommandError, match="nothing answers"):
        drain.leave("here", 3600.0, 0, ANYONE, print)
    assert not asked


@pytest.mark.parametrize(
    ("phase", "more", "reason"),
    [
        ("serving", {"num_live": 1}, "has no standby"),
        ("copying", {"num_live": 1}, "stays at here"),
        ("asking", {"num_live": 1}, "stays at here"),
        ("serving", {"taking": "prepared"}, "has no standby"),
    ],
)
def test_a_process_that_is_to_end_waits_no_longer_than_it_may(
    phase: str, more: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, phase, **more)
    with pytest.raises(CommandError, match=reason):
        drain.leave("here", 0.05, 0, ANYONE, print)
