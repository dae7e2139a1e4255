"""A reader's decisions: the version that it takes, and its next question to each shard.

No thread, clock, socket or memory of weights is in here. The driver (subscriber.py) asks `next` for
each shard, does what it says, and reports what came; messages may be lost, doubled or late.

    slice    EMPTY -whole-> HELD(p) -deltas-> HELD(p');   a false fingerprint -> EMPTY
    target   with all slices held the smallest of the shards' newest versions, else the largest, and
             never less than a slice has: deltas lead forward only

When all slices hold the target, they are one version. A shard that has lost its numbers begins a
new lineage; all its slices are EMPTY then. Numbers of two lineages are never mixed: steps need all
shards, so a shard of a new lineage passes the checkpoint that it began with only when all others
have gone back to it too. The last look at the others (`must_look`) is for a reader that fetched
from them before they did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

EMPTY = -1  # Number of a slice without a version.


class WeightsVersion(NamedTuple):
    """The identity of published weights: it never falls, and newer ones compare as larger."""

    # Rises when the shards go back to a checkpoint, a state is loaded, or the job starts over: the
    # milliseconds since 1970 at which that was.
    lineage: int
    number: int  # Rises with each version of a lineage, by 1 every K updates.


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFor:
    """Wait until a shard has a newer version than `after` of `lineage`, or another lineage."""

    lineage: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Fetch a version of some slices; `held` has each with its number and fingerprint."""

    lineage: int
    target: int
    held: Sequence[tuple[int, int, int]]


Ask = WatchFor | Fetch


@dataclass(slots=True)
class _Slice:
    number: int = EMPTY
    fingerprint: int = 0
    step: int = 0
    was_held: bool = False


@dataclass(slots=True)
class _Shard:
    slices: list[int]
    lineage: int = 0  # 0: it publishes nothing yet.
    newest: int = EMPTY
    looks: int = 0  # Answers to `Watch`.


@dataclass(slots=True)
class Assembly:
    """The slices of a reader."""

    shard_of: Mapping[int, int]  # By slice.
    num_shards: int
    taken: WeightsVersion | None = None  # The version that the reader uses; None: none yet.
    resyncs: int = 0  # Slices that came whole though they were held before.
    _slices: dict[int, _Slice] = field(default_factory=dict)
    _shards: list[_Shard] = field(default_factory=list)
    _lineages: tuple[int, ...] = ()  # Each shard's, at the version taken.
    _looks: tuple[int, ...] | None = None  # When the target was whole: must have risen since.

    def __post_init__(self) -> None:
        self._slices = {index: _Slice() for index in self.shard_of}
        of: dict[int, list[int]] = {shard: [] for shard in range(self.num_shards)}
        for index, shard in self.shard_of.items():
            of[shard].append(index)
        self._shards = [_Shard(slices=of[shard]) for shard in range(self.num_shards)]

    @property
    def lineage(self) -> int:
        """The largest lineage of a shard: the reader's."""
        return max(shard.lineage for shard in self._shards)

    @property
    def lineages(self) -> tuple[int, ...]:
        """The lineage of each shard."""
        return tuple(shard.lineage for shard in self._shards)

    @property
    def target(self) -> int | None:
        """Number of the version that the reader wants; None: a shard has none yet."""
        asked = [shard for shard in self._shards if shard.slices]
        newest = [shard.newest for shard in asked]
        if any(shard.lineage == 0 for shard in asked) or min(newest) == EMPTY:
            return None
        held = [one.number for one in self._slices.values()]
        wanted = max(newest) if EMPTY in held else min(newest)
        return max(wanted, *held)

    @property
    def whole(self) -> WeightsVersion | None:
        """The version that all slices hold, if it is newer than the one taken."""
        numbers = {one.number for one in self._slices.values()}
        if len(numbers) > 1 or EMPTY in numbers:
            return None
        version = WeightsVersion(self.lineage, numbers.pop())
        return version if self.taken is None or version > self.taken else None

    @property
    def ready(self) -> WeightsVersion | None:
        """The version that can be taken: it is whole, and of one lineage on each shard."""
        return None if self.must_look else self.whole

    @property
    def step(self) -> int:
        """Steps of training behind the slices: the fewest."""
        return min(one.step for one in self._slices.values())

    @property
    def must_look(self) -> bool:
        """Whether each shard has to be asked once more, since a lineage has changed."""
        if self.lineages == self._lineages:
            return False
        return self._looks is None or any(
            shard.slices and shard.looks <= before
            for shard, before in zip(self._shards, self._looks, strict=True)
        )

    def next(self, shard: int) -> Ask | None:
        """Returns the next question to a shard; None: there is none before the others answer."""
        one = self._shards[shard]
        if not one.slices:
            return None
        if self.whole is not None and self.must_look:
            return WatchFor(lineage=0, after=EMPTY)
        target = self.target
        if target is None:  # Those that have a version need not be asked before the others have.
            return WatchFor(lineage=one.lineage, after=EMPTY) if one.newest == EMPTY else None
        missing = [index for index in one.slices if self._slices[index].number != target]
        if not missing:
            is_done = all(held.number == target for held in self._slices.values())
            if not is_done or one.newest > target:
                return None
            return WatchFor(lineage=one.lineage, after=target)
        if one.newest < target:
            return WatchFor(lineage=one.lineage, after=target - 1)
        held = [(i, self._slices[i].number, self._slices[i].fingerprint) for i in missing]
        return Fetch(lineage=one.lineage, target=target, held=held)

    def seen(self, shard: int, lineage: int, newest: int) -> None:
        """Notes a shard's newest version; `newest` is -1 if it has none."""
        one = self._shards[shard]
        one.looks += 1
        if lineage < one.lineage:
            return  # Late: a lineage only rises. A shard that has lost its job has 0.
        if lineage > one.lineage:
            one.lineage, one.newest = lineage, EMPTY
            for index in one.slices:
                self._slices[index].number = EMPTY
            self._looks = None
        one.newest = max(one.newest, newest)

    def missed(self, shard: int) -> None:
        """Notes that a shard has answered without a slice: it has not the version that it had.

        It was killed, and publishes the next one.
        """
        self._shards[shard].newest = EMPTY

    def expects(self, shard: int, lineage: int, index: int, base: int, number: int) -> bool:
        """Returns whether a slice of a shard's answer leads on from the one that is held.

        Args:
            base: Number of the version that its deltas lead on from; -1: it came whole.
            number: Number of the version that it leads to.
        """
        one = self._shards[shard]
        if lineage != one.lineage or self.shard_of.get(index) != shard:
            return False
        held = self._slices[index].number
        return number > held and base in (EMPTY, held)

    def landed(self, index: int, number: int, fingerprint: int, step: int, *, whole: bool) -> None:
        """Notes that a slice holds a version."""
        one = self._slices[index]
        if whole and one.was_held:
            self.resyncs += 1
        self._slices[index] = _Slice(number, fingerprint, step, was_held=True)
        shard = self._shards[self.shard_of[index]]
        shard.newest = max(shard.newest, number)
        if self.whole is not None:
            self._looks = tuple(shard.looks for shard in self._shards)

    def broke(self, index: int) -> None:
        """Notes that a slice is not what its fingerprint says: it is fetched whole."""
        self._slices[index].number = EMPTY

    def take(self) -> WeightsVersion:
        """Makes the version that is ready the one that the reader uses."""
        version = self.ready
        assert version is not None
        self.taken, self._lineages = version, self.lineages
        return version
