"""Pushes and pulls of one table, over data planes that the test answers itself."""

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pscore.compressors import parse_compressor
from pscore.content import Content
from pscore.contents import FLAT, LONG
from pscore.errors import GradientError, JobMismatchError, ReplacedError, ServerUnavailableError
from pscore.net import wire
from pscore.partition import make_layout
from pscore.pb.ps.v1 import control_pb2, data_pb2
from pscore.placement import WorkerPlacement
from pscore.rules.ssgd import SSGD
from pscore.table_spec import TableSpec
from pscore.types import Origin, Push, Role, TensorSpec, Verdict
from psworker.connection.accounts.pace import Pace
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.membership.session import AgreedTable
from psworker.replica.ports import PullBuffer
from psworker.transports import OutgoingPush, PullCall, RequestFuture

TENSORS = [
    TensorSpec(name="weight", shape=(5000,), dtype="float32"),
    TensorSpec(name="bias", shape=(8,), dtype="float32"),
]
LAYOUT = make_layout(TENSORS, 2)  # Slice 0 on shard 0 has both tensors, slice 1 the weight's end.


class Plane:
    """A data plane that keeps what it is given."""

    shares_memory = False

    def __init__(self) -> None:
        self.pushes: list[OutgoingPush] = []
        self.pulls: list[PullCall] = []
        self.is_holding = False
        self.on_let_go: Callable[[], object] = lambda: None

    def hold(self) -> None:
        self.is_holding = True

    def let_go(self) -> None:
        self.is_holding = False
        self.on_let_go()

    def push(self, push: OutgoingPush) -> None:
        self.pushes.append(push)

    def pull(self, call: PullCall) -> None:
        self.pulls.append(call)


class Session:
    """As much of a session as an exchange needs."""

    def __init__(self) -> None:
        self.job, self.rank, self.incarnation, self.num_workers = "job", 1, 77, 2
        self.lease_s = 10.0
        self.planes = [Plane(), Plane()]
        self.links = [
            SimpleNamespace(
                transport=plane,
                address=f"host:{number}",
                silent_s=0.0,
                waiting_for="",
                control=SimpleNamespace(
                    FetchResidual=lambda request: control_pb2.FetchResidualReply()
                ),
                call=lambda method, request: method(request),
            )
            for number, plane in enumerate(self.planes)
        ]
        self.defined: list[TableSpec] = []
        self.content: Content = FLAT
        self.failure: Exception | None = None
        self.timeline = None
        self.pace = Pace()
        self.waits = ""
        self.residual_senders: dict[int, Any] = {}
        self.pushes: set[Exchange] = set()

    def define(self, spec: TableSpec, **options: Any) -> AgreedTable:
        self.defined.append(spec)
        return AgreedTable(5, Origin(), self.content, is_new=False, has_weights=True)

    def require_own(self) -> None: ...

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


def make(compression: str = "none", num_shards: int = 2) -> tuple[Exchange, Session]:
    session = Session()
    compressor = parse_compressor(compression)
    tensors = [
        TensorSpec(name=t.name, shape=t.shape, dtype=t.dtype, compress=compression != "none")
        for t in TENSORS
    ]
    spec = TableSpec(
        name="model",
        tensors=tuple(tensors),
        num_shards=num_shards,
        rule=SSGD(),
        compressor=compressor,
        optimizer="sgd",
        num_groups=1,
    )
    return Exchange(session, spec), session  # type: ignore[arg-type]


def gradient(index: int, value: float = 1.5) -> torch.Tensor:
    return torch.full((LAYOUT.slices[index].numel,), value)


def a_push(step: int = 0, present: int = -1) -> Push:
    hyper = np.arange(6.0).reshape(1, 6)
    return Push(worker=1, step=step, base_version=step, samples=4.0, present=present, hyper=hyper)


def accept(push: OutgoingPush, verdict: Verdict = Verdict.ACCEPTED) -> None:
    name = data_pb2.Verdict.Name(int(verdict))
    push.done.set_result(data_pb2.PushReply(verdict=name, version=1))


def test_a_push_that_leaves_after_a_return_is_still_one_of_the_former_worker() -> None:
    exchange, session = make()
    exchange.push(0, a_push(), gradient(0), compress=False)
    (outgoing,) = session.planes[0].pushes
    session.rank, session.incarnation = 0, 78  # It comes back before the push has left.
    outgoing.payload()
    header = outgoing.header
    assert (header.sender.worker, header.sender.incarnation) == (1, 77)


