"""The limits of waits for another worker that reaches the shards and does not answer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from pscore.errors import (
    AccessError,
    ConfigError,
    LimitError,
    PacelineError,
    ServerUnavailableError,
    ThreadError,
    TransportError,
)
from pscore.pb.ps.v1 import control_pb2
from psworker.peers import links
from psworker.peers.links import PeerLinks
from psworker.peers.long_wait import LongWait
from psworker.peers.patience import is_cut_off

LEASE_S, LIMIT_S = 10.0, 30.0


class Silent:
    """A link to a worker that has answered nothing for some time."""

    made: ClassVar[dict[int, Silent]] = {}  # The last ones, by rank.
    silent_s = 0.0
    has_offers_alone = False
    problem: PacelineError | None = None
    refusal: PacelineError | None = None
    failure: ThreadError | None = None

    def __init__(self, peer: control_pb2.Peer, own_host: str) -> None:
        self.peer, self.is_over, self.is_new = peer, False, True
        self.made[peer.rank] = self

    @property
    def address(self) -> str:
        return f"{self.peer.host}:{self.peer.port}"

    def close(self, *, waits: bool = True) -> None:
        self.is_over = True


def links_of(monkeypatch: pytest.MonkeyPatch, rank: int) -> tuple[PeerLinks, dict[int, Silent]]:
    """Returns the links of a worker of three, and those links themselves by rank."""
    monkeypatch.setattr(links, "PeerLink", Silent)
    shard = SimpleNamespace(patience=SimpleNamespace(limit_s=LIMIT_S))
    session: Any = SimpleNamespace(rank=rank, lease_s=LEASE_S, links=[shard], timeline=None)
    made = PeerLinks(session, "h")
    made.update([control_pb2.Peer(rank=other, host="h", port=1) for other in range(3)])
    return made, Silent.made


@pytest.mark.parametrize(
    ("rank", "limit_s"), [(2, LEASE_S + LIMIT_S), (0, 4 * LEASE_S + 2 * LIMIT_S)]
)
def test_of_two_workers_that_wait_the_one_of_the_higher_rank_ends_first(
    monkeypatch: pytest.MonkeyPatch, rank: int, limit_s: float
) -> None:
    made, each = links_of(monkeypatch, rank)
    each[1].silent_s = limit_s - 0.1
    each[1].problem = TransportError("no connection to h:1: refused")
    made.require_answers()
    each[1].silent_s = limit_s
    said = rf"worker 1 at h:1 has not answered worker {rank} for \d+ s \(no connection to h:1: ref"
    with pytest.raises(TransportError, match=said):
        made.require_answers()


@pytest.mark.parametrize("has_offers_alone", [False, True])
@pytest.mark.parametrize("problem", [AccessError("no"), ConfigError("it listens at loopback")])
def test_a_worker_that_can_never_be_reached_ends_this_one_after_a_lease(
    monkeypatch: pytest.MonkeyPatch, has_offers_alone: bool, problem: PacelineError
) -> None:
    made, each = links_of(monkeypatch, 0)
    each[1].problem, each[1].has_offers_alone = problem, has_offers_alone
    each[1].silent_s = LEASE_S - 0.1
    made.require_answers()
    each[1].silent_s = LEASE_S
    with pytest.raises(type(problem), match=rf"worker 0 cannot reach .* h:1: {problem}"):
        made.require_answers()


def test_an_array_that_another_worker_refuses_ends_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, each = links_of(monkeypatch, 0)
    each[1].refusal = LimitError("too long")
    with pytest.raises(LimitError, match="worker 1 at h:1 has refused an array of 0: too long"):
        made.require_answers()


def test_a_connection_whose_thread_has_failed_ends_this_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, each = links_of(monkeypatch, 0)
    each[1].failure = ThreadError("thread 'data-peer' ended")
    with pytest.raises(ThreadError, match="'data-peer'"):
        made.require_answers()


def test_offers_to_a_silent_worker_are_given_up_and_refused_until_it_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, each = links_of(monkeypatch, 0)
    former = each[1]
    former.silent_s, former.has_offers_alone = LEASE_S, True
    made.require_answers()
    assert former.is_over
    assert each[1] is not former
    assert each[2].is_over is False
    assert not made.send(1, None, None, lambda values: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("silent_s", "reached", "least", "stops"),
    [(11.0, 1, 3, True), (11.0, 2, 3, False), (9.0, 0, 3, False), (11.0, 0, 0, False)],
)
def test_a_worker_without_the_first_shard_continues_with_the_least_number_of_others(
    silent_s: float, reached: int, least: int, stops: bool
) -> None:
    assert is_cut_off(silent_s, LEASE_S, reached, least) is stops


def long_wait(monkeypatch: pytest.MonkeyPatch, waited_s: float, silent_s: float) -> LongWait:
    """Returns a wait that has begun before, beside a first shard that is silent."""

    def live() -> list[int]:
        raise ServerUnavailableError("no shard answers at h:7")

    patience = SimpleNamespace(limit_s=LIMIT_S)
    shard = SimpleNamespace(silent_s=silent_s, patience=patience)
    session: Any = SimpleNamespace(rank=2, lease_s=LEASE_S, links=[shard], timeline=None, waits="")
    session.heartbeats = SimpleNamespace(hurry=lambda: None)
    session.check = session.require_own = lambda: None
    session.live = live
    wait = LongWait(session, lambda: "step 4 of worker 1")
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    wait.__enter__()
    monkeypatch.setattr(time, "monotonic", lambda: waited_s)
    return wait


@pytest.mark.parametrize(("waited_s", "silent_s"), [(39.0, 90.0), (90.0, 39.0)])
def test_a_wait_continues_while_the_first_shard_may_answer(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, silent_s: float
) -> None:
    long_wait(monkeypatch, waited_s, silent_s).check()


def test_a_wait_fails_where_the_first_shard_cannot_tell_who_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = long_wait(monkeypatch, 41.0, 42.0)
    with pytest.raises(
        ServerUnavailableError,
        match=r"waited 41 s for step 4 of worker 1, and .* is lost: no shard answers at h:7",
    ):
        wait.check()
