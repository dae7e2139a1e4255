"""A worker's part in a job, at shards that the test answers itself."""

import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pscore.compressors.none import NoCompression
from pscore.contents import LONG
from pscore.errors import (
    ConfigError,
    JobMismatchError,
    NotOverError,
    ProtocolVersionError,
    RankTakenError,
    ReplacedError,
    ServerUnavailableError,
    ShardMapError,
    StateLostError,
    ThreadError,
    UnknownJobError,
)
from pscore.net import wire
from pscore.net.credentials import ANYONE, Credentials
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules.ssd import SSD
from pscore.table_spec import TableSpec, content_to_proto
from pscore.types import Origin, TensorSpec
from psworker.connection.membership import joining, mending_wait, taking_part
from psworker.connection.membership import session as module
from psworker.connection.membership.session import Session
from psworker.group.worker_group import WorkerGroup
from psworker.job.context import open_session
from psworker.job.environment import Environment
from tests.integration.command import eventually

LEASE_S = 1000.0  # The first heartbeat would be after 200 s.


class FakeLink:
    """A link whose shard answers from a script."""

    made: "list[FakeLink]" = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, address: str, *, patience_s: float, credentials: Credentials) -> None:
        self.credentials = credentials
        self.address = address
        self.patience = SimpleNamespace(limit_s=patience_s)
        self.control = SimpleNamespace(
            Describe="Describe",
            Join="Join",
            Define="Define",
            Barrier="Barrier",
            Leave="Leave",
            Heartbeat="Heartbeat",
        )
        self.instance = self.reached = 0
        self.data_plane = ""
        self.requests: list[tuple[str, Any]] = []
        self.opened: list[str] = []
        self.is_closed = False
        self.beats: list[Callable[[], object]] = []
        self.beaten = threading.Event()
        self.beaten_as: list[tuple[int, int]] = []
        number = len(FakeLink.made)
        self.describe = pb.DescribeReply(
            protocol=wire.PROTOCOL, version="0.1.0", cluster="c", shard=number, num_shards=2
        )
        self.answers: dict[str, Any] = {
            "Join": pb.JoinReply(rank=3, lease_s=LEASE_S, instance=40 + number),
            "Define": pb.DefineReply(table=2),
            "Barrier": pb.BarrierReply(done=True),
            "Leave": pb.LeaveReply(),
        }
        self.fastest_step_s = 0.0
        FakeLink.made.append(self)

    def call(self, method: str, request: Any, timeout_s: float = 0.0) -> Any:
        self.requests.append((method, request))
        answer = self.describe if method == "Describe" else self.answers[method]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def joined(self, instance: int, rank: int, incarnation: int) -> None:
        self.instance, self.joined_as = instance, (rank, incarnation)

    def require_whole(self) -> None:
        """It never comes back empty."""

    def look(self) -> bool:
        return False

    def beat(self, request: Any, timeout_s: float) -> list[pb.ResidualRequest]:
        assert request.data_plane in ("", self.data_plane)
        self.beaten.set()
        self.beaten_as.append((request.worker, request.incarnation))
        if self.beats:
            self.beats[0]()
        return []

    def open(self, data_plane: str) -> None:
        self.opened.append(data_plane)
        self.data_plane = data_plane

    def close(self) -> None:
        self.is_closed = True

    def sent(self, method: str) -> list[Any]:
        return [request for name, request in self.requests if name == method]


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeLink]]:
    FakeLink.made = []
    monkeypatch.setattr(module, "Link", FakeLink)
    yield FakeLink.made
    assert all(link.is_closed for link in FakeLink.made)


def begin(rank: int = 3, job: str = "job", **options: Any) -> Session:
    return Session(["a:1", "b:2"], job=job, rank=rank, num_workers=4, **options)