def test_a_push_goes_to_the_shard_of_its_slice_with_all_that_travels() -> None:
    exchange, session = make()
    assert session.defined[0].name == "model"
    exchange.push(1, a_push(step=3), gradient(1), compress=True)
    assert session.planes[0].pushes == []
    (outgoing,) = session.planes[1].pushes
    (payload,) = outgoing.payload()
    header = outgoing.header
    sender = header.sender
    assert (sender.job, sender.table, sender.worker, sender.incarnation) == ("job", 5, 1, 77)
    assert (header.slice, header.step, header.base_version, header.samples) == (1, 3, 3, 4.0)
    assert list(header.hyper) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert header.present == b""
    assert header.compressor == ""
    assert np.frombuffer(payload, np.float32).tolist() == [1.5] * LAYOUT.slices[1].numel
    assert exchange.traffic.num_pushes == 1
    assert exchange.traffic.pushed_nbytes == 4 * LAYOUT.slices[1].numel


def test_a_slice_without_any_gradient_travels_without_numbers() -> None:
    exchange, session = make()
    exchange.push(0, a_push(present=0), gradient(0), compress=True)
    (outgoing,) = session.planes[0].pushes
    assert list(outgoing.payload()) == []
    assert outgoing.header.present == b"\x00"


def test_a_compressed_push_names_its_compressor_and_one_in_full_does_not() -> None:
    exchange, session = make("fp16")
    exchange.push(0, a_push(), gradient(0), compress=True)
    exchange.push(1, a_push(), gradient(1), compress=False)
    encoded, plain = (plane.pushes[0] for plane in session.planes)
    (payload,) = encoded.payload()
    assert encoded.header.compressor == "fp16"
    assert payload.nbytes == 2 * LAYOUT.slices[0].numel
    (payload,) = plain.payload()
    assert plain.header.compressor == ""
    assert payload.nbytes == 4 * LAYOUT.slices[1].numel


def test_a_slice_is_pushed_again_only_when_its_last_push_is_acknowledged() -> None:
    exchange, session = make()
    exchange.push(0, a_push(0), gradient(0), compress=True)
    assert exchange.is_busy()
    accept(session.planes[0].pushes[0])
    assert not exchange.is_busy()
    exchange.push(0, a_push(1), gradient(0), compress=True)
    assert len(session.planes[0].pushes) == 2
    accept(session.planes[0].pushes[1], Verdict.TOO_LATE)
    exchange.flush()
    assert exchange.traffic.num_too_late == 1


def test_a_late_push_returns_to_the_residual() -> None:
    exchange, session = make("fp16")
    exchange.push(0, a_push(0), gradient(0, 0.1), compress=True)
    session.planes[0].pushes[0].payload()
    accept(session.planes[0].pushes[0], Verdict.TOO_LATE)
    exchange.flush()
    residual = exchange.compressor_state()["residual"]
    spec = LAYOUT.slices[0]
    np.testing.assert_allclose(residual[spec.start : spec.stop], 0.1, rtol=1e-6)
    assert not residual[spec.stop :].any()


def test_the_compressors_state_is_one_vector_for_any_number_of_shards() -> None:
    exchange, _ = make("fp16")
    assert exchange.compressor_state() == {}
    flat = np.arange(LAYOUT.numel, dtype=np.float32)
    exchange.load_compressor_state({"residual": flat})
    assert np.array_equal(exchange.compressor_state()["residual"], flat)


@pytest.mark.parametrize("compression", ["2bit", "dgc(ratio=0.01)"])
def test_residuals_survive_a_change_of_the_number_of_shards(compression: str) -> None:
    """Each element's residual is as before, wherever the vector is cut."""
    before, session = make(compression)
    grads = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0))
    for spec in LAYOUT.slices:
        before.push(spec.index, a_push(), grads[spec.start : spec.stop], compress=True)
        (outgoing,) = session.planes[spec.shard].pushes
        outgoing.payload()
        accept(outgoing)
    before.flush()
    saved = before.compressor_state()
    assert all(array.any() for array in saved.values())
    after, _ = make(compression, num_shards=1)
    assert len(after.layout.slices) == 1
    after.load_compressor_state(saved)
    found = after.compressor_state()
    assert found.keys() == saved.keys()
    for name, array in saved.items():
        assert np.array_equal(found[name], array)


