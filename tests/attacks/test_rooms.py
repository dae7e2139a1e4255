"""Rows, published weights, checkpoints and moves are sent anything: no death, no wrong numbers.

Frames and messages are true ones, of which some bytes or fields have other values. The peer may
hold every token: it is refused with a reason, or answered, and the shard continues.
"""

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pscore.errors import PacelineError
from pscore.net import wire
from pscore.net.connection import Connection
from pscore.net.credentials import ANYONE
from pscore.partition import fingerprint
from pscore.pb.ps.v1 import checkpoint_pb2, data_pb2, publish_pb2, standby_pb2
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.publish import codec
from pscore.publish.codec import round_to_bf16
from pscore.rows.payload import encode_pull, encode_push
from pscore.rows.spec import RowTable
from pscore.subscription import reader
from pscore.subscription.assembly import Fetch, WatchFor
from pscore.subscription.reader import Reader
from pscore.types import ByteArray
from psserver.decisions.shard import TABLES_MAX
from psserver.engine.placement import Placement
from psserver.publish.publications import Publications
from psserver.publish.relayed import RelayedVersions
from psserver.rows.store import RowStore
from psserver.service.checkpoint_service import Checkpointer
from psserver.service.data_socket import DataService
from psserver.service.last_checkpoint import LastCheckpoint
from psserver.service.publications import PublicationsServicer
from psserver.service.standby_service import StandbyServicer
from psserver.standby.mover import Mover, described
from psserver.standby.pieces import ArrivingJournals
from tests.attacks.target import Stream, envelope, mutated, resealed
from tests.row_driver import row_spec
from tests.unit.psserver.front import (
    JOB,
    NUMEL,
    Context,
    Front,
    Refused,
    Refusing,
    grad,
    play,
    played,
    pull_header,
    push_header,
    sender,
)

TABLES = {
    "plain": RowTable(seed=1, init="uniform(1)"),
    "counted": RowTable(seed=2, init="zeros", min_count=2, ttl=3, lru=1 << 14),
    "bounded": RowTable(seed=3, max_rows=64),
}
DIM = 2
IDS = np.arange(1, 9, dtype=np.uint64)
HYPER = [1.0, 0.0, 1e-10, 0.0, 0.0]  # Of Adagrad on rows.
U64 = (1 << 64) - 1
SERVICES: dict[str, Any] = {
    "Control": pb,
    "Checkpoints": checkpoint_pb2,
    "Publications": publish_pb2,
    "Standby": standby_pb2,
}
ENDING = ("Drain", "Forget", "Leave", "Move")  # Methods that are meant to end something.
# Values of fields with which a message reaches what it is for.
TRUE: Mapping[str, Sequence[Any]] = {
    "job": [JOB],
    "worker": [0],
    "incarnation": [100],
    "table": ["plain", "model", 0, 1, 4],
    "id": ["m", "a"],
    "version": [-1, 0, 1],
    "array": ["rows.0", "ids.0", "weights"],
    "nbytes": [8, 100],
    "num_workers": [1],
    "protocol": [wire.PROTOCOL],
    "name": ["a"],
    "every": [1, 2],
}
TEXTS = [
    *("", "x" * 300, "../../etc/passwd", "\0", "\n\x1b[31m", "model", "other", "1-a/arena"),
    *("{}", "[]", "{", "null", '"x"', "[" * 100_000, '{"a":' * 100_000, '{"0": [Infinity]}'),
]
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 1.5, float("inf"), float("nan"), 10**30, 1 << 63, 1 << 31),
    *("", "x", [], {}, [[]], {"a": 1}, [1, 2, 3]),
]


