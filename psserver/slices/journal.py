"""The journal of one slice: its state for a restart after a SIGKILL, written at every change.

A slice's arrays lie in an arena. Its record (proto/ps/v1/state.proto) names the arrays in use and
holds the progress of each worker. A change never writes to an array that the last record names: it
writes the new numbers elsewhere, then the new record beside the old one, and then one word that
selects the new record. So a process killed at any instruction leaves the slice as it was before
the change or after it. A push is acknowledged after its change, so no acknowledged push is lost.

    root   eight int64: which record counts: its number, 48 bits, which is in half number % 2, and a
           check of the number, 16 bits (-1: none yet; -2: none any more); place, room and length of
           half 0, and of half 1; 0
    half   MARK + its place (int64); the record, its number (int64), and the CRC-32 of these two
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import structlog
import xxhash

from pscore.net import wire
from pscore.pb.ps.v1 import state_pb2
from pscore.types import ByteArray, FloatArray, HyperArray, Push, Role
from psserver.decisions.progress import Progress
from psserver.slices.arena import Arena
from psserver.slices.pool import NUMBERS, ArenaPool, Cell, Pool

log = structlog.get_logger()
ROOT_NUMEL = 8
ROOT_NBYTES = 8 * ROOT_NUMEL
ROOM_NBYTES = 1024  # Bytes of a half at first.
ACTIVE = 0
NONE_YET, NONE_MORE = -1, -2
PLACE, ROOM, LENGTH = 1, 2, 3  # Fields of half 0; those of half 1 follow 3 later.
NUMBER, CHECK = struct.Struct("<q"), struct.Struct("<I")
MARK, MARK_NBYTES = 0x504C4A4F55524E00, 8
CHECK_BITS = 16


class SliceJournal:
    """Writes the record of one slice."""

    def __init__(
        self,
        arena: Arena,
        root: int,
        numel: int,
        payload_nbytes_max: int,
        num_segments: int,
        pool: ArenaPool | None = None,
    ) -> None:
        """Begins at a root of zeros, or resumes from the records of a killed process.

        Args:
            root: Place of the root, `ROOT_NBYTES` long.
            pool: Provides the arrays; None: one of arrays that are as long as the slice.

        Raises:
            ValueError: The root or its record is damaged.
            OSError: There is no room on the disk.
        """
        self._arena = arena
        self._root_place, self._root = root, arena.integers_at(root, ROOT_NUMEL)
        self._num_segments = num_segments
        self._heap = Pool(numel, payload_nbytes_max)
        self.is_on = True  # Whether each change is written; may be read from any thread.
        self._takes = True  # Whether new arrays lie in the arena: before it is on again, too.
        self._wanted = 0  # Most arrays in use at once while some lay on the heap.
        self.number = -1  # Number of the record that counts; -1: there is none.
        # The slice's arrays.
        self.pool = ArenaPool(arena, numel, payload_nbytes_max) if pool is None else pool
        self.record = state_pb2.SliceRecord(version=-1)  # The record that the next `commit` writes.
        if not self._root[PLACE]:
            self._root[ACTIVE] = NONE_YET
            for half in (0, 1):
                self._make_room(half, ROOM_NBYTES)
        elif self._root[ACTIVE] != NONE_YET:
            self._recover()

    @property
    def is_new(self) -> bool:
        """Whether nothing has been written yet."""
        return bool(self._root[ACTIVE] == NONE_YET)

    def take(self) -> Cell:
        """Returns memory for an array; if the disk is full, on the heap, and the journal ends."""
        if self._takes:
            try:
                return self.pool.take()
            except OSError as problem:
                self._give_up(problem)
        cell = self._heap.take()
        self._wanted = max(self._wanted, self.pool.num_used + self._heap.num_used)
        return cell

    def look_for_room(self) -> bool:
        """Returns whether there is room again for the arrays of a journal that had ended.

        That is for the most that were in use at once, or the next pushes would end it again. From
        then on new arrays lie in the arena. The journal is on again with the first commit at which
        all do that the record names.
        """
        wanted = sum(place == 0 for place in self._places())
        try:
            self._arena.reserve(wanted * self.pool.cell_nbytes)
            self.pool.grow(self._wanted)
        except OSError:
            return False
        self._takes = True
        return True

    def moved(self, cell: Cell) -> Cell:
        """Returns an array in the arena in the place of one on the heap; the same without room."""
        if cell.place:
            return cell
        target = self._take_like(cell)
        former = cell if target.place else target
        if target.place:
            np.copyto(target.data[: cell.data.nbytes], cell.data)
        self.give(former)
        return target if target.place else cell

    def give(self, cell: Cell) -> None:
        """Frees memory that no record names any more."""
        (self.pool if cell.place else self._heap).give(cell)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.pool.nbytes + self._heap.nbytes

    def commit(self) -> None:
        """Makes the record the one that counts."""
        if not self.is_on and not (self._takes and all(self._places())):
            return
        if len(self.record.places) != len(self.pool.places):
            self.record.places[:] = self.pool.places
        number = self.number + 1
        data = self.record.SerializeToString() + NUMBER.pack(number)
        data += CHECK.pack(zlib.crc32(data))
        half = number % 2
        base = 3 * half
        if len(data) > self._root[base + ROOM]:
            try:
                self._make_room(half, 2 * len(data))
            except OSError as problem:
                self._give_up(problem)
                return
        target = self._half(half, len(data))
        target[:] = np.frombuffer(data, dtype=np.uint8)
        self._root[base + LENGTH] = len(data)
        self._root[ACTIVE] = _checked_word(number)
        self.number = number
        if not self.is_on:
            self.is_on = True
            log.info("a slice is journalled again", path=str(self._arena.path))

    def seal(self, arrays: Iterable[FloatArray]) -> None:
        """Records a hash of the weights and the optimizer's state, good until the next update.

        A hash at each update would take as long as a good part of the update itself, so only those
        of a quiet slice are hashed (engine/job.py).

        Args:
            arrays: The weights, then the arrays of the optimizer's state.
        """
        if self.is_on and self.record.version >= 0 and not self.record.HasField("digest"):
            self.record.digest = digest_of(arrays)
            self.commit()

    # ----- changes; the caller commits

    def count(self, rank: int, steps: Progress) -> None:
        """Records the progress of a worker."""
        entry = self.record.counted[rank]
        entry.clock = steps.clock
        entry.ahead[:] = sorted(steps.ahead)
        entry.late[:] = sorted(steps.late)
        entry.skipped = steps.skipped

    def count_minibatches(self, counted: Progress) -> None:
        """Records the minibatches of the pushes that are counted."""
        self.record.minibatches.clock = counted.clock
        self.record.minibatches.ahead[:] = sorted(counted.ahead)

    def hold(self, push: Push, cell: Cell, nbytes: int, *, is_compressed: bool) -> None:
        """Records a payload that is added later."""
        entry = self.record.held.add()
        self._note(entry, push)
        entry.place, entry.nbytes, entry.is_compressed = cell.place, nbytes, is_compressed

    def drop(self, push: Push) -> None:
        """Removes a payload that was held."""
        for index, entry in enumerate(self.record.held):
            if (entry.worker, entry.step) == (push.worker, push.step):
                del self.record.held[index]
                return

    def add(
        self, key: int, push: Push, weight: float, cell: Cell, nbytes: int | None = None
    ) -> None:
        """Records that a gradient is in an open step.

        Args:
            cell: The step's sum; with `nbytes` the payload, where a step keeps all of them.
        """
        for open_step in self.record.open_steps:
            if open_step.key == key:
                break
        else:
            open_step = self.record.open_steps.add(key=key)
        open_step.place = cell.place
        entry = open_step.added.add(weight=weight)
        if nbytes is not None:
            entry.place, entry.nbytes = cell.place, nbytes
        self._note(entry, push)

    def move(self, key: int, cell: Cell) -> None:
        """Records that the sum of an open step is elsewhere now."""
        for open_step in self.record.open_steps:
            if open_step.key == key:
                open_step.place = cell.place

    def remove(self, key: int) -> None:
        """Removes an open step."""
        for index, open_step in enumerate(self.record.open_steps):
            if open_step.key == key:
                del self.record.open_steps[index]
                return

    def begin(self, epoch: int, counted: Mapping[int, Progress]) -> None:
        """Records a change of the mode: no step is open, and the rule's memory is empty."""
        self.record.epoch = epoch
        self.record.memory.clear()
        self.record.counted.clear()
        for rank, steps in counted.items():
            self.count(rank, steps)

    # ----- reading

    def push_of(self, entry: state_pb2.PendingPush) -> Push:
        """Returns the push of an entry."""
        return Push(
            worker=entry.worker,
            step=entry.step,
            base_version=entry.base_version,
            samples=entry.samples,
            present=wire.unpack_bits(entry.present, self._num_segments),
            hyper=self._hyper(entry),
            role=Role(entry.role),
        )

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields place and bytes of all in the arena that the record needs, which comes last.

        Nothing may change the slice meanwhile.
        """
        yield from self.pool.spans(set(self._places()) - {0, *NUMBERS})
        for half in (0, 1):
            is_newest = self.number >= 0 and half == self.number % 2
            length = int(self._root[3 * half + LENGTH]) if is_newest else 0
            yield int(self._root[3 * half + PLACE]), MARK_NBYTES + length
        yield self._root_place, ROOT_NBYTES

    def _take_like(self, cell: Cell) -> Cell:
        """Returns memory for the contents of a cell."""
        return self.take()

    def _places(self) -> list[int]:
        """Returns the places of all arrays that the record names; each 0 on the heap."""
        record = self.record
        weights = [record.weights] if record.version >= 0 else []
        return [
            *(*weights, *record.state, *record.memory.values()),
            *(open_step.place for open_step in record.open_steps),
            *(added.place for one in record.open_steps for added in one.added if added.place),
            *(entry.place for entry in record.held),
        ]

    def _note(self, entry: state_pb2.PendingPush, push: Push) -> None:
        entry.worker, entry.step, entry.role = push.worker, push.step, int(push.role)
        entry.base_version, entry.samples = push.base_version, push.samples
        entry.present = wire.pack_bits(push.present, self._num_segments)
        if push.hyper is not None:
            entry.hyper[:] = push.hyper.ravel().tolist()
            self.record.num_groups = len(push.hyper)

    def _hyper(self, entry: state_pb2.PendingPush) -> HyperArray | None:
        if not entry.hyper:
            return None
        return np.array(entry.hyper, dtype=np.float64).reshape(self.record.num_groups, -1)

    def _recover(self) -> None:
        """Restores the record and the arrays of a killed process."""
        word = int(self._root[ACTIVE])
        if word == NONE_MORE:
            raise ValueError("there was no space left to journal a slice")
        self.number = number = word >> CHECK_BITS
        for half in (0, 1):
            mark = self._arena.bytes_at(int(self._root[3 * half + PLACE]), MARK_NBYTES)
            is_made = self._root[3 * half + ROOM] > 0
            if is_made and mark.view(np.int64)[0] != MARK + self._root[3 * half + PLACE]:
                raise ValueError("the place of a record of a slice is damaged")
        if word != _checked_word(number):
            raise ValueError("the number of the record of a slice is damaged")
        data = self._half(number % 2, int(self._root[3 * (number % 2) + LENGTH]))
        self.record.ParseFromString(_checked(data.tobytes(), number))
        record = self.record
        used = set(self._places())
        for place in used - {0, *NUMBERS}:
            self.pool.at(place)  # Raises here if its pages are missing.
        self.pool.adopt(list(record.places), used)

    def _make_room(self, half: int, nbytes: int) -> None:
        place = self._arena.allocate(MARK_NBYTES + nbytes)
        self._arena.integers_at(place, 1)[0] = MARK + place
        self._root[3 * half + ROOM] = 0
        self._root[3 * half + PLACE] = place
        self._root[3 * half + ROOM] = nbytes

    def _half(self, half: int, nbytes: int) -> ByteArray:
        """Returns the memory of the record in a half, `(nbytes,) uint8`."""
        place = int(self._root[3 * half + PLACE])
        return self._arena.bytes_at(place, MARK_NBYTES + nbytes)[MARK_NBYTES:]

    def _give_up(self, problem: OSError) -> None:
        """Continues without a journal, and marks the one on the disk as unusable."""
        was_on, self.is_on, self._takes = self.is_on, False, False
        self._root[ACTIVE] = NONE_MORE
        if was_on:
            log.error(
                "a slice is no longer journalled: its weights would be lost with this process",
                path=str(self._arena.path),
                reason=str(problem),
            )


def digest_of(arrays: Iterable[FloatArray]) -> int:
    """Returns the XXH3 of arrays, 64 bits."""
    total = xxhash.xxh3_64()
    for array in arrays:
        total.update(array)
    return total.intdigest()


def _checked_word(number: int) -> int:
    """Returns the number of a record with its check, as the root holds it."""
    return number << CHECK_BITS | zlib.crc32(NUMBER.pack(number)) >> CHECK_BITS


def _checked(data: bytes, number: int) -> bytes:
    """Returns the record in data that was written under a number."""
    record, tail = data[: -NUMBER.size - CHECK.size], data[-NUMBER.size - CHECK.size :]
    if len(tail) == NUMBER.size + CHECK.size:
        (found,), (check,) = NUMBER.unpack(tail[: NUMBER.size]), CHECK.unpack(tail[NUMBER.size :])
        if found == number and check == zlib.crc32(data[: -CHECK.size]):
            return record
    raise ValueError(f"record {number} of a slice is damaged")