def pull_buffer(index: int, with_state: bool) -> PullBuffer:
    numel = LAYOUT.slices[index].numel
    state = [torch.zeros(numel)] if with_state else []
    return PullBuffer(weights=torch.zeros(numel), state=state)


def test_a_pull_has_landed_when_it_has_been_waited_for() -> None:
    exchange, session = make()
    wanted = pull_buffer(1, with_state=True)
    exchange.pull(1, 4, 3, wanted, with_state=True)
    (call,) = session.planes[1].pulls
    header = call.header
    assert (header.slice, header.clock, header.min_version, header.with_state) == (1, 4, 3, True)
    assert not exchange.has_landed(1)
    assert exchange.has_landed(0)
    call.weights[:] = 2.0
    call.state[0][:] = 3.0
    call.done.set_result(data_pb2.PullReply(ready=True, version=6, counts=[9], clock=4))
    assert exchange.has_landed(1)
    assert wanted.version == -1
    exchange.run([1])
    assert (wanted.version, wanted.clock) == (6, 4)
    assert wanted.counts is not None
    assert wanted.counts.tolist() == [9]
    assert (wanted.weights[0].item(), wanted.state[0][0].item()) == (2.0, 3.0)
    assert exchange.traffic.num_pulls == 1
    assert exchange.traffic.pulled_nbytes == 2 * 4 * LAYOUT.slices[1].numel


def test_the_next_slice_is_one_that_has_landed_and_else_the_first_to_land() -> None:
    exchange, session = make()
    for index in (0, 1):
        exchange.pull(index, 1, 1, pull_buffer(index, with_state=False), with_state=False)
    calls = [session.planes[LAYOUT.slices[index].shard].pulls[0] for index in (0, 1)]
    late = threading.Timer(0.05, calls[1].done.set_result, [data_pb2.PullReply(ready=True)])
    late.start()
    assert exchange.next_landed([0, 1]) == 1
    late.join()
    assert exchange.next_landed([0, 1]) == 1
    exchange.push(1, a_push(), gradient(1), compress=True)
    session.planes[LAYOUT.slices[1].shard].pushes[0].done.set_exception(
        ServerUnavailableError("no shard answers")
    )
    with pytest.raises(ServerUnavailableError, match="no shard answers"):
        exchange.next_landed([0])


@pytest.mark.parametrize(("lease_s", "is_said"), [(10.0, True), (30.0, False)])
def test_a_shard_is_silent_after_two_heartbeats_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, lease_s: float, is_said: bool
) -> None:
    """A heartbeat is due in each fifth of a lease, so 6 s are nothing in one of 30 s."""
    exchange, session = make()
    session.lease_s, session.links[0].silent_s = lease_s, 6.0
    exchange.pull(0, 0, 0, pull_buffer(0, with_state=False), with_state=False)
    answer = session.planes[0].pulls[0].done
    said = []

    def wait(timeout: float | None = None) -> data_pb2.PullReply:
        said.append(session.waits)
        if len(said) == 1:
            raise TimeoutError
        return data_pb2.PullReply(ready=True)

    monkeypatch.setattr(answer, "result", wait)
    exchange.run([0])
    assert ("has not answered for 6 s" in said[1]) == is_said


def test_a_refusal_is_raised_at_the_wait_for_its_request() -> None:
    exchange, session = make()
    exchange.pull(0, 0, 0, pull_buffer(0, with_state=False), with_state=False)
    exchange.push(0, a_push(), gradient(0), compress=True)
    session.planes[0].pulls[0].done.set_exception(ServerUnavailableError("no shard answers"))
    session.planes[0].pushes[0].done.set_exception(ServerUnavailableError("nor now"))
    with pytest.raises(ServerUnavailableError, match="no shard answers"):
        exchange.run([0])
    with pytest.raises(ServerUnavailableError, match="nor now"):
        exchange.flush()


def test_initial_weights_travel_with_their_role_and_counts() -> None:
    exchange, session = make()
    arrays = [np.full(LAYOUT.slices[0].numel, value, np.float32) for value in (1.0, 2.0)]
    exchange.load(0, Role.STATE, arrays, [3, 4])
    (outgoing,) = session.planes[0].pushes
    assert outgoing.header.role == int(Role.STATE)
    assert list(outgoing.header.counts) == [3, 4]
    assert [np.frombuffer(part, np.float32)[0] for part in outgoing.payload()] == [1.0, 2.0]


