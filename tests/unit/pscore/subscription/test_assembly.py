"""A reader's state machine against shards whose messages are lost, doubled and late.

Each slice carries its version as its weights, so that a mix of versions is seen. Shards are killed
(they publish again with the next version) and go back to a checkpoint, all of them one by one. In
every second world they are ports of a relay, which announce a version when its first slice is here.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from pscore.publish import codec
from pscore.subscription.assembly import EMPTY, Assembly, Fetch, WatchFor
from psserver.publish.ring import FoundVersion, VersionRing

NUMEL = 40
SHARD_OF = {0: 0, 1: 0, 2: 1, 3: 2}
NUM_SHARDS = 3


def weights_of(lineage: int, number: int) -> np.ndarray:
    """Returns the weights of a version: small whole numbers, exact in bfloat16."""
    weights = np.zeros(NUMEL, dtype=np.float32)
    weights[0], weights[1], weights[2 + number % 30] = lineage, number % 200, number % 7 + 1
    return weights


@dataclass
class Shard:
    """The publications of one shard; slices of one version."""

    index: int
    lineage: int = 1
    number: int = 0
    announced: int = EMPTY
    rings: dict[int, VersionRing] = field(default_factory=dict)
    coming: list[int] = field(default_factory=list)  # Slices that lack the version announced.

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        owned = [index for index, shard in SHARD_OF.items() if shard == self.index]
        self.rings, self.announced = {index: VersionRing() for index in owned}, EMPTY
        self.coming = []

    def publish(self, *, is_relay: bool = False) -> None:
        self.coming = list(self.rings)
        while self.coming:
            self.bring()
            if is_relay:
                break
        self.announced = self.number

    def bring(self) -> None:
        weights = weights_of(self.lineage, self.number)
        self.rings[self.coming.pop()].publish(self.lineage, self.number, 4 * self.number, weights)

    def find(self, ask: Fetch) -> list[tuple[int, int, FoundVersion]]:
        answers = []
        for index, number, fingerprint in ask.held:
            found = self.rings[index].find(ask.lineage, ask.target, number, fingerprint)
            if found is not None:
                answers.append((index, number, found))
        return answers


class World:
    """Three shards, one reader, and a network between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_relay = seed % 2 == 1
        self.shards = [Shard(index) for index in range(NUM_SHARDS)]
        self.reader = Assembly(shard_of=SHARD_OF, num_shards=NUM_SHARDS)
        self.memory = {index: np.zeros(NUMEL, dtype=np.uint16) for index in SHARD_OF}
        self.under_way: deque[Callable[[], None]] = deque()
        self.commits = 0
        self.going_back: list[int] = []  # Shards that have not gone back yet.
        self.base = 0  # Number of the checkpoint.

    def train(self) -> None:
        """Makes one update on the shard that is furthest behind: steps need all shards."""
        coming = [shard for shard in self.shards if shard.coming]
        if coming:
            self.random.choice(coming).bring()
            return
        if self.going_back:
            self.go_back(self.going_back.pop())
            return
        slowest = min(shard.number for shard in self.shards)
        shard = self.random.choice([one for one in self.shards if one.number == slowest])
        shard.number += 1
        shard.publish(is_relay=self.is_relay)

    def go_back(self, index: int) -> None:
        shard = self.shards[index]
        shard.lineage = max(one.lineage for one in self.shards) + 1
        shard.number = self.base
        shard.begin()
        shard.publish()

    def kill(self) -> None:
        self.random.choice(self.shards).begin()

    def send(self, call: Callable[[], None]) -> None:
        for _ in range(self.random.choice((0, 1, 1, 1, 1, 2))):
            if self.random.random() < 0.2:
                self.under_way.append(call)
            else:
                self.under_way.appendleft(call)

    def ask(self) -> None:
        index = self.random.randrange(NUM_SHARDS)
        question = self.reader.next(index)
        shard = self.shards[index]
        if isinstance(question, WatchFor):
            self.send(lambda: self.watched(index, shard))
        elif question is not None:
            self.send(lambda: self.fetched(index, shard, question))

    def watched(self, index: int, shard: Shard) -> None:
        lineage, newest = shard.lineage, shard.announced
        self.send(lambda: self.reader.seen(index, lineage, newest))

    def fetched(self, index: int, shard: Shard, ask: Fetch) -> None:
        answers = shard.find(ask)
        self.send(lambda: self.land(index, ask.lineage, answers))

    def land(self, shard: int, lineage: int, answers: list[tuple[int, int, FoundVersion]]) -> None:
        if not answers:
            self.reader.missed(shard)
        for index, held, found in answers:
            base = held if found.whole is None else EMPTY
            number = found.version.number
            if not self.reader.expects(shard, lineage, index, base, number):
                continue
            if found.whole is not None:
                self.memory[index] = found.whole.copy()
            for delta in found.deltas:
                codec.apply(delta, self.memory[index])
            if codec.fingerprint(self.memory[index]) != found.version.fingerprint:
                self.reader.broke(index)
                continue
            whole = found.whole is not None
            known, step = found.version.fingerprint, found.version.step
            self.reader.landed(index, number, known, step, whole=whole)

    def commit(self) -> None:
        former, version = self.reader.taken, self.reader.ready
        if version is None:
            return
        assert self.reader.take() == version
        assert former is None or version > former, "the version fell"
        wide = np.empty(NUMEL, dtype=np.float32)
        marks = set()
        for bits in self.memory.values():
            codec.widen(bits, wide)
            marks.add(wide[1])
            marks.add(float(version.number % 200))
        assert len(marks) == 1, f"{version} holds numbers {marks}"
        lineages = set()
        for bits in self.memory.values():
            codec.widen(bits, wide)
            lineages.add(wide[0])
        is_mixed = len(lineages) > 1 and version.number > self.base
        assert not (is_mixed and self.lines_differ(lineages)), f"{version} mixes {lineages}"
        self.commits += 1

    def lines_differ(self, lineages: set[float]) -> bool:
        """Whether lineages are of different histories: all shards go back together, in turn."""
        return len({(int(one) - 2) // NUM_SHARDS for one in lineages}) > 1

    def run(self, num_events: int) -> None:
        for shard in self.shards:
            shard.publish()
        for _ in range(num_events):
            draw = self.random.random()
            if draw < 0.05:
                self.train()
            elif draw < 0.0504:
                self.kill()
            elif draw < 0.052 and not self.going_back:
                self.base = max(0, min(shard.number for shard in self.shards) - 3)
                self.going_back = self.random.sample(range(NUM_SHARDS), NUM_SHARDS)
                self.train()
            elif draw < 0.35:
                self.ask()
            elif self.under_way:
                self.under_way.popleft()()
            self.commit()


@pytest.mark.parametrize("first", [0, 10])
def test_no_version_is_torn_or_falls(first: int) -> None:
    commits = 0
    for seed in range(first, first + 10):
        world = World(seed)
        world.run(600)
        commits += world.commits
    assert commits > 25


@pytest.mark.slow
def test_no_version_is_torn_or_falls_in_five_thousand_seeds() -> None:
    commits = 0
    for seed in range(1000, 6000):
        world = World(seed)
        world.run(600)
        commits += world.commits
    assert commits > 20_000


def test_a_reader_goes_on_when_nothing_is_lost() -> None:
    world = World(1)
    for shard in world.shards:
        shard.publish()
    for number in range(30):
        for shard in world.shards:
            shard.number = number
            shard.publish()
        for _ in range(5):
            for index, shard in enumerate(world.shards):
                question = world.reader.next(index)
                if isinstance(question, WatchFor):
                    world.reader.seen(index, shard.lineage, shard.announced)
                elif question is not None:
                    world.land(index, question.lineage, shard.find(question))
            world.commit()
        assert world.reader.taken == (1, number)
    assert world.reader.resyncs < 30
