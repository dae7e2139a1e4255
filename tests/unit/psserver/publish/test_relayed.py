"""The published table of a relay."""

import threading

import numpy as np
import pytest

from pscore.compressors.none import NoCompression
from pscore.net.shared_rate import SharedRate
from pscore.pb.ps.v1 import data_pb2
from pscore.publish import codec
from pscore.rules.ssgd import SSGD
from pscore.subscription.assembly import WeightsVersion
from pscore.subscription.reader import Source
from pscore.subscription.weights import PublishedWeights
from pscore.table_spec import TableSpec
from pscore.types import TensorSpec
from psserver.publish.relayed import RelayedTable, RelayedVersions, RelayShard
from psserver.publish.ring import PublishedVersion, VersionRing
from psserver.publish.tables import ReaderState

SPEC = TableSpec(
    name="model",
    tensors=(TensorSpec(name="w", shape=(5000,), dtype="float32"),),
    num_shards=2,
    rule=SSGD(),
    compressor=NoCompression(),
    optimizer="sgd",
    num_groups=1,
)
LAYOUT = SPEC.layout()
KEY = ("night", "model")


class Upstream:
    """Two shards, and the reader of a relay that fetches from them."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.weights = self.rng.standard_normal(LAYOUT.numel).astype(np.float32)
        self.rings = {part.index: VersionRing() for part in LAYOUT.slices}
        self.held = {part.index: (-1, 0) for part in LAYOUT.slices}
        self.lineages = [7, 7]
        self.now_s = 0.0
        self.relay = RelayedVersions(*KEY, 2, lambda: self.now_s)

    def publish(self, number: int, num_changed: int = 20) -> None:
        self.weights[self.rng.integers(0, LAYOUT.numel, num_changed)] += 1.0
        for part in LAYOUT.slices:
            lineage = self.lineages[part.shard]
            mine = self.weights[part.start : part.stop]
            self.rings[part.index].publish(lineage, number, 2 * number, mine)

    def fetch(self, index: int, number: int) -> None:
        part = LAYOUT.slices[index]
        held, known = self.held[index]
        found = self.rings[index].find(self.lineages[part.shard], number, held, known)
        assert found is not None
        entry = data_pb2.FetchedSlice(
            slice=index,
            number=found.version.number,
            fingerprint=found.version.fingerprint,
            step=found.version.step,
            base=-1 if found.whole is not None else held,
        )
        payloads = [] if found.whole is None else [found.whole.view(np.uint8)]
        for delta in found.deltas:
            entry.deltas.add(form=int(delta.form), nbytes=delta.payload.nbytes)
            payloads.append(delta.payload)
        self.relay.landed(entry, np.concatenate(payloads), self.lineages)
        self.held[index] = found.version.number, found.version.fingerprint

    def take(self, number: int) -> None:
        weights = PublishedWeights(
            version=WeightsVersion(max(self.lineages), number),
            step=2 * number,
            exact=True,
            arrays={},
            bits=codec.round_to_bf16(self.weights),
            layout=LAYOUT,
        )
        self.relay.taken(weights, Source(spec=SPEC, every=2, lineages=tuple(self.lineages)))

    def newest(self) -> list[tuple[int, int]]:
        views = [shard.watch(*KEY) for shard in self.relay.shards]
        return [(view.lineage, view.newest) for view in views]


def test_each_slice_is_passed_on_as_it_comes_and_as_the_shards_would() -> None:
    up = Upstream()
    up.relay.say("nobody trains")
    assert "nobody trains" in up.relay.shards[1].watch(*KEY).waiting_for
    woken = threading.Event()
    up.relay.shards[1].on_version = woken.set
    up.publish(0)
    up.fetch(0, 0)
    assert up.newest() == [(0, -1), (0, -1)]
    up.fetch(1, 0)
    up.take(0)
    assert up.newest() == [(7, 0), (7, 0)]
    assert woken.is_set()
    assert [shard.listed()[0][:2] for shard in up.relay.shards] == [KEY, KEY]
    first = codec.round_to_bf16(up.weights)
    for number in (1, 2):  # Slice 0 comes in two parts, slice 1 in one.
        up.publish(number)
        up.fetch(0, number)
    assert up.newest() == [(7, 2), (7, 0)]
    up.fetch(1, 2)
    assert up.newest() == [(7, 2), (7, 2)]
    up.take(2)
    assert up.newest() == [(7, 2), (7, 2)]
    for part in LAYOUT.slices:
        known = codec.fingerprint(first[part.start : part.stop])
        held = data_pb2.HeldSlice(slice=part.index, number=0, fingerprint=known)
        asked = data_pb2.FetchHeader(job="night", table="model", lineage=7, target=2, slices=[held])
        reply, arrays = up.relay.shards[part.shard].fetch(asked)
        theirs = up.rings[part.index].find(7, 2, 0, known)
        assert theirs is not None
        (entry,) = reply.slices
        assert (entry.number, entry.step, entry.base) == (2, 4, 0)
        assert entry.fingerprint == theirs.version.fingerprint
        assert [one.tobytes() for one in arrays] == [
            delta.payload.tobytes() for delta in theirs.deltas
        ]


def asked(target: int, held: int = -1, known: int = 0) -> data_pb2.FetchHeader:
    """Returns a reader's question for slice 1."""
    slices = [data_pb2.HeldSlice(slice=1, number=held, fingerprint=known)]
    return data_pb2.FetchHeader(job="night", table="model", lineage=7, target=target, slices=slices)


