"""The numbers of one row slice, and how a clock's orders change them. No decisions, no I/O.

A slice has one slab for each row table. A step keeps the payloads of its pushes until it closes;
then each table's pushes are merged in the order of the ranks, and one step of the optimizer changes
the rows that any of them names. A slab is written in place, between the copy of the rows as they
were (undo.py) and the journal's record of the step. Pulls run between two orders, so all rows of an
answer are of one version; they change nothing, and rows that were never updated take no memory.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from pscore.compressors.none import NoCompression
from pscore.errors import DecodeError, LimitError, TableFullError
from pscore.pb.ps.v1 import data_pb2
from pscore.rows.hashing import IdArray
from pscore.rows.optimizers import RowOptimizer
from pscore.rows.payload import (
    ALL,
    Owned,
    RowRequest,
    decode_push,
    encode_changed,
    fits,
    require_owned,
    split_push,
)
from pscore.rules.base import Rule
from pscore.types import ByteArray, FloatArray, IntArray, Push, Role
from psserver.decisions.orders import Acknowledge, Add, Answer, Hold, Load, Skip, Update
from psserver.rows.cells import RowJournal
from psserver.rows.copying import SlabCopy
from psserver.rows.gone import GoneIds
from psserver.rows.policy import RowDecision, RowPolicy
from psserver.rows.slab import FoundPlaces, Keep, Places, Slab, keep_nothing, sum_up
from psserver.rows.undo import Undo
from psserver.slices.base import (
    NO_CLOCKS,
    NO_OBSERVER,
    Asked,
    Mark,
    Observer,
    Payload,
    Reading,
    WeightedGrad,
)
from psserver.slices.journaled_progress import JournaledProgress

RAW = NoCompression()
# Ids, rows and versions in a checkpoint: of the rows, and of the ids that wait.
ARRAYS = ("ids", "rows", "versions"), ("waiting_ids", "waiting_times", "waiting_versions")
BUFFERS_KEPT = 4
TOKEN_BITS, MARK_LENGTH = 62, 2  # The mark of a copy is the process's token, and a version.
CLAIMS_KEPT = 4  # Newest pushes of a worker whose rows may not be in the slabs yet.
# In a record: the arrays are not in the arena. As its `weights` also which word has its version.
IN_SLABS, SECOND = 1, 2


class RowStore:
    """The rows of one slice.

    Attributes:
        numel: Numbers of as many rows as there may be.
        policies: The rows of each row table, and how they are made and go.
        places_lock: Lock of the places of rows: they change on the queue's thread, and are looked
            at by others.
        counts: `(num_tables,) int64`, steps of each table.
        progress: The pushes counted, as the journal has them; None: there is no journal.
    """

    def __init__(
        self,
        owned: Sequence[Owned],
        policies: Sequence[RowPolicy],
        groups: Sequence[int],
        rule: Rule,
        optimizer: RowOptimizer,
        journal: RowJournal | None = None,
        undo: Undo | None = None,
        stamps: Sequence[IntArray] = (),
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Starts with the rows in the slabs, as of the journal's last record.

        Args:
            owned: The ids that the slice owns, of each row table.
            policies: The rows of each, and how they are made and go.
            undo: The rows before a step; with a journal only.
            stamps: Words where the version is published beside the journal.
            observer: Sees steps and publications, for a timeline.
        """
        self.policies, self.slabs = list(policies), [policy.slab for policy in policies]
        self._all_slabs = [slab for policy in policies for slab in policy.slabs]
        self.counts = np.zeros(len(policies), np.int64)
        self._totals = np.zeros((2, len(policies)), np.int64)  # Rows that went, gradients dropped.
        self.numel = sum(slab.rows_max * slab.width for slab in self.slabs)
        self._owned, self._groups, self._rule = list(owned), list(groups), rule
        self._dims = [slab.dim for slab in self.slabs]
        self._widths = [slab.width for slab in self.slabs]
        self._num_state = len(optimizer.state_names)
        self.journal, self._undo, self._stamps = journal, undo, stamps
        self._observer = observer
        self.progress = None if journal is None else JournaledProgress(journal)
        self._open: dict[int, list[WeightedGrad]] = {}  # Pushes that are in no update, by step.
        # The ids of pushes that may be on their way, by rank and step; also read by `check`.
        self._claims: dict[tuple[int, int], list[IdArray]] = {}
        # The places that the last pull of a worker has found, by rank and table.
        self._pulled: dict[tuple[int, int], FoundPlaces] = {}
        self._token, self._version = secrets.randbits(TOKEN_BITS), -1
        self._gone = GoneIds()
        self._copies: list[list[SlabCopy]] = []  # Copies that are being made, by slab.
        self._num_refused = 0  # Pushes for which a table had no room.
        self.places_lock = threading.Lock()
        self._buffers: deque[ByteArray] = deque(maxlen=BUFFERS_KEPT)
        if journal is not None and not journal.is_new:
            self._recover(journal)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, indices and payloads."""
        held = 0 if self.journal is None else self.journal.nbytes
        return held + sum(slab.nbytes for slab in self._all_slabs)

    def count_held(self) -> dict[str, int]:
        """Returns counts of rows, of ids that wait for one, and of pushes and gradients refused."""
        with self.places_lock:
            removed, dropped = self._totals.sum(axis=1).tolist()
            waiting = [policy.waiting.count for policy in self.policies if policy.waiting]
            return {
                "rows": sum(slab.count for slab in self.slabs),
                "rows_max": sum(slab.rows_max for slab in self.slabs),
                "rows_nbytes": sum(slab.nbytes for slab in self._all_slabs),
                "rows_removed": removed,
                "ids_waiting": sum(waiting),
                "gradients_dropped": dropped,
                "pushes_refused": self._num_refused,
            }

    # ----- orders

    def check(self, payload: Payload, push: Push) -> None:
        """Refuses a payload that cannot be of this slice, before anything is counted.

        Raises:
            DecodeError: It has another length, an id is not in order, range or slice, a number is
                not finite, or it is compressed.
            TableFullError: There is no room for its new rows.
            LimitError: There is none on the disk.
        """
        if not payload.compressor.is_raw or payload.is_borrowed:
            raise DecodeError("rows are neither compressed nor shared")
        found = decode_push(payload.data, self._owned, self._widths_of(payload, push.role))
        is_load = push.role in (Role.WEIGHTS, Role.STATE)
        if not is_load and self.progress is not None and self.progress.has(push):
            return  # It is counted, and its rows have their room.
        ids = [self._may_make(number, push.worker, rows.ids) for number, rows in enumerate(found)]
        for number, own in enumerate(ids):
            self._require_room(number, own)
        if not is_load:
            of_worker = [key for key in list(self._claims) if key[0] == push.worker]
            for key in of_worker[: 1 - CLAIMS_KEPT]:
                self._claims.pop(key, None)
            self._claims[push.worker, push.step] = ids

    def load(self, action: Load, payload: Payload) -> None:
        """Sets the rows in a payload, and with `Role.STATE` their state if it is there.

        An empty state has a step alone: nothing of the rows changes.
        """
        if action.role is Role.STATE and not len(payload.data):
            return
        widths = self._widths_of(payload, action.role)
        found = split_push(payload.data, widths)
        decisions = []
        for policy, rows in zip(self.policies, found, strict=True):
            given = sum_up([(rows.ids, rows.values, 1.0)], policy.slab.dim)
            places = policy.slab.find(rows.ids)
            decisions.append(policy.decide(given, places, action.version, at_once=True))
        if payload.counts:
            self.counts[:] = payload.counts
        self._begin(decisions, action.version)
        self._gone = GoneIds(action.version + 1)
        for policy in self.policies:
            policy.forget()
        for slab, decision, rows, width in zip(self.slabs, decisions, found, widths, strict=True):
            versions = np.full(len(rows.ids), action.version)
            slab.load(decision.rows, rows.values, width, versions)
        self._publish(action.version)

    def hold(self, action: Hold, payload: Payload) -> Payload:
        """Returns a payload that stays valid when the push has been acknowledged."""
        kept = self._keep(payload)
        if self.journal is not None and self.progress is not None and kept.cell is not None:
            self.progress.add(action.push)
            nbytes = payload.data.nbytes
            self.journal.hold(action.push, kept.cell, nbytes, is_compressed=False)
            self.journal.commit()
        return kept

    def add(self, action: Add, payload: Payload) -> None:
        """Keeps a push until its step closes."""
        kept = payload if payload.cell is not None else self._keep(payload)
        self._open.setdefault(action.open_step, []).append((action, kept))
        self._count(action)
        if self.journal is not None and kept.cell is not None:
            nbytes = payload.data.nbytes
            self.journal.add(action.open_step, action.push, action.weight, kept.cell, nbytes)
            self.journal.commit()

    def update(self, action: Update) -> None:
        """Makes one optimizer step with the pushes of an open step."""
        self._step(self._open.pop(action.open_step, []), action)

    def add_and_update(self, grads: Sequence[WeightedGrad], update: Update) -> None:
        """Makes the last additions of an update and its optimizer step: they are not kept."""
        for action, _ in grads:
            self._count(action)
        self._step([*self._open.pop(update.open_step, []), *grads], update)

    def skip(self, action: Skip) -> None:
        """Gives the rows another version, at which some may go."""
        self._begin(self._decide([[]] * len(self.policies), [], action.version), action.version)
        self._publish(action.version)

    def note_late(self, action: Acknowledge) -> None:
        """Records in the journal a push that is counted without being added."""
        if self.journal is not None and self.progress is not None and action.push is not None:
            self.progress.add_late(action.push)
            self.journal.commit()

    def seal(self) -> None:
        """Does nothing: rows are too many to be hashed in a pause of the training."""

    def journal_again(self) -> None:
        """Journals the slice again if its journal had ended on a full disk and there is room.

        The slabs are of the record's version at any time, so the next record that counts names a
        whole slice; only payloads that were kept on the heap meanwhile have to move.
        """
        journal = self.journal
        if journal is None or journal.is_on or not self._look_for_room(journal):
            return
        for key, grads in self._open.items():
            self._open[key] = moved = [(add, _moved(payload, journal)) for add, payload in grads]
            journal.move_all(key, [payload.cell for _, payload in moved if payload.cell])
        journal.commit()

    def change(self, rule: Rule, epoch: int, clocks: Mapping[int, int]) -> None:
        """Continues under another rule."""
        self._rule = rule
        if self.journal is not None and self.progress is not None:
            self.progress.begin(epoch, clocks)
            self.journal.commit()

    # ----- reading

    def answer(self, answer: Answer, asked: Asked, reply: data_pb2.PullReply) -> Reading:
        """Returns the rows that a pull asks for, in its order."""
        assert isinstance(asked.wanted, RowRequest)
        self._note_answer(answer)
        widths = self._widths if answer.with_state else self._dims
        if answer.with_state:
            reply.counts.extend(self.counts.tolist())
        wanted, arrays = asked.wanted, []
        ids = list(wanted.ids)
        places = [slab.find(each) for slab, each in zip(self.slabs, ids, strict=True)]
        if not answer.is_look:
            self._keep_places(answer.worker, ids, places)
        if wanted.since != ALL:
            changed = [
                (policy.slab.versions(found) > wanted.since) | (policy.removes & (found < 0))
                for policy, found in zip(self.policies, places, strict=True)
            ]
            arrays.append(encode_changed(np.concatenate(changed)))
            ids = [each[chosen] for each, chosen in zip(ids, changed, strict=True)]
            places = [found[chosen] for found, chosen in zip(places, changed, strict=True)]
        nbytes = 4 * sum(len(each) * width for each, width in zip(ids, widths, strict=True))
        buffer = self._take_buffer(nbytes)
        out: FloatArray = buffer[:nbytes].view(np.float32)
        begin = 0
        for slab, each, found, width in zip(self.slabs, ids, places, widths, strict=True):
            stop = begin + len(each) * width
            slab.read(each, found, width, out[begin:stop])
            begin = stop
        nbytes += sum(array.nbytes for array in arrays)
        return Reading(
            arrays=[*arrays, out.view(np.uint8)],
            release=partial(self._buffers.append, buffer),
            nbytes=nbytes,
            raw_nbytes=nbytes,
        )

    def _keep_places(self, worker: int, ids: Sequence[IdArray], places: Sequence[IntArray]) -> None:
        """Keeps the places that a pull has found, for the push of the same rows."""
        for number, (own, found) in enumerate(zip(ids, places, strict=True)):
            if len(own):
                kept = FoundPlaces(
                    ids=own.copy(), places=found, num_gone=self.slabs[number].num_gone
                )
                self._pulled[worker, number] = kept

    # ----- checkpoints

    def export(self, mark: Mark | None = None) -> Iterator[dict[str, np.ndarray] | None]:
        """Copies all that outlives the process, by name; no open steps.

        The rows are in no order. With a mark they are the rows that have changed since then, and
        the ids that have gone; all rows if it is of another process, or too long ago.

        Yields:
            None behind each portion but the last, and then the arrays, as they were at the first.
        """
        token, since = mark if mark is not None and len(mark) == MARK_LENGTH else (-1, -1)
        arrays: dict[str, np.ndarray] = {
            "counts": self.counts.copy(),
            "mark": np.array([self._token, self._version]),
        }
        is_own = token == self._token and since <= self._version
        if is_own and self._gone.has_all_since(since):
            gone = self._gone.since(since, len(self._all_slabs))
            names = [names[-1].replace("versions", "gone") for names, _ in self._named()]
            arrays |= zip(names, gone, strict=True)
        else:
            since = -1
        copies = [SlabCopy(slab, since) for slab in self._all_slabs]
        self._copies.append(copies)
        try:
            for copy in copies:
                while not copy.is_whole:
                    copy.advance()
                    yield None
        finally:
            self._copies.remove(copies)
        for (names, _), copy in zip(self._named(), copies, strict=True):
            arrays |= zip(names, copy.arrays(), strict=True)
        yield arrays

    def restore(
        self, arrays: Mapping[str, np.ndarray], version: int, clocks: Mapping[int, int] = NO_CLOCKS
    ) -> None:
        """Sets all that `export` returned, before anything else happens to the slice.

        Raises:
            DecodeError: An id is not one of the slice.
            TableFullError: There are more rows than there is room for.
        """
        arrays = dict(arrays)
        for names, slab in self._named():
            ids, values, versions = (arrays[name] for name in names)
            if not (ids[1:] > ids[:-1]).all():
                order = np.argsort(ids)
                values = values.reshape(-1, slab.width)[order].reshape(-1)
                arrays |= zip(names, (ids[order], values, versions[order]), strict=True)
        for number, policy in enumerate(self.policies):
            for slab, kind in zip(policy.slabs, ARRAYS, strict=False):
                ids = arrays[f"{kind[0]}.{number}"]
                require_owned(ids, self._owned[number])
                if len(ids) > slab.rows_max:
                    raise self._full(number, len(ids))
        self.counts[:] = arrays["counts"]
        named = self._named()
        pairs = [(slab, slab.plan(arrays[names[0]])) for names, slab in named]
        self._save(pairs)
        with self.places_lock:
            for (slab, plan), (names, _) in zip(pairs, named, strict=True):
                slab.begin(plan)
                slab.load(plan, arrays[names[1]], slab.width, arrays[names[2]])
        if self.progress is not None:
            for rank, clock in clocks.items():
                self.progress.advance(rank, clock)
        self._gone = GoneIds(version + 1)
        self._publish(version)

    def _named(self) -> list[tuple[list[str], Slab]]:
        """Returns the names of the arrays of each slab in a checkpoint, and the slab."""
        return [
            ([f"{kind}.{number}" for kind in kinds], slab)
            for number, policy in enumerate(self.policies)
            for kinds, slab in zip(ARRAYS, policy.slabs, strict=False)
        ]

    def check_invariants(self) -> None:
        """Asserts that indices and slabs are one to one, for tests and the simulator."""
        for slab in self._all_slabs:
            slab.check_invariants()

    def _widths_of(self, payload: Payload, role: Role) -> list[int]:
        """Returns the numbers of a row in a payload: with its state only in a state's."""
        has_state = role is Role.STATE and not fits(payload.data, self._dims)
        return self._widths if has_state else self._dims

    def _may_make(self, number: int, worker: int, ids: IdArray) -> IdArray:
        """Returns a copy of those ids of a push that may have no row when its step is made.

        An id that had a row at the worker's last pull has one, unless the table gives rows up.
        """
        found = self._pulled.get((worker, number))
        if found is None or self.policies[number].removes or not found.are_of(ids):
            return ids.copy()
        return ids[found.places < 0]

    def _require_room(self, number: int, ids: IdArray) -> None:
        """Refuses the rows of a push for which there is no room beside those on their way.

        Args:
            ids: `(n,) uint64`, those that may have no row yet.

        Raises:
            TableFullError: The table is full.
            LimitError: The disk is full.
        """
        policy = self.policies[number]
        pushes = [*self._claimed(number), ids]
        with self.places_lock:
            wanted = policy.room_for(pushes)
        if wanted > policy.slab.rows_max:
            self._num_refused += 1
            raise self._full(number, wanted)
        try:
            policy.reserve(wanted, sum(map(len, pushes)))
        except OSError as problem:
            name = self._owned[number].name
            raise LimitError(f"no room for rows of {name!r}: {problem}") from None

    def _claimed(self, number: int) -> list[IdArray]:
        """Returns the ids of a table in each push that is on its way."""
        return [ids[number] for ids in list(self._claims.values())]

    def _full(self, number: int, wanted: int) -> TableFullError:
        return TableFullError(
            f"row table {self._owned[number].name!r} would have {wanted} rows in a slice that has "
            f"room for {self.slabs[number].rows_max}; declare it with more max_rows, or lru"
        )

    def _keep(self, payload: Payload) -> Payload:
        """Returns a copy of a payload, in the arena if there is one."""
        nbytes = payload.data.nbytes
        if self.journal is None:
            return payload._replace(data=payload.data.copy())
        cell = self.journal.take_for(nbytes)
        np.copyto(cell.data[:nbytes], payload.data)
        return payload._replace(data=cell.data[:nbytes], cell=cell)

    def _count(self, action: Add) -> None:
        """Counts a push in the journal, if there is one; the caller commits."""
        if self.journal is not None and self.progress is not None:
            self.progress.add(action.push)
            self.journal.drop(action.push)

    def _step(self, grads: Sequence[WeightedGrad], update: Update) -> None:
        with self._observer.stepping(update):
            found = [split_push(payload.data, self._dims) for _, payload in grads]
            weights = [action.weight for action, _ in grads]
            active = [number for number in range(len(self.slabs)) if update.present >> number & 1]
            pushes = [
                [
                    (rows[number].ids, rows[number].values, weight)
                    for rows, weight in zip(found, weights, strict=True)
                    if number in active
                ]
                for number in range(len(self.slabs))
            ]
            workers = [action.push.worker for action, _ in grads]
            decisions = self._decide(pushes, workers, update.version)
            keeps = self._begin(decisions, update.version, later=True)
            for number in active:
                self.counts[number] += 1
                t, hyper = int(self.counts[number]), update.hyper[self._groups[number]]
                rows, sums = decisions[number].rows, decisions[number].grads
                self.slabs[number].step(
                    rows, sums, update.scale, update.version, t, hyper, keeps[number]
                )
            if self.journal is not None:
                self.journal.remove(update.open_step)
            self._publish(update.version)
        for action, payload in grads:
            self._claims.pop((action.push.worker, action.push.step), None)
            if self.journal is not None and payload.cell is not None:
                self.journal.give(payload.cell)

    def _decide(
        self,
        pushes: Sequence[Sequence[tuple[IdArray, FloatArray, float]]],
        workers: Sequence[int],
        version: int,
    ) -> list[RowDecision]:
        """Returns the rows that a step makes, changes and removes, by table.

        Args:
            pushes: By table: ids, `(n * dim,) float32` and weight of each push.
            workers: The rank of each.
            version: That of the rows after the step.
        """
        decisions = []
        for number, (policy, of_table) in enumerate(zip(self.policies, pushes, strict=True)):
            rows = sum_up(of_table, policy.slab.dim)
            found = [self._pulled.get((worker, number)) for worker in workers]
            places = policy.slab.find_summed(rows, found)
            decisions.append(policy.decide(rows, places, version))
        return decisions

    def _begin(
        self, decisions: Sequence[RowDecision], version: int, *, later: bool = False
    ) -> list[Keep]:
        """Makes room for the new rows of a step, removes others, and counts pushes.

        Args:
            decisions: By table.
            version: That of the rows after the step.
            later: Whether the rows that stay are kept block by block, by the functions returned.
        """
        plans = [plan for decision in decisions for plan in decision.plans]
        pairs = list(zip(self._all_slabs, plans, strict=True))
        main = np.cumsum([0, *(len(decision.plans) for decision in decisions[:-1])]).tolist()
        keeps = self._save(pairs, main if later else [])
        for number, (slab, plan) in enumerate(pairs):
            self._gone.note(version, number, slab.ids_at(plan.removed))
        with self.places_lock:
            for slab, plan in pairs:
                slab.begin(plan)
            for number, decision in enumerate(decisions):
                self.policies[number].count(decision, version)
                self._totals[:, number] += decision.num_removed, decision.num_dropped
        return keeps

    def _save(self, plans: Sequence[tuple[Slab, Places]], later: Sequence[int] = ()) -> list[Keep]:
        """Keeps the rows that a step changes or removes, those of some slabs later (`Undo.save`).

        Copies that are being made get them too.

        Returns:
            The functions that keep them then, by table.
        """
        for copies in self._copies:
            for copy, (_, plan) in zip(copies, plans, strict=True):
                copy.keep(plan)
        if self.journal is not None and self._undo is not None and self.journal.is_on:
            try:
                self._undo.save(plans, self.journal.number, later)
                return [partial(self._undo.keep, index) for index in later]
            except OSError as problem:
                self.journal.give_up(problem)
        return [keep_nothing for _ in later]

    def _publish(self, version: int) -> None:
        """Makes the rows as they are those of a version, in the journal too."""
        self._version = version
        with self._observer.publishing(version):
            # The record names one of two words: a kill before its commit leaves the other whole.
            record = None if self.journal is None else self.journal.record
            word = SECOND if record is not None and record.weights == IN_SLABS else IN_SLABS
            for words in self._stamps:
                words[word - 1] = version
            if self.journal is not None and record is not None:
                record.version, record.weights = version, word
                record.state[:] = [IN_SLABS] * self._num_state
                record.counts[:] = self.counts.tolist()
                record.totals[:] = self._totals.ravel().tolist()
                self.journal.commit()
            if self._undo is not None:
                self._undo.end()

    def _note_answer(self, answer: Answer) -> None:
        """Records where a worker begins, in an asynchronous mode."""
        if answer.is_look or self._rule.by_step or self.progress is None:
            return
        if self.journal is not None and self.progress.advance(answer.worker, answer.clock):
            self.journal.commit()

    def _take_buffer(self, nbytes: int) -> ByteArray:
        """Returns memory for an answer: one that has been sent, if it is of about that size."""
        for _ in range(len(self._buffers)):
            buffer = self._buffers.popleft()
            if nbytes <= buffer.nbytes <= 2 * nbytes:
                return buffer
            self._buffers.append(buffer)
        return np.empty(nbytes, np.uint8)

    def _look_for_room(self, journal: RowJournal) -> bool:
        """Returns whether there is room again to keep rows and payloads before a step."""
        try:
            if self._undo is not None:
                self._undo.reserve()
        except OSError:
            return False
        return journal.look_for_room()

    def _recover(self, journal: RowJournal) -> None:
        """Restores the slice from the journal of a killed process.

        Raises:
            OSError: There is no room on the disk for the rows of pushes that are counted.
        """
        if self._undo is not None:
            self._undo.roll_back(self._all_slabs, journal.number)
        record = journal.record
        self._version = record.version
        self._gone = GoneIds(record.version)
        if record.version >= 0:
            self.counts[:] = list(record.counts)
        if record.totals:
            self._totals.ravel()[:] = list(record.totals)
        for step in record.open_steps:
            for entry in step.added:
                cell = journal.pool.at(entry.place)
                add = Add(
                    token=None,
                    open_step=step.key,
                    push=journal.push_of(entry),
                    weight=entry.weight,
                    is_first=False,
                )
                payload = Payload(data=cell.data[: entry.nbytes], compressor=RAW, cell=cell)
                self._open.setdefault(step.key, []).append((add, payload))
        for entry in (*record.held, *(entry for step in record.open_steps for entry in step.added)):
            data = journal.pool.at(entry.place).data[: entry.nbytes]
            push, found = journal.push_of(entry), split_push(data, self._dims)
            self._claims[push.worker, push.step] = [rows.ids.copy() for rows in found]
        for number, policy in enumerate(self.policies):
            pushes = self._claimed(number)
            policy.reserve(policy.room_for(pushes), sum(map(len, pushes)))


def _moved(payload: Payload, journal: RowJournal) -> Payload:
    """Returns a kept payload in the arena, if it lies on the heap and there is room."""
    assert payload.cell is not None
    cell = journal.moved(payload.cell)
    return payload._replace(data=cell.data[: payload.data.nbytes], cell=cell)