class Slow(RequestFuture[Any]):
    """A future that is not done for some calls of `result`."""

    def __init__(self, value: Any, times: int) -> None:
        super().__init__()
        self._left = times
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        self._left -= 1
        if self._left >= 0:
            raise TimeoutError
        return self._value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that advances by a second at each reading."""
    seconds = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr("psworker.connection.exchange.answer_wait.time", clock)
    return iter([None])


@pytest.mark.usefixtures("clock")
def test_a_wait_is_told_within_ten_seconds_and_then_less_and_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange, _ = make()
    exchange.push(1, a_push(), gradient(1), compress=True)
    reply = data_pb2.PushReply(verdict=data_pb2.Verdict.Name(0))
    exchange._pushes[1] = Slow(reply, times=40)
    with caplog.at_level(logging.WARNING, "paceline"):
        exchange.flush()
    room = "room for step 0 of slice 1 of 'model' from shard 1 at host:1, which waits for others"
    assert [record.message for record in caplog.records] == [
        f"worker 1 has waited {waited} s for {room}" for waited in (7, 14, 28)
    ]


@pytest.mark.usefixtures("clock")
def test_a_shard_that_does_not_answer_is_told_of_and_the_session_knows_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange, session = make()
    exchange.pull(1, 3, 3, pull_buffer(1, with_state=False), with_state=False)
    exchange._pulls[1][0].done = Slow(data_pb2.PullReply(version=3), times=8)
    session.links[1].silent_s = 6.0
    told: list[str] = []
    session.check = lambda: told.append(session.waits)  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "paceline"):
        exchange.run([1])
    what = (
        "the weights after step 2 of slice 1 of 'model' from shard 1 at host:1, which has not "
        "answered for 6 s"
    )
    assert [record.message for record in caplog.records] == [f"worker 1 has waited 7 s for {what}"]
    assert told[-1] == what
    assert session.waits == ""


def test_a_worker_that_is_no_longer_counted_in_stops_waiting() -> None:
    exchange, session = make()
    exchange.pull(0, 0, 0, pull_buffer(0, with_state=False), with_state=False)
    session.failure = ReplacedError("rank 1 is now process 9")
    exchange._pulls[0][0].done = Slow(None, times=3)
    with pytest.raises(ReplacedError, match="rank 1 is now process 9"):
        exchange.run([0])


def test_a_push_that_cannot_leave_ends_the_wait_for_what_needs_it() -> None:
    """A gradient that is no number is found on its way out, when a pull is waited for already."""
    exchange, session = make()
    exchange.push(1, a_push(), gradient(1), compress=True)
    exchange.pull(0, 1, 1, pull_buffer(0, with_state=False), with_state=False)
    exchange._pulls[0][0].done = Slow(None, times=3)
    session.planes[1].pushes[0].done.set_exception(GradientError("gradient of 'weight' holds NaN"))
    with pytest.raises(GradientError, match="gradient of 'weight' holds NaN"):
        exchange.run([0])


def test_weights_that_changed_before_they_were_fetched_are_asked_for_again() -> None:
    exchange, session = make()
    target = pull_buffer(0, with_state=False)
    target.copy_on_wait = True
    exchange.pull(0, 1, 1, target, with_state=False)
    (call,) = session.planes[0].pulls
    assert call.copy_on_wait

    def answer(version: int, *, is_whole: bool) -> None:
        def fetch() -> bool:
            call.weights[:] = version
            if not is_whole:
                session.planes[0].pull = again  # type: ignore[method-assign]
            return is_whole

        call.fetch = fetch
        call.done.set_result(data_pb2.PullReply(ready=True, version=version))

    def again(call: PullCall) -> None:
        assert call.fetch is None
        answer(2, is_whole=True)

    answer(1, is_whole=False)
    exchange.run([0])
    assert (target.version, exchange.traffic.num_pulls) == (2, 1)
    assert target.weights.tolist() == [2.0] * LAYOUT.slices[0].numel


def test_a_worker_that_returns_with_another_rank_draws_as_that_rank() -> None:
    drawn = []
    for rank in (1, 0):
        exchange, session = make("randomk(ratio=0.25)")
        session.rank = rank
        exchange.restart()
        exchange.push(1, a_push(step=3), gradient(1), compress=True)
        payload = session.planes[1].pushes[-1].payload()
        drawn.append(b"".join(bytes(part) for part in payload))
    assert drawn[0] != drawn[1]


def test_a_restart_forgets_what_was_under_way_and_declares_again() -> None:
    exchange, session = make()
    exchange.push(0, a_push(), gradient(0), compress=True)
    exchange.pull(0, 0, 0, pull_buffer(0, with_state=False), with_state=False)
    exchange.restart()
    exchange.flush()
    assert exchange.has_landed(0)
    assert len(session.defined) == 2
    session.content = LONG
    with pytest.raises(JobMismatchError, match="start this worker again"):
        exchange.restart()


@pytest.mark.parametrize("compression", ["2bit", "none"])
def test_a_gradient_that_turns_out_to_be_no_number_is_pushed_as_absent_and_told_once(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, whose gradient is looked at when it has arrived: the step still ends."""
    monkeypatch.setattr("psworker.connection.exchange.payloads.is_on_device", lambda _: True)
    exchange, session = make(compression)
    shared = SimpleNamespace(array=np.zeros(LAYOUT.numel, np.float32), holds=lambda *_: True)
    monkeypatch.setattr(exchange.payloads, "_shared", shared)
    push = a_push()._replace(may_wait=True)
    exchange.push(0, push, gradient(0, float("nan")), compress=True)
    (outgoing,) = session.planes[0].pushes
    header, is_shared = outgoing.header, compression == "none"
    assert outgoing.waits
    assert (header.shared, header.may_wait) == (is_shared, True)
    assert header.compressor == ("" if is_shared else "2bit")
    assert list(outgoing.payload()) == []
    assert wire.unpack_bits(header.present, len(exchange.layout.slices[0].segments)) == 0
    assert header.compressor == ""
    assert not header.shared
    assert not header.may_wait
    assert exchange.traffic.num_pushes == 0
    with pytest.raises(GradientError, match="NaN"):
        exchange.payloads.raise_refused()
    exchange.payloads.raise_refused()