class Rooms:
    """A shard with a published model and three tables of rows; made inside an event loop."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.publications = Publications(front.engine, {JOB: 1})
        self.service = DataService(front.engine, fetches=self.publications)

    async def prepare(self) -> None:
        """Makes a job of one worker with the tables."""
        await self.front.ready(1)
        for name in TABLES:
            request = pb.DefineRequest(job=JOB, worker=0, incarnation=100, table=declared(name))
            await self.front.control.Define(request, Context())
        for index in range(1, 1 + len(TABLES)):
            first = push_header(0, 0, sender=sender(0, table=index), role=1, hyper=[])
            self.send(envelope(data_pb2.Envelope(id=1, push=first)))

    def send(self, data: bytes) -> bytes:
        """Sends anything on a connection of its own; returns the answers."""
        with Stream(data) as stream:
            Connection(stream, self.service).serve()
            answered = stream.answered
        assert not self.front.problems, self.front.problems
        return answered

    def ask(self, message: data_pb2.Envelope, payload: bytes = b"") -> tuple[str, memoryview]:
        """Returns the kind of an answer, or of a refusal, and its payload."""
        answered = self.send(envelope(message, payload))
        return kind_of(answered), wire.decode(answered)[1] if answered else memoryview(b"")

    def stores(self) -> list[RowStore]:
        """Returns the stores of the tables of rows."""
        tables = self.front.running.tables.values()
        found = [queue.store for table in tables for queue in table.queues.values()]
        return [store for store in found if isinstance(store, RowStore)]

    def steps(self, table: int) -> int:
        """Returns the next step of the worker in a table."""
        return self.front.job.table(table).clock(0).clock(0)

    def still_serves(self) -> None:
        """All rows are answered, and the invariants hold."""
        for index, store in enumerate(self.stores(), 1):
            pull = pull_header(0, 0, 0, sender=sender(0, table=index), look=True)
            message = data_pb2.Envelope(id=1, pull=pull)
            kind, payload = self.ask(message, b"".join(encode_pull([IDS])))
            assert (kind, payload.nbytes) == ("pulled", 4 * DIM * len(IDS))
            store.check_invariants()

    def frames(self) -> list[tuple[data_pb2.Envelope, bytes]]:
        """Returns the messages that a worker and a reader would send now."""
        found = []
        for table in range(1, 1 + len(TABLES)):
            step, owner = self.steps(table), sender(0, table=table)
            found.append(row_push(step, table, [1 + (7 * step + i) % 40 for i in range(6)]))
            state, payload = row_push(0, table, [1, 2])
            state.push.role = data_pb2.ROLE_STATE
            state.push.ClearField("hyper")
            found.append((state, payload))
            for since in (-1, 0, max(0, step - 1)):
                pull = pull_header(0, step, 0, sender=owner, look=since == 0)
                wanted = b"".join(encode_pull([IDS], since))
                found.append((data_pb2.Envelope(id=3, pull=pull), wanted))
        push = push_header(0, self.steps(0))
        found.append((data_pb2.Envelope(id=4, push=push), grad(1.0).tobytes()))
        fetch = data_pb2.FetchHeader(job=JOB, table="model", reader=5)
        (published,) = [one for _, name, one in self.publications.listed() if name == "model"]
        newest, fetch.lineage = published.publication.newest, published.publication.lineage
        if newest is not None:
            fetch.target = newest.number
            fetch.slices.add(slice=0, number=newest.number - 1, fingerprint=newest.fingerprint)
        return [*found, (data_pb2.Envelope(id=5, fetch=fetch), b"")]


def declared(name: str) -> pb.Table:
    table = row_spec((name, 0, DIM, TABLES[name]), optimizer="adagrad").to_proto()
    table.name = name
    return table


def row_push(step: int, table: int, ids: Sequence[int]) -> tuple[data_pb2.Envelope, bytes]:
    owner = sender(0, table=table)
    header = push_header(0, step, sender=owner, present=b"\1", hyper=HYPER)
    values, times = np.ones((len(ids), DIM), np.float32), np.ones(len(ids), np.uint16)
    payload = encode_push([np.array(sorted(set(ids)), np.uint64)], [values], [times])
    return data_pb2.Envelope(id=2, push=header), b"".join(payload)


def kind_of(answered: bytes) -> str:
    """Returns the kind of an answer, or the error's name; the connection may be cut instead."""
    if not answered:
        return "none"
    answer = data_pb2.Envelope.FromString(bytes(wire.decode(answered)[0]))
    kind = answer.WhichOneof("body") or ""
    return answer.failed.kind if kind == "failed" else kind


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slices are stepped by the thread that receives."""
    monkeypatch.setattr(Front, "placement", Placement(inline_numel_max=1 << 40))


# ----- other values


def hostile(field: FieldDescriptor, rng: random.Random, value: Any) -> Any:
    """Returns another value of a field, as often an extreme one as a near one."""
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        is_text = field.type != field.TYPE_BYTES
        return rng.choice([*TEXTS, value] if is_text else [b"", bytes(9), rng.randbytes(70)])
    if kind == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return rng.choice([0.0, 1.0, -1.0, float("nan"), float("inf"), 1e300, 5e-324])
    if kind == field.CPPTYPE_ENUM:
        return rng.choice([0, 1, 2, 3, 4, 5, 6, 99, -1])
    bits = 64 if kind in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
    low, high = 0, (1 << bits) - 1
    if kind in (field.CPPTYPE_INT64, field.CPPTYPE_INT32):
        low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    found = rng.choice([0, 1, 2, 3, value - 1, value + 1, low, high, rng.randint(low, high)])
    return min(max(found, low), high)


def change(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Gives some fields other values, adds some and leaves some out."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for field in rng.sample(fields, min(len(fields), rng.choice([0, 1, 1, 2, 3]))):
        whole: Any = getattr(message, field.name)
        is_map, is_list = (isinstance(whole, one) for one in (MutableMapping, MutableSequence))
        if is_map or is_list:
            if field.message_type is None:
                default = "" if field.cpp_type == field.CPPTYPE_STRING else 0
                whole.extend([hostile(field, rng, default)] * rng.choice([1, 2, 1000]))
            elif is_list and depth < 3:
                change(rng.choice([*whole, whole.add()]), rng, depth + 1)
            if is_list and len(whole) and rng.random() < 0.3:
                del whole[rng.randrange(len(whole)) :]
        elif field.message_type is None:
            setattr(message, field.name, hostile(field, rng, whole))
        elif depth < 3 and (message.HasField(field.name) or rng.random() < 0.2):
            change(whole, rng, depth + 1)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Returns a payload with some words or bytes changed."""
    if not data or rng.random() < 0.3:
        return mutated(data, rng)
    whole = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = 8 * rng.randrange(max(1, len(whole) // 8))
        word = rng.choice([0, 1, 2, U64, 1 << 63, 1 << 31, rng.getrandbits(64), rng.randrange(64)])
        whole[at : at + 8] = word.to_bytes(8, "little")
    return bytes(whole)


def rewritten(text: str, rng: random.Random) -> str:
    """Returns a JSON document with another value at a random place."""
    whole = json.loads(text)
    *path, last = rng.choice([*paths_of(whole)])
    at = whole
    for key in path:
        at = at[key]
    at[last] = rng.choice(VALUES)
    return json.dumps(whole)


def paths_of(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries: Any = node.items() if isinstance(node, dict) else ()
    for key, value in enumerate(node) if isinstance(node, list) else entries:
        yield (*path, key)
        yield from paths_of(value, (*path, key))


# ----- frames


def play_frames(seed: int, number: int) -> Counter[str]:
    """Sends damaged frames of every room to a shard; returns what became of them."""

    async def scene(front: Front) -> Counter[str]:
        rooms, rng = Rooms(front), random.Random(seed)
        await rooms.prepare()
        known, outcomes = rooms.frames(), Counter[str]()
        for turn in range(number):
            if turn % 50 == 0:
                known = rooms.frames()
            message, payload = rng.choice(known)
            sent = data_pb2.Envelope()
            sent.CopyFrom(message)
            what = rng.random()
            if what < 0.4:
                change(getattr(sent, str(sent.WhichOneof("body"))), rng)
            if what > 0.3:
                payload = damaged(payload, rng) if rng.random() < 0.8 else payload
            data = envelope(sent, payload)
            answered = rooms.send(resealed(mutated(data, rng), rng) if what > 0.95 else data)
            outcomes[kind_of(answered)] += 1
        rooms.still_serves()
        return outcomes

    return play(scene)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # Rates of 1e300.
def test_damaged_frames_of_rows_and_readers_end_nothing(seed: int) -> None:
    seen = play_frames(seed, 1000)
    assert {"pushed", "pulled", "fetched", "DecodeError"} <= set(seen), seen


@played
async def test_refused_pushes_of_rows_hold_no_room(front: Front) -> None:
    """Their steps fall, so none of them is older than the one that came last."""
    rooms = Rooms(front)
    await rooms.prepare()
    seen = Counter[str]()
    for step in range(3000, 2500, -1):
        seen[rooms.ask(*row_push(step, 3, [step]))[0]] += 1
    assert seen["RemoteProtocolError"] > 300
    assert seen["TableFullError"] == 0, seen
    rooms.still_serves()


@played
async def test_a_push_whose_pull_begins_at_an_impossible_step_is_refused_whole(
    front: Front,
) -> None:
    rooms = Rooms(front)
    await rooms.prepare()
    push = push_header(0, 0)
    push.pull.begins, push.pull.clock = True, 1 << 49
    both = data_pb2.Envelope(id=1, push=push)
    assert rooms.ask(both, grad(1.0).tobytes())[0] == "DecodeError"
    assert (front.version(), rooms.steps(0)) == (0, 0)


@played
async def test_a_state_with_an_impossible_count_of_steps_is_refused(front: Front) -> None:
    rooms = Rooms(front)
    await rooms.prepare()
    for count in (-1, (1 << 63) - 1):
        message, payload = row_push(0, 1, [1])
        message.push.role = data_pb2.ROLE_STATE
        message.push.ClearField("hyper")
        message.push.counts.append(count)
        assert rooms.ask(message, payload)[0] == "DecodeError"


# ----- messages


class Caller:
    """Calls the methods of all services of a shard."""

    def __init__(self, rooms: Rooms, folder: Path, rng: random.Random) -> None:
        self.rng, self.mark = rng, '{"0": [1, 1]}'
        host: Any = SimpleNamespace(offer=self.own)
        mover, incoming = Mover(None, host, lambda: ANYONE), ArrivingJournals(folder / "journals")
        engine = rooms.front.engine
        standby = StandbyServicer(
            engine, mover, incoming, self.own, lambda: True, lambda reason: None
        )
        self.services: dict[str, Any] = {
            "Control": rooms.front.control,
            "Checkpoints": Refusing(Checkpointer(engine, LastCheckpoint())),
            "Publications": Refusing(
                PublicationsServicer(engine, rooms.publications, lambda reply: None)
            ),
            "Standby": Refusing(standby),
        }
        spec = row_spec(("plain", 0, DIM, TABLES["plain"])).to_json()
        self.declaration = json.dumps(spec)
        about = {"spec": spec, "version": 1, "clock": 1, "counts": [1], "rows": [[1]]}
        self.about = json.dumps(about)

    @staticmethod
    def own() -> standby_pb2.OfferRequest:
        return described(0, 1, "cluster")

    def draw(self, service: str, method: MethodDescriptor) -> Any:
        """Returns a message as a peer would send it, and with other values in most cases."""
        rng, fields = self.rng, method.input_type.fields_by_name
        request: Any = GetMessageClass(method.input_type)()
        for name in TRUE.keys() & fields.keys():
            is_text = fields[name].cpp_type == FieldDescriptor.CPPTYPE_STRING
            values = [each for each in TRUE[name] if isinstance(each, str) == is_text]
            if values and fields[name].message_type is None:
                setattr(request, name, rng.choice(values))
        if method.name == "Meet":
            request.peer.incarnation, request.table = 100, 4
        if method.name == "Capture":
            request.base = rng.choice(["", self.mark, rewritten(self.mark, rng)])
        elif method.name == "Prepare" and service == "Checkpoints":
            request.tables.append(rng.choice([self.about, rewritten(self.about, rng), *TEXTS]))
        elif method.name == "Offer":
            request.CopyFrom(self.own())
            request.id = "m"
            request.tables.append(rng.choice([rewritten(self.declaration, rng), *TEXTS]))
        elif method.name == "Define":
            request.table.CopyFrom(declared("plain"))
            request.table.name = rng.choice(["plain", "new"])
            content = request.table.content
            content.arguments = rewritten(content.arguments, rng)
        if rng.random() < 0.8:
            change(request, rng)
        return request

    async def call(self) -> str:
        """Calls a method; returns the name of the refusal, or an empty text.

        Any other exception ends a shard (psserver/service/refusals.py).
        """
        service = self.rng.choice(list(SERVICES))
        methods = SERVICES[service].DESCRIPTOR.services_by_name[service].methods
        method = self.rng.choice([each for each in methods if each.name not in ENDING])
        request = self.draw(service, method)
        if "wait_ms" in method.input_type.fields_by_name:
            request.wait_ms = 0
        for piece in request.pieces if method.name == "Put" else ():
            piece.reserved = min(piece.reserved, 1 << 20)  # Of the disk of this machine.
        try:
            reply = await getattr(self.services[service], method.name)(request, Context())
        except Refused as refusal:
            return refusal.kind
        if method.name == "Capture" and reply.about and request.table == "plain":
            slices = json.loads(reply.about)["slices"]
            self.mark = json.dumps({index: one["mark"] for index, one in slices.items()})
        return ""


def play_messages(seed: int, number: int, folder: Path) -> Counter[str]:
    """Calls methods of a shard with other values; returns what became of the calls."""

    async def scene(front: Front) -> Counter[str]:
        rooms = Rooms(front)
        await rooms.prepare()
        mixed: dict[str, Any] = {"rule": pb.Plugin(name="dpsgd"), "optimizer": "assign"}
        await front.define(name="mixed", **mixed)
        rooms.ask(*row_push(0, 1, [1, 2]))
        caller, outcomes = Caller(rooms, folder, random.Random(seed)), Counter[str]()
        for turn in range(number):
            outcomes[await caller.call()] += 1
            assert not front.problems, front.problems
            if turn % 20:
                continue
            with contextlib.suppress(Refused):  # Another one may have joined in its place.
                beat = pb.HeartbeatRequest(job=JOB, worker=0, incarnation=100)
                await front.control.Heartbeat(beat, Context())
                await front.join(0, 1)
        assert outcomes[""] > number / 10
        return outcomes

    return play(scene)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_messages_with_other_values_end_no_shard(seed: int, tmp_path: Path) -> None:
    seen = play_messages(seed, 2000, tmp_path)
    assert {"RemoteProtocolError", "ConfigError", "UnknownJobError", "ReplacedError"} <= set(seen)


HOSTILE = {
    "an infinite mark": (
        "Checkpoints", checkpoint_pb2.CaptureRequest(
            id="a", job=JOB, table="plain", version=-1, base='{"0": [Infinity]}'
        ),
    ),
    "a deep table": (
        "Checkpoints", checkpoint_pb2.PrepareRequest(id="a", num_workers=1, tables=["[" * 100_000]),
    ),
    "a late round": (
        "Control", pb.BarrierRequest(job=JOB, worker=0, incarnation=100, name="a", round=U64),
    ),
    "a late epoch": (
        "Control", pb.MeetRequest(
            job=JOB, table=1, epoch=U64, peer=pb.Peer(rank=0, incarnation=100)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("service", "request_"), HOSTILE.values(), ids=HOSTILE.keys())
@played
async def test_a_message_that_once_ended_a_shard_is_refused(
    front: Front, service: str, request_: Any, tmp_path: Path
) -> None:
    """The last one did at the next join: the round behind it does not fit into an answer."""
    rooms = Rooms(front)
    await rooms.prepare()
    services = Caller(rooms, tmp_path, random.Random(0)).services
    method = type(request_).__name__.removesuffix("Request")
    with pytest.raises(Refused, match="RemoteProtocolError"):
        await getattr(services[service], method)(request_, Context())
    await front.join(0, 1)


@played
async def test_a_worker_reports_of_as_many_tables_as_a_job_may_have(front: Front) -> None:
    await front.join(0, 1)
    many = [pb.PeerReport()] * (2 * TABLES_MAX)
    beat = pb.HeartbeatRequest(job=JOB, worker=0, incarnation=100, peers=many)
    await front.control.Heartbeat(beat, Context())
    status = await front.control.Status(pb.StatusRequest(), Context())
    assert len(status.jobs[0].workers[0].peers) == TABLES_MAX


# ----- answers to readers


class Line:
    """A reader's connection to a shard; half of the answers are damaged."""

    trouble = ""

    def __init__(self, rooms: Rooms, rng: random.Random) -> None:
        self.rooms, self.rng = rooms, rng

    def close(self, reader: publish_pb2.Reader) -> None:
        """Ends nothing."""

    def watch(
        self,
        ask: WatchFor,
        wait_s: float,
        known: str,
        reader: publish_pb2.Reader,
        end_s: float | None,
    ) -> publish_pb2.WatchReply:
        view = self.rooms.publications.watch(JOB, "model")
        assert view.spec is not None
        reply = publish_pb2.WatchReply(lineage=view.lineage, newest=view.newest, every=1)
        if known != fingerprint(view.spec.tensors, view.spec.num_shards):
            reply.table.CopyFrom(view.spec.to_proto())
        return reply

    def fetch(
        self, ask: Fetch, reader: int, end_s: float | None
    ) -> tuple[data_pb2.FetchReply, ByteArray]:
        header = data_pb2.FetchHeader(
            job=JOB, table="model", lineage=ask.lineage, target=ask.target
        )
        for index, number, known in ask.held:
            header.slices.add(slice=index, number=number, fingerprint=known)
        reply, arrays = self.rooms.publications.fetch(header)
        payload = b"".join(array.tobytes() for array in arrays)
        what = self.rng.random()
        if what < 0.25:
            numbers = [entry.number for entry in reply.slices]
            change(reply, self.rng)
            for entry, number in zip(reply.slices, numbers, strict=False):
                entry.number = number  # Nothing says that it is another version's.
        elif what < 0.5:
            payload = damaged(payload, self.rng)
        return reply, np.frombuffer(payload, np.uint8)


def require_true(
    relay: RelayedVersions, lineage: int, held: int, truth: Mapping[int, codec.BitArray]
) -> None:
    """Compares the deltas that lead on from a version, as a relay passes them on."""
    table = relay.shards[0].table
    known = codec.fingerprint(truth[held])
    found = None if table is None else table.find(0, lineage, held + 1, held, known)
    if found is not None and found.whole is None:
        bits = truth[held].copy()
        for delta in found.deltas:
            codec.apply(delta, bits)
        assert np.array_equal(bits, truth[found.version.number])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@played
async def test_a_reader_and_a_relay_never_show_wrong_weights(
    front: Front, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have versions of the shard, to the bit; so has a reader of the relay."""
    rooms, rng = Rooms(front), random.Random(seed)
    truth: dict[int, codec.BitArray] = {}
    await rooms.prepare()
    monkeypatch.setattr(reader, "ReaderLine", lambda **_: Line(rooms, rng))
    relay = RelayedVersions(JOB, "model", 1, lambda: 0.0)
    readers = [Reader("127.0.0.1:1", job=JOB, follower=each) for each in (None, relay)]
    num_read = 0
    for _ in range(200):
        push = data_pb2.Envelope(id=1, push=push_header(0, rooms.steps(0)))
        moved = np.array([rng.gauss(0, 1) for _ in range(NUMEL)], np.float32)
        rooms.ask(push, moved.tobytes())
        view = rooms.publications.watch(JOB, "model")
        truth[view.newest] = round_to_bf16(front.weights())
        for each in readers:
            with contextlib.suppress(TimeoutError, PacelineError):
                weights = each.wait(timeout_s=0.05)
                assert np.array_equal(weights.bits, truth[weights.version.number])
                num_read += 1
        for held in [number for number in truth if number > view.newest - 5]:
            require_true(relay, view.lineage, held, truth)
    assert num_read > 100
