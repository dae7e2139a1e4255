"""Interface of a slice's numbers, as queues, journals and recovery use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np

from pscore.compressors.base import Compressor
from pscore.pb.ps.v1 import data_pb2
from pscore.rules.base import Rule
from pscore.types import ByteArray, FloatArray, Push
from psserver.decisions.orders import Acknowledge, Add, Answer, Hold, Load, Skip, Update
from psserver.slices.journal import SliceJournal
from psserver.slices.journaled_progress import JournaledProgress
from psserver.slices.pool import Cell

Mark = tuple[int, ...]  # The process and the version of a copy.
NO_CLOCKS: Mapping[int, int] = {}


class Payload(NamedTuple):
    """The bytes of one push, and how to read them."""

    data: ByteArray  # (nbytes,)
    compressor: Compressor
    counts: tuple[int, ...] = ()  # Role STATE: optimizer steps of each segment.
    is_borrowed: bool = False  # In the worker's memory, which is valid until the acknowledgement.
    cell: Cell | None = None  # The copy that `Store.hold` has made.


class Asked(NamedTuple):
    """The request of a pull, beside its order."""

    wanted: object = None  # The payload, as the table's content reads it.
    is_shared: bool = False  # The worker has mapped the weights.
    held: int | None = None  # Fingerprint of its estimate, in a compressed pull.
    compressor: Compressor | None = None  # That of the table's pulls.


class Reading(NamedTuple):
    """The payload that answers a pull."""

    arrays: Sequence[FloatArray | ByteArray]
    release: Callable[[], None] | None  # Frees it; None: it is valid until the next order.
    nbytes: int  # That the worker reads, also out of shared memory.
    raw_nbytes: int  # The same, if nothing were compressed.


def nothing() -> None:
    """Frees nothing: an answer that nothing writes to may be sent later."""


WeightedGrad = tuple[Add, Payload]  # One gradient of a sum; the order holds its weight.


class Observer:
    """Sees the stages of a store's orders begin and end; this one ignores them.

    A stage lasts as long as the context that is returned for it. A publication is part of the step
    that it ends.
    """

    def adding(self, grads: Sequence[WeightedGrad]) -> AbstractContextManager[None]:
        """Returns the context in which gradients are added to a sum."""
        return NOTHING

    def stepping(self, update: Update) -> AbstractContextManager[None]:
        """Returns the context in which one optimizer step is made."""
        return NOTHING

    def publishing(self, version: int) -> AbstractContextManager[None]:
        """Returns the context in which weights of a new version become the newest."""
        return NOTHING


NOTHING = nullcontext()
NO_OBSERVER = Observer()


class Store(Protocol):
    """The numbers of one slice. Orders are executed one after the other, by one thread at a time.

    The methods raise only the errors that they state: an order that fails is a bug.
    """

    numel: int  # Elements, by which its work is measured.
    progress: JournaledProgress | None  # The pushes counted, as the journal has them.

    @property
    def journal(self) -> SliceJournal | None:
        """The journal that every change is written to; None: nothing outlives the process."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    # ----- orders

    def check(self, payload: Payload, push: Push) -> None:
        """Refuses a payload that cannot be of this slice, before anything is counted.

        Raises:
            DecodeError: It has another length, or is not what its compressor writes.
            LimitError: There is no room for its new rows.
        """

    def load(self, action: Load, payload: Payload) -> None:
        """Sets the weights, and with `Role.STATE` the optimizer's state."""

    def hold(self, action: Hold, payload: Payload) -> Payload:
        """Returns a payload that stays valid when the push has been acknowledged."""

    def add(self, action: Add, payload: Payload) -> None:
        """Adds a gradient to the sum of an open step."""

    def update(self, action: Update) -> None:
        """Makes one optimizer step with the mean of an open step."""

    def add_and_update(self, grads: Sequence[WeightedGrad], update: Update) -> None:
        """Makes the last additions of an update, and its optimizer step, at once."""

    def skip(self, action: Skip) -> None:
        """Gives the weights another version."""

    def seal(self) -> None:
        """Records in the journal a hash of weights and state, if it has none of them yet."""

    def journal_again(self) -> None:
        """Journals the slice again if its journal had ended on a full disk and there is room."""

    def note_late(self, action: Acknowledge) -> None:
        """Records in the journal a push that is counted without being added."""

    def change(self, rule: Rule, epoch: int, clocks: Mapping[int, int]) -> None:
        """Continues under another rule."""

    # ----- reading

    def answer(self, answer: Answer, asked: Asked, reply: data_pb2.PullReply) -> Reading:
        """Returns the payload that answers a pull, and describes it in `reply`."""

    # ----- checkpoints

    def export(self, mark: Mark | None = None) -> Iterator[dict[str, np.ndarray] | None]:
        """Copies all that outlives the process, by name; no open sums.

        Orders may be executed between two portions; the copy is of the first one's moment.

        Args:
            mark: The array `mark` of an earlier copy: the changes since then will do.

        Yields:
            None behind each portion but the last, and then the arrays.
        """

    def restore(
        self, arrays: Mapping[str, np.ndarray], version: int, clocks: Mapping[int, int] = NO_CLOCKS
    ) -> None:
        """Sets all that `export` returned, before anything else happens to the slice."""