def test_a_gradient_without_room_is_refused_before_anything_is_sent() -> None:
    exchange, session = make("2bit", num_shards=1)
    grads = [torch.full((spec.numel,), 3e38) for spec in exchange.layout.slices]
    numel = exchange.layout.numel
    exchange.load_compressor_state({"residual": np.full(numel, 3e38, np.float32)})
    with pytest.raises(GradientError, match="beyond float32"):
        exchange.payloads.require_room(dict(enumerate(grads)), lambda index: -1)
    with pytest.raises(GradientError, match="beyond float32"):
        exchange.push(0, a_push(), grads[0], compress=True)
    assert not session.planes[0].pushes
    assert (exchange.compressor_state()["residual"] == np.float32(3e38)).all()
    # Without a gradient there is nothing to add.
    exchange.payloads.require_room(dict(enumerate(grads)), lambda index: 0)
    exchange.push(0, a_push(), -grads[0], compress=True)
    assert len(session.planes[0].pushes) == 1


def test_pushes_and_pulls_that_are_together_leave_together() -> None:
    exchange, session = make()
    with exchange.together:
        assert not any(plane.is_holding for plane in session.planes)
        exchange.push(1, a_push(), gradient(1), compress=True)
        exchange.pull(1, 1, 1, pull_buffer(1, with_state=False), with_state=False)
        assert [plane.is_holding for plane in session.planes] == [False, True]
    assert not session.planes[1].is_holding
    exchange.pull(0, 1, 1, pull_buffer(0, with_state=False), with_state=False)
    assert not session.planes[0].is_holding


def test_a_wait_sends_what_is_held() -> None:
    exchange, session = make()

    def answer() -> None:
        session.planes[1].pulls[0].done.set_result(data_pb2.PullReply(version=1))

    session.planes[1].on_let_go = answer
    with exchange.together:
        exchange.pull(1, 1, 1, pull_buffer(1, with_state=False), with_state=False)
        exchange.run([1])
        session.planes[1].on_let_go = lambda: None
        exchange.push(1, a_push(), gradient(1), compress=True)
        assert session.planes[1].is_holding


def test_gradients_that_are_many_bytes_leave_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "psworker.connection.exchange.together.WORKER",
        WorkerPlacement(together_nbytes_max=gradient(0).nbytes),
    )
    exchange, session = make()
    with exchange.together:
        exchange.push(0, a_push(), gradient(0), compress=True)
        assert session.planes[0].is_holding
        exchange.push(1, a_push(), gradient(1), compress=True)
        assert [plane.is_holding for plane in session.planes] == [False, True]