@pytest.mark.parametrize("num_changed", [20, 5000])
def test_an_answer_waits_for_a_slice_that_comes_and_for_all_of_it(num_changed: int) -> None:
    up = Upstream()
    up.publish(0)
    for index in (0, 1):
        up.fetch(index, 0)
    up.take(0)
    up.publish(1, num_changed)
    assert not up.relay.shards[1].fetch(asked(1))[0].slices  # It has not begun to come.
    whole: list[bytes] = []
    shard = up.relay.shards[1]
    assert shard.table is not None
    shard.table.newest = PublishedVersion(number=1, step=2, fingerprint=0)
    reader = threading.Thread(target=lambda: whole.extend(map(bytes, shard.fetch(asked(1))[1])))
    reader.start()
    up.fetch(1, 1)
    up.fetch(0, 1)
    up.take(1)
    reader.join()
    part = LAYOUT.slices[1]
    assert b"".join(whole) == codec.round_to_bf16(up.weights)[part.start : part.stop].tobytes()


@pytest.mark.parametrize("both", [True, False])
def test_a_shard_that_begins_a_lineage_begins_one_here(both: bool) -> None:
    up = Upstream()
    up.publish(5)
    for index in (0, 1):
        up.fetch(index, 5)
    up.take(5)
    up.lineages = [9, 9 if both else 7]
    up.publish(6)
    up.held[0] = (-1, 0)
    if both:
        up.held[1] = (-1, 0)
    for index in (0, 1):
        up.fetch(index, 6)
        assert up.newest() == [(7, 5), (7, 5)], "the others may not have gone back yet"
    up.take(6)
    assert up.newest() == [(9, 6), (9 if both else 7, 6)]
    (_, _, found) = up.relay.shards[1].listed()[0]
    newest = found.publication.newest
    assert newest is not None
    assert (newest.number, newest.step) == (6, 12)
    assert (found.publication.find(1, 7, 6, 5, 0) is None) == both


def test_a_reader_is_forgotten_when_its_connection_has_ended_or_it_is_silent() -> None:
    up = Upstream()
    up.publish(0)
    for index in (0, 1):
        up.fetch(index, 0)
    up.take(0)
    shard = up.relay.shards[0]
    for number in (3, 4):
        shard.watch(*KEY, number, ReaderState(host="far", pid=9, heard_s=0.0))
    told: dict[str, list[str]] = {"lost": [], "new": []}
    shard.connect(4, told["lost"].append)
    shard.connect(4, told["new"].append)
    shard.disconnect(4, told["lost"].append)  # Noticed after its successor has begun.
    shard.announce("far:7070")
    assert told == {"lost": [], "new": ["far:7070"]}
    up.now_s = 31.0
    shard.forget_silent()
    assert list(shard.listed()[0][2].readers) == [4]
    shard.disconnect(4, told["new"].append)
    assert not shard.listed()[0][2].readers


def test_a_shard_without_a_slice_lists_no_table() -> None:
    """It never has a version, and would be the one that lacks the newest."""
    lock = threading.Condition()
    shards = [RelayShard(lock, lambda: 0.0, index, SharedRate(0)) for index in range(3)]
    for index, shard in enumerate(shards):
        shard.show(*KEY, RelayedTable(SPEC, index))
    assert [len(shard.listed()) for shard in shards] == [1, 1, 0]
