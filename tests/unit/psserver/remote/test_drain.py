"""The command that waits for a move ends with it, also if it has not seen its end."""

import itertools
from types import SimpleNamespace

import pytest

from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1 import standby_pb2, standby_pb2_grpc
from psserver.exits import CommandError
from psserver.remote import drain


def answer_with(monkeypatch: pytest.MonkeyPatch, *phases: str) -> None:
    """Makes a shard answer with these phases, the last one for ever."""
    answers = itertools.chain(phases, itertools.repeat(phases[-1]))

    def move(request: standby_pb2.MoveRequest, timeout: float) -> standby_pb2.MoveReply:
        return standby_pb2.MoveReply(phase=next(answers))

    monkeypatch.setattr(standby_pb2_grpc, "StandbyStub", lambda _: SimpleNamespace(Move=move))
    monkeypatch.setattr(drain, "ASK_S", 0.0)


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
