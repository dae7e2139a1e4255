"""Interface of a slice's numbers, as queues, journals and recovery use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pscore.compressors.base import Compressor
from pscore.rules.base import Rule
from pscore.types import ByteArray, FloatArray, IntArray, Role
from psserver.decisions.orders import Acknowledge, Add, Answer, Hold, Load, Skip, Update
from psserver.slices.journal import SliceJournal
from psserver.slices.journaled_progress import JournaledProgress
from psserver.slices.pool import Cell
from psserver.slices.pull_estimate import Estimate
from psserver.slices.weights import Weights

NO_CLOCKS: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The bytes of one push, and how to read them."""

    data: ByteArray  # (nbytes,)
    compressor: Compressor
    counts: tuple[int, ...] = ()  # Role STATE: optimizer steps of each segment.
    is_borrowed: bool = False  # In the worker's memory, which is valid until the acknowledgement.
    cell: Cell | None = None  # The copy that `Store.hold` has made.


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

    numel: int
    counts: IntArray  # (num_segments,): optimizer steps of each segment.
    copies: Weights  # The copies of the weights; readers lease the newest.
    progress: JournaledProgress | None  # The pushes counted, as the journal has them.

    @property
    def journal(self) -> SliceJournal | None:
        """The journal that every change is written to; None: nothing outlives the process."""

    @property
    def weights(self) -> FloatArray:
        """The newest weights, `(numel,) float32`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    @property
    def state(self) -> list[FloatArray]:
        """The optimizer's state, each array `(numel,) float32`."""

    # ----- orders

    def check(self, payload: Payload, role: Role) -> None:
        """Refuses a payload that cannot be of this slice, before anything is counted.

        Raises:
            DecodeError: It has another length, or is not what its compressor writes.
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

    def read(self, answer: Answer) -> list[FloatArray]:
        """Returns the newest weights and, if asked, the state: views until the next order."""

    def estimate(self, answer: Answer, compressor: Compressor) -> Estimate:
        """Returns the estimate of the newest weights where pulls are compressed."""

    # ----- checkpoints

    def export(self) -> dict[str, np.ndarray]:
        """Returns copies of all that outlives the process, by name; no open sums."""

    def restore(
        self, arrays: Mapping[str, np.ndarray], version: int, clocks: Mapping[int, int] = NO_CLOCKS
    ) -> None:
        """Sets all that `export` returned, before anything else happens to the slice."""
