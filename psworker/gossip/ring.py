"""The sum of all workers' gradients without a server: the worker of `allreduce`.

Pitch Patarasu and Xin Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009: the vector is cut into a chunk for each worker; sums of chunks go once around, then the whole
chunks do. Each chunk is added along one path, by one worker at a time, so all get the same bits.
In the order of the ranks a chunk's owner gets all n parts at once and adds them itself: the same
bytes, and the same bits as shards that add in that order.

A round that a change of the members interrupts is given up by everybody and made again among those
who live, with the gradients that each still has. If somebody had ended it already, its result
stands, and the others get it from that worker, which does not part before they have it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from pscore.types import FloatArray
from psworker.gossip.base import (
    Gathering,
    Gossip,
    Meet,
    Steps,
    Tag,
    Waits,
    Want,
    parts_of,
    require_numel,
    sends,
)

CHUNK, SUM, RESULT, COPY, TAKEN = 1, 2, 3, 4, 5  # Kinds of messages.
# Parts of a chunk that goes around: while one is added or on its way, the link has the others. To a
# far worker it is on its way for longer.
PARTS, PARTS_FAR = 2, 8
PART_NUMEL_MIN = 1 << 14  # 64 KiB of float32: below that a message costs more than its bytes.
PART_NUMEL_MAX = 1 << 18  # 1 MiB of float32: it is still in the cache when it is passed on.


class Ring(Gossip):
    """The worker of all-reduce."""

    name = "ring"

    def start(self) -> Waits:
        """Meets the others."""
        self._in_order = self.rule.arguments()["order"] == "ranks"
        self._members: list[int] = []
        self._behind: list[int] = []  # Ranks that need the last result, as of the last meeting.
        self._epoch = self._numel = 0
        self._result: FloatArray | None = None  # The last round's, for late members.
        yield from self._meet(-1)

    def step(self) -> Waits:
        """Replaces the gradients by the mean of all workers', then makes the optimizer's step."""
        own = self.model.gather()
        self._numel = len(own)
        total: FloatArray | None = None
        while total is None:
            if self.post.has_moved:
                total = yield from self._meet(self.number)
            if total is None:
                is_alone = len(self._members) == 1
                total = own.copy() if is_alone else (yield from self._sum(own))
        self._result, self.number = total, self.number + 1
        self.stats.num_exchanges += 1
        self.model.scatter(total)
        self.model.update()

    def part(self) -> Waits:
        """Meets the others until none is behind this worker's last round.

        A worker that parts stays until all others have the result of that round. Else they might
        make the round again without it, when another one dies, and get other bits.
        """
        while self.rank in self._members:
            yield from self._meet(self.number, parts=True)
            for rank in self._behind:
                tag = Tag(TAKEN, self.number - 1, 0, self._epoch)
                if (yield Want(rank, tag)) is None:
                    break  # The members have changed.

    def meet(self) -> Waits:
        """Meets the others between two rounds; nobody has ended one that this worker has not."""
        if self.post.has_moved:
            yield from self._meet(self.number)

    # ----- one round

    def _sum(self, own: FloatArray) -> Steps[FloatArray | None]:
        """Returns the sum over the members; None if the round has to be made again."""
        place = self._members.index(self.rank)
        chunks = _chunks(len(own), len(self._members))
        if not self._in_order:
            return (yield from self._go_around(own, chunks, place))
        total = own.copy()
        if not (yield from self._gather_in_order(total, chunks, place)):
            return None
        return total if (yield from self._share_all(total, chunks, place)) else None

    def _go_around(
        self, own: FloatArray, chunks: Sequence[slice], place: int
    ) -> Steps[FloatArray | None]:
        """Adds sums that come around, then passes whole chunks around.

        A chunk goes in parts, in more where its owner is far from the next worker. Each part is
        added and passed on when it has come, while the others are under way, so that the link is
        busy from the first hop to the last.
        """
        total, num = np.empty_like(own), len(chunks)
        to, source = self._members[(place + 1) % num], self._members[place - 1]
        num_parts = PARTS_FAR if self.post.is_far(to) else PARTS
        for index, part in enumerate(_parts(chunks[place], num_parts)):
            self._give_part(to, CHUNK, place, index, own[part])
        for hop in range(2 * (num - 1)):
            chunk = (place - hop - 1) % num
            is_sum = hop >= num - 1  # The sum of all members; before that, of those it has passed.
            index, start = 0, chunks[chunk].start
            while start < chunks[chunk].stop:
                came = yield self._part(source, SUM if is_sum else CHUNK, chunk, index)
                if came is None:
                    return None
                require_numel(source, came, 1, chunks[chunk].stop - start)
                part = slice(start, start + len(came))
                if not is_sum:
                    came += own[part]
                if hop >= num - 2:
                    total[part] = came
                if hop < 2 * num - 3:
                    self._give_part(to, SUM if hop >= num - 2 else CHUNK, chunk, index, came)
                index, start = index + 1, part.stop
        self.stats.partner = source
        return total

    def _gather_in_order(
        self, total: FloatArray, chunks: Sequence[slice], place: int
    ) -> Steps[bool]:
        """Adds this worker's own chunk of all workers, in the order of the ranks."""
        for other in sends(self._members, self.rank):
            index = self._members.index(other)
            self._give(other, CHUNK, index, total[chunks[index]])
        added = np.zeros_like(total[chunks[place]])
        for other in self._members:
            if other == self.rank:
                added += total[chunks[place]]
                continue
            came = yield from self._want(other, CHUNK, place, chunks[place])
            if came is None:
                return False
            added += came
        total[chunks[place]] = added
        return True

    def _share_all(self, total: FloatArray, chunks: Sequence[slice], place: int) -> Steps[bool]:
        """Sends this worker's whole chunk to all, and takes theirs."""
        for other in sends(self._members, self.rank):
            self._give(other, SUM, place, total[chunks[place]])
        for index, other in enumerate(self._members):
            if other == self.rank:
                continue
            came = yield from self._want(other, SUM, index, chunks[index])
            if came is None:
                return False
            total[chunks[index]] = came
        return True

    # ----- messages

    def _give(self, to: int, kind: int, chunk: int, values: FloatArray) -> None:
        for index, part in enumerate(parts_of(len(values))):
            self._give_part(to, kind, chunk, index, values[part].copy())

    def _give_part(self, to: int, kind: int, chunk: int, index: int, values: FloatArray) -> None:
        self.post.give(to, self._tag(kind, chunk, index), values)

    def _want(self, source: int, kind: int, chunk: int, place: slice) -> Steps[FloatArray | None]:
        """Waits for a chunk; returns None when the members have changed."""
        values = np.empty(place.stop - place.start, np.float32)
        for index, part in enumerate(parts_of(len(values))):
            came = yield self._part(source, kind, chunk, index)
            if came is None:
                return None
            require_numel(source, came, part.stop - part.start, part.stop - part.start)
            values[part] = came
        self.stats.partner = source
        return values

    def _part(self, source: int, kind: int, chunk: int, index: int) -> Want:
        return Want(source, self._tag(kind, chunk, index))

    def _tag(self, kind: int, chunk: int, index: int) -> Tag:
        return Tag(kind, self.number, chunk << 16 | index, self._epoch)

    # ----- members

    def _meet(
        self, position: int, *, parts: bool = False, again: bool = False
    ) -> Steps[FloatArray | None]:
        """Meets the others; returns the result of this round if somebody has ended it."""
        gatherings: list[Gathering] = yield Meet(position, parts=parts, stays=parts, again=again)
        # Others may have met again behind the meeting in which this worker has parted.
        own = next(
            gathering for gathering in reversed(gatherings) if self.rank in gathering.positions
        )
        epoch, positions, leaving = own
        last = max(positions.values())
        self._epoch, self._members = epoch, [rank for rank in positions if rank not in leaving]
        if position < 0:
            self.number = max(self.model.first_step, last)
        self._behind = [rank for rank, other in positions.items() if 0 <= other < last]
        holder = min(rank for rank, other in positions.items() if other == last)
        if holder == self.rank:
            self._help(positions, last)
        if position == last:
            return None
        kind = COPY if position < 0 else RESULT
        came = yield from self._whole(holder, kind, max(0, position))
        if came is None:
            return (yield from self._meet(position, parts=parts))
        if kind == RESULT:
            require_numel(holder, came, self._numel, self._numel)
            for rank in (rank for rank, other in positions.items() if other == last):
                self.post.give(rank, Tag(TAKEN, position, 0, self._epoch), came[:0])
            return came
        require_numel(holder, came, len(self.model.weights), math.inf)
        self.model.unpack(came)
        return None

    def _help(self, positions: dict[int, int], last: int) -> None:
        """Sends the last result to those who have yet to end it, and the model to newcomers."""
        new = {rank for rank, other in positions.items() if other < 0 <= last}
        if self._behind:
            assert self._result is not None
            self._give_whole(set(self._behind), RESULT, last - 1, self._result)
        if new:
            self._give_whole(new, COPY, 0, self.model.pack())

    def _give_whole(self, to: set[int], kind: int, round_: int, values: FloatArray) -> None:
        """Sends an array of any length; an empty part ends it."""
        parts = [values[part].copy() for part in parts_of(len(values))]
        for rank in sorted(to):
            for index, part in enumerate([*parts, np.empty(0, np.float32)]):
                self.post.give(rank, Tag(kind, round_, index, self._epoch), part)

    def _whole(self, source: int, kind: int, round_: int) -> Steps[FloatArray | None]:
        """Waits for an array of any length; returns None when the members have changed."""
        parts: list[FloatArray] = [np.empty(0, np.float32)]
        while True:
            came = yield Want(source, Tag(kind, round_, len(parts) - 1, self._epoch))
            if came is None or not len(came):
                return came if came is None else np.concatenate(parts)
            parts.append(came)


def _chunks(numel: int, num: int) -> list[slice]:
    """Returns `num` chunks of almost one length."""
    bounds = [numel * index // num for index in range(num + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _parts(chunk: slice, num: int) -> list[slice]:
    """Returns the parts of a chunk that go around one after the other; none of an empty one."""
    numel = -(-(chunk.stop - chunk.start) // num)
    numel = min(max(numel, PART_NUMEL_MIN), PART_NUMEL_MAX)
    starts = range(chunk.start, chunk.stop, numel)
    return [slice(start, min(start + numel, chunk.stop)) for start in starts]