def prepare(change: Callable[[list[FakeLink]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `change` when both links are made, before any request."""
    real = FakeLink.__init__

    def made(self: FakeLink, address: str, **options: Any) -> None:
        real(self, address, **options)
        if len(FakeLink.made) == 2:
            change(FakeLink.made)

    monkeypatch.setattr(FakeLink, "__init__", made)


def test_the_rank_that_the_first_shard_gives_is_asked_for_at_the_others(
    links: list[FakeLink],
) -> None:
    session = begin(rank=-1, data_plane="tcp", restart=2, run_id="night")
    (first,), (second,) = (link.sent("Join") for link in links)
    assert (first.rank, second.rank) == (-1, 3)
    assert first.incarnation == second.incarnation == session.incarnation
    assert (first.job, first.num_workers, first.restart) == ("job", 4, 2)
    assert (first.run_id, second.run_id) == ("night", "night")
    assert first.protocol == wire.PROTOCOL
    assert [link.opened for link in links] == [["tcp"], ["tcp"]]
    assert [link.instance for link in links] == [40, 41]
    session.leave()


def test_the_environment_says_which_job_and_how_patient(links: list[FakeLink]) -> None:
    environment = Environment.read(
        {"RANK": "1", "WORLD_SIZE": "4", "PACELINE_JOB": "night", "PACELINE_TIMEOUT_S": "2.5"}
    )
    assert environment.credentials() == ANYONE
    session = open_session(["a:1", "b:2"], environment)
    assert links[0].sent("Join")[0].job == "night"
    assert links[1].patience.limit_s == 2.5
    session.leave()


def another_protocol(links: list[FakeLink]) -> None:
    links[1].describe.protocol = 9


def another_cluster(links: list[FakeLink]) -> None:
    links[1].describe.cluster = "d"


def more_shards(links: list[FakeLink]) -> None:
    for link in links:
        link.describe.num_shards = 3


def wrong_order(links: list[FakeLink]) -> None:
    for index, link in enumerate(links):
        link.describe.shard = 1 - index


def one_shard_twice(links: list[FakeLink]) -> None:
    for link in links:
        link.describe.shard = 0


def rank_taken(links: list[FakeLink]) -> None:
    links[1].answers["Join"] = RankTakenError("rank 3 is held")


REFUSALS: list[tuple[Callable[[list[FakeLink]], None], type[Exception], str]] = [
    (
        another_protocol,
        ProtocolVersionError,
        r"b:2 speaks protocol 9 \(paceline 0.1.0\), this worker speaks \d+: install one version",
    ),
    (
        another_cluster,
        ShardMapError,
        "the servers were not started together: a:1 is shard 0 of 2, b:2 is shard 1 of 2",
    ),
    (
        more_shards,
        ShardMapError,
        "2 servers for 3 shards: a:1 is shard 0 of 3, b:2 is shard 1 of 3",
    ),
    (
        wrong_order,
        ShardMapError,
        "the servers are not in the order of their shards: a:1 is shard 1 of 2, b:2 is shard 0",
    ),
    (
        one_shard_twice,
        ShardMapError,
        "two of the servers are the same shard: a:1 is shard 0 of 2, b:2 is shard 0 of 2; start",
    ),
    (rank_taken, RankTakenError, "rank 3 is held"),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSALS)
def test_a_refusal_is_raised_and_joined_shards_are_left(
    links: list[FakeLink],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[FakeLink]], None],
    kind: type[Exception],
    message: str,
) -> None:
    prepare(change, monkeypatch)
    with pytest.raises(kind, match=message):
        begin(patience_s=0.1)
    joined = [1, 0] if kind is RankTakenError else [0, 0]
    assert [len(link.sent("Leave")) for link in links] == joined


def test_a_rank_that_is_not_free_everywhere_yet_is_asked_for_again(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard loses a dead worker at its own time."""
    taken, joined = RankTakenError("rank 3 is held"), pb.JoinReply(rank=3, lease_s=LEASE_S)

    def answers(made: list[FakeLink]) -> None:
        made[1].answers["Join"] = [taken, taken, joined]

    prepare(answers, monkeypatch)
    monkeypatch.setattr(joining, "RANK_RETRY_S", 0.0)
    session = begin(rank=-1, min_workers=2)
    first, second = (link.sent("Join") for link in links)
    assert [request.rank for request in first] == [-1, -1, -1]
    assert len({request.incarnation for request in first}) == 3
    drawn = [request.incarnation for request in first]
    assert [list(request.former) for request in first] == [[], drawn[:1], drawn[:2]]
    assert [request.rank for request in second] == [3, 3, 3]
    assert {request.min_workers for request in first} == {2}
    assert [request.failed for request in links[0].sent("Leave")] == [True, True]
    assert {link.patience.limit_s for link in links} == {30.0}
    session.leave()


def test_a_worker_that_waits_for_one_shard_keeps_its_lease_at_those_before(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait may take a whole lease, and the threads that send heartbeats start after it."""
    taken, joined = RankTakenError("rank 3 is held"), pb.JoinReply(rank=3, lease_s=LEASE_S)

    def answers(made: list[FakeLink]) -> None:
        made[1].answers["Join"] = [taken, taken, joined]

    prepare(answers, monkeypatch)
    monkeypatch.setattr(joining, "RANK_RETRY_S", 0.0)
    session = begin()
    assert links[0].beaten_as == [(3, session.incarnation)] * 2
    assert links[1].beaten_as == []
    session.leave()


def test_a_worker_that_waits_for_a_place_says_so_and_gives_up_with_the_job_and_the_time(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not links
    seconds = itertools.count(0, 1.5)  # It is read three times in an attempt.
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda seconds_s: None)
    monkeypatch.setattr(joining, "time", clock)
    monkeypatch.setattr(joining, "RANK_RETRY_S", 0.0)

    def answers(made: list[FakeLink]) -> None:
        made[0].answers["Join"] = RankTakenError("all 2 ranks of the job are taken")

    prepare(answers, monkeypatch)
    wanted = "job 'job' has had no free rank for 32 s: all 2 ranks of the job are taken; wait"
    with pytest.raises(RankTakenError, match=wanted):
        begin(rank=-1, min_workers=2)
    told = [record.message for record in caplog.records]
    assert [line.partition(" s ")[0].rpartition(" ")[2] for line in told] == ["9", "14", "22"]
    assert all("for a free rank in job 'job': all 2 ranks" in line for line in told)


def test_a_process_that_begins_another_run_says_so_and_waits_for_the_end_of_the_former(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of the former run leave one shard after the other."""
    monkeypatch.setattr(joining, "RANK_RETRY_S", 0.0)
    visitor = begin(job="twice")
    visitor.leave()  # It has declared no table: it took no part in the run.
    links.clear()
    first = begin(job="twice")
    assert {one.after for link in links for one in link.sent("Join")} == {0}
    define(first)
    first.leave()
    goes_on, joined = NotOverError("it goes on"), pb.JoinReply(rank=3, lease_s=LEASE_S)
    links.clear()

    def answers(made: list[FakeLink]) -> None:
        for link in made:
            link.answers["Join"] = [goes_on, joined]

    prepare(answers, monkeypatch)
    second = begin(job="twice")
    assert [[one.after for one in link.sent("Join")] for link in links] == [
        [first.incarnation] * 2,
        [first.incarnation] * 2,
    ]
    assert links[0].beaten_as == [(3, second.incarnation)]
    second.leave(failed=True)
    links.clear()
    third = begin(job="twice")
    assert {one.after for one in links[0].sent("Join")} == {first.incarnation}
    third.leave()


def test_a_worker_says_to_the_first_shard_that_it_waits_and_how_long_when_it_first_joins(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, joined = NotOverError("rank 3 is held"), pb.JoinReply(rank=3, lease_s=LEASE_S)

    def answers(made: list[FakeLink]) -> None:
        made[0].answers["Join"] = [held, joined, joined]

    prepare(answers, monkeypatch)
    monkeypatch.setattr(joining, "RANK_RETRY_S", 0.01)
    session = begin()
    waited = [request.waited_ms for request in links[0].sent("Join")]
    assert 0 < waited[0] < waited[1]
    assert [request.waited_ms for request in links[1].sent("Join")] == [0]
    session.rejoin()
    assert [link.sent("Join")[-1].waited_ms for link in links] == [0, 0]
    session.leave()


def test_a_process_that_was_forked_from_the_worker_is_refused(links: list[FakeLink]) -> None:
    session = begin()
    session.require_own()
    child = os.fork()
    if not child:
        code = 1
        try:
            session.require_own()
        except ConfigError as problem:
            code = 0 if re.search(r"forked from worker 3 of job .*spawn", str(problem)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session.require_own()
    session.leave()


def test_a_worker_whose_rank_was_taken_comes_back_with_another(links: list[FakeLink]) -> None:
    session = begin(min_workers=2)
    other = pb.JoinReply(rank=1, lease_s=LEASE_S)
    links[0].answers["Join"] = [RankTakenError("rank 3 is held"), other]
    links[1].answers["Join"] = other
    session.rejoin()
    assert session.rank == 1
    requests = links[0].sent("Join")
    assert [request.rank for request in requests] == [3, 3, -1]
    assert all(request.returns for request in requests[1:])
    session.leave()


@pytest.mark.usefixtures("links")
def test_a_worker_without_a_rank_is_heard_as_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on its way back: a shard's report about its former process is no news to it."""
    asked, told = threading.Event(), threading.Event()

    def refuse() -> None:
        if not asked.is_set():
            asked.set()
            told.wait(200.0)
            raise ReplacedError("rank 3 was declared lost")

    def change(links: list[FakeLink]) -> None:
        for link in links:
            link.answers["Join"] = pb.JoinReply(rank=3, lease_s=0.05, instance=1)

    prepare(change, monkeypatch)
    session = begin(min_workers=2)
    first, links = session.incarnation, FakeLink.made
    links[1].beats.append(refuse)
    assert asked.wait(200.0)  # At one shard a heartbeat is under way, ...
    taken, other = RankTakenError("rank 3 is held"), pb.JoinReply(rank=1, lease_s=0.05)
    links[0].answers["Join"] = [taken, taken, taken, other]
    links[1].answers["Join"] = other
    monkeypatch.setattr(joining, "RANK_RETRY_S", 0.1)  # ... at the other ten begin with each try.
    session.rejoin()
    told.set()
    for link in links:
        count = len(link.beaten_as)
        while len(link.beaten_as) < count + 2:
            assert link.beaten.wait(200.0)
            link.beaten.clear()
        assert set(link.beaten_as) <= {(3, first), (1, session.incarnation)}
        assert link.beaten_as[-1] == (1, session.incarnation)
    session.check()
    session.leave()


def test_live_ranks_need_no_right_beyond_a_workers(links: list[FakeLink]) -> None:
    """A token of one job does not open the shards' status, which tells of all jobs."""
    session = begin()
    links[0].answers["Heartbeat"] = pb.HeartbeatReply(live=[0, 2, 3])
    assert session.live() == [0, 2, 3]
    (request,) = links[0].sent("Heartbeat")
    assert (request.worker, request.wants_live) == (3, True)
    session.leave()


def test_a_rank_of_a_fixed_number_is_not_given_up(links: list[FakeLink]) -> None:
    session = begin()
    links[0].answers["Join"] = RankTakenError("rank 3 is held")
    with pytest.raises(RankTakenError):
        session.rejoin()
    session.leave()


def declaration() -> TableSpec:
    tensor = TensorSpec(name="weight", shape=(2, 3), dtype="bfloat16", group=1)
    return TableSpec(
        name="model",
        tensors=(tensor,),
        num_shards=2,
        rule=SSD(steps=3),
        compressor=NoCompression(),
        optimizer="sgd",
        num_groups=2,
    )


def define(session: Session, again: bool = False) -> tuple[int, Origin]:
    return session.define(declaration(), again=again)[:2]


def test_the_first_shard_tells_the_length_of_slices_that_the_job_has(links: list[FakeLink]) -> None:
    session = begin()
    for link in links:
        link.answers["Define"] = pb.DefineReply(table=2, content=content_to_proto(LONG))
    assert session.define(declaration(), adopts=True).content == LONG
    (first,), (second,) = (link.sent("Define") for link in links)
    assert first.adopts
    assert second.table.content == content_to_proto(LONG)
    session.leave()


def test_a_table_is_declared_alike_at_every_shard(links: list[FakeLink]) -> None:
    session = begin()
    links[1].answers["Define"] = pb.DefineReply(table=2, clock=7, step=30)
    assert define(session) == (2, Origin(7, 30))  # The first shard has no slice of it, perhaps.
    (first,), (second,) = (link.sent("Define") for link in links)
    assert first == second
    table = first.table
    assert (table.name, table.num_shards, table.optimizer, table.num_groups) == (
        "model",
        2,
        "sgd",
        2,
    )
    (tensor,) = table.tensors
    assert (tensor.name, list(tensor.shape), tensor.dtype, tensor.group) == (
        "weight",
        [2, 3],
        "bfloat16",
        1,
    )
    assert table.rule.name == "ssd"
    assert '"steps": 3' in table.rule.arguments
    session.leave()


def test_weights_that_all_shards_have_lost_are_awaited_from_nobody(links: list[FakeLink]) -> None:
    """Another worker has declared the table again, and ended with the same error."""
    session = begin()
    with pytest.raises(StateLostError, match="without the weights of 'model'"):
        define(session, again=True)
    session.leave()


def test_another_declaration_than_the_jobs_is_raised(links: list[FakeLink]) -> None:
    session = begin()
    links[0].answers["Define"] = JobMismatchError("mode is ssd here and ssgd in the job")
    with pytest.raises(JobMismatchError, match="mode is ssd here and ssgd in the job"):
        define(session)
    session.leave()


def test_a_barrier_has_a_number_for_each_name(links: list[FakeLink]) -> None:
    session = begin()
    for name in ("epoch", "epoch", "other"):
        session.barrier(name)
    assert [(r.name, r.round) for r in links[0].sent("Barrier")] == [
        ("epoch", 0),
        ("epoch", 1),
        ("other", 0),
    ]
    assert links[1].sent("Barrier") == []
    session.leave()


def answer_joins(monkeypatch: pytest.MonkeyPatch, joined: pb.JoinReply) -> None:
    """Makes every shard answer a join with this."""
    made = FakeLink.__init__

    def init(self: FakeLink, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.answers["Join"] = joined

    monkeypatch.setattr(FakeLink, "__init__", init)


def test_a_worker_that_comes_late_counts_barriers_from_where_others_are(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = {"epoch": 7, "other": 1}
    joined = pb.JoinReply(rank=3, lease_s=LEASE_S, instance=40, rounds=rounds)
    answer_joins(monkeypatch, joined)
    session = begin()
    for name in ("other", "epoch", "epoch"):
        session.barrier(name)
    sent = [(r.name, r.round) for r in links[0].sent("Barrier")]
    assert sent == [("other", 1), ("epoch", 7), ("epoch", 8)]
    session.leave()


@pytest.mark.parametrize("progress", [{}, {"model": 7}])
def test_the_other_shards_learn_whether_the_first_one_has_the_job_under_way(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch, progress: dict[str, int]
) -> None:
    """Or has begun it anew."""
    anew = not progress
    joined = pb.JoinReply(rank=3, lease_s=LEASE_S, instance=40, progress=progress, anew=anew)
    answer_joins(monkeypatch, joined)
    session = begin()
    assert [link.sent("Join")[0].anew for link in links[:2]] == [False, anew]
    asked = [link.sent("Join")[0].continues for link in links]
    assert asked == [False, *[bool(progress)] * (len(links) - 1)]
    session.leave()


def test_a_barrier_that_is_waited_for_says_for_whom(
    links: list[FakeLink], caplog: pytest.LogCaptureFixture
) -> None:
    session = begin()
    waits = pb.BarrierReply(done=False, waiting_for="worker 2 at barrier 'epoch'")
    links[0].answers["Barrier"] = [waits, waits, waits, pb.BarrierReply(done=True)]  # A short one.
    with caplog.at_level(logging.WARNING, "paceline"):
        session.barrier("epoch")
    assert [record.message for record in caplog.records] == [
        "worker 3 has waited 0 s for worker 2 at barrier 'epoch'"
    ] * 2
    assert {request.round for request in links[0].sent("Barrier")} == {0}
    session.leave()


def test_workers_that_change_the_job_meet_others_while_they_wait(links: list[FakeLink]) -> None:
    """One may wait for this worker in a directory that has begun again with its shard."""
    session, met = begin(), list[bool]()

    class Pushes:
        answers = SimpleNamespace(meet=lambda: met.append(True))

        def flush(self) -> None:
            """Nothing is under way."""

    pushes = Pushes()
    session.pushes.add(pushes)
    for holds in (False, True):
        links[0].answers["Barrier"] = [pb.BarrierReply(), pb.BarrierReply(done=True)]
        session.barrier("mode", holds=holds)
        assert met == [True] * holds
    session.leave()


def test_the_next_process_brings_what_a_lost_one_has_not(links: list[FakeLink]) -> None:
    session, brought = begin(), list[int]()
    lowest = taking_part.PROCESSES_MAX - session.process_rank
    rounds = (1.0, lowest, 2.0)
    links[0].answers["Barrier"] = [pb.BarrierReply(done=True, value=value) for value in rounds]
    taking_part.bring_once(session, "state", lambda: brought.append(1), is_mine=False)
    assert brought == [1]
    assert [request.value for request in links[0].sent("Barrier")] == [1.0, lowest, 2.0]
    session.leave()


def test_a_worker_leaves_every_shard_even_if_one_is_gone(links: list[FakeLink]) -> None:
    session = begin()
    links[0].answers["Leave"] = ServerUnavailableError("no shard answers at a:1")
    session.leave("finished")
    session.leave("finished")
    (request,) = links[1].sent("Leave")
    assert (request.job, request.worker, request.reason) == ("job", 3, "finished")
    assert request.incarnation == session.incarnation
    assert links[1].patience.limit_s == 0.0


@pytest.mark.usefixtures("links")
def test_a_heartbeat_that_is_refused_is_raised_by_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = threading.Event()

    def beat() -> None:
        refused.set()
        raise ReplacedError("rank 3 was declared lost")

    def change(links: list[FakeLink]) -> None:
        for link in links:
            link.answers["Join"] = pb.JoinReply(rank=3, lease_s=0.05, instance=1)
        links[1].beats.append(beat)

    prepare(change, monkeypatch)
    session = begin()
    assert refused.wait(200.0)
    session.leave()
    with pytest.raises(ReplacedError, match="declared lost"):
        session.check()


@pytest.mark.usefixtures("links")
def test_a_shard_that_hangs_costs_no_lease_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    released, often = threading.Event(), threading.Semaphore(0)

    def change(links: list[FakeLink]) -> None:
        for link in links:
            link.answers["Join"] = pb.JoinReply(rank=3, lease_s=0.05, instance=1)
        links[0].beats.append(released.wait)
        links[1].beats.append(often.release)

    prepare(change, monkeypatch)
    session = begin()
    for _ in range(5):
        assert often.acquire(timeout=200.0)
    released.set()
    session.leave()


def test_a_worker_that_comes_back_is_another_incarnation(links: list[FakeLink]) -> None:
    session = begin()
    first = session.incarnation
    session.heartbeats.failure = ReplacedError("declared lost")
    session.rejoin()
    session.check()
    assert session.incarnation not in (0, first)
    for link in links:
        before, again = link.sent("Join")
        assert (list(before.former), list(again.former)) == ([], [first])
        assert (again.rank, again.returns) == (3, True)
        assert again.incarnation == session.incarnation
    session.leave()


def test_a_group_that_is_lost_while_it_joins_ends_with_one_sentence(links: list[FakeLink]) -> None:
    session = begin()
    session.group = WorkerGroup(0, 2)
    links[1].answers["Define"] = ReplacedError("worker 0 was declared lost")
    with pytest.raises(ReplacedError, match=r"lost; .* 2 processes .* start all of them again"):
        define(session)
    session.leave()


@pytest.mark.usefixtures("links")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_of_heartbeats_that_fails_ends_the_waits_also_after_a_rejoin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(links: list[FakeLink]) -> None:
        for link in links:
            link.answers["Join"] = pb.JoinReply(rank=3, lease_s=0.05, instance=1)

    prepare(change, monkeypatch)
    session = begin()
    session.heartbeats.stage_reports.append(lambda: 1 // 0)  # type: ignore[arg-type, return-value]

    def is_broken() -> bool:
        try:
            session.check()
        except ThreadError:
            return True
        return False

    eventually(is_broken)
    for _ in range(2):
        with pytest.raises(ThreadError, match="'heartbeat' of this process ended by ZeroDivision"):
            session.check()
        session.rejoin()
    session.leave()


def test_a_worker_that_is_lost_before_its_first_table_rejoins_once(links: list[FakeLink]) -> None:
    session = begin()
    first = session.incarnation
    links[1].answers["Define"] = [ReplacedError("declared lost"), pb.DefineReply(table=2)]
    assert define(session)[0] == 2
    assert session.incarnation != first
    assert [len(link.sent("Join")) for link in links] == [2, 2]
    links[0].answers["Define"].has_weights = True
    links[1].answers["Define"] = ReplacedError("declared lost")
    with pytest.raises(
        ReplacedError
    ):  # Its table has to rejoin (psworker/training/changes/recovery.py).
        define(session, again=True)
    session.leave()


SPEC = TableSpec(
    name="model",
    tensors=(TensorSpec(name="w", shape=(4,), dtype="float32"),),
    num_shards=2,
    rule=SSD(),
    compressor=NoCompression(),
    optimizer="sgd",
    num_groups=1,
)


def test_a_worker_that_waits_for_a_restored_job_asks_quietly_and_joins_once(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each join would be a line in the log of every shard."""
    monkeypatch.setattr(mending_wait, "ASK_S", 0.0)
    session = begin()
    for link in links:
        link.answers["Join"].mends, link.answers["Join"].progress["model"] = True, 7
    session.rejoin()
    joins = len(links[0].sent("Join"))
    has, lacks = (pb.DefineReply(table=2, has_weights=has) for has in (True, False))
    again = UnknownJobError("no worker has joined at rank 3")  # The job was restored.
    links[0].answers["Define"] = [has, has, has, again, has]
    links[1].answers["Define"] = [lacks, lacks, lacks, has]
    caplog.set_level(logging.WARNING)
    assert session.define(SPEC).number == 2
    assert [len(link.sent("Join")) for link in links] == [joins + 1, joins + 1]
    assert [record.getMessage()[:36] for record in caplog.records] == [
        "this worker waits until job 'job' is",
        "worker 3 rejoins, before its first s",
        "job 'job' is restored, and this work",
    ]
    session.leave()


def test_a_shard_that_refuses_a_job_is_asked_alone_until_it_has_it(
    links: list[FakeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mending_wait, "ASK_S", 0.0)
    session = begin()
    links[0].answers["Join"].mends = True
    session.rejoin()
    joined, refused = links[1].answers["Join"], StateLostError("shard 1 cannot continue it")
    links[1].answers["Join"] = [refused, refused, refused, joined, joined]
    before = [len(link.sent("Join")) for link in links]
    session.rejoin()
    assert [len(link.sent("Join")) for link in links] == [before[0] + 2, before[1] + 5]
    session.leave()
