"""The orders of a slice's clock (slice_clock.py), which its queue (slice_queue.py) executes.

They are tuples: several are made for each push, and a tuple is made fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pscore.types import HyperArray, Push, Role, Verdict
from psserver.decisions.progress import Token

NO_CLOCKS: Mapping[int, int] = {}


class Load(NamedTuple):
    """Take the weights (and state) in `token`'s payload as they are."""

    token: Token
    role: Role
    version: int
    clocks: Mapping[int, int] = NO_CLOCKS  # Steps of each worker that are in them, by rank.


class Hold(NamedTuple):
    """Keep `token`'s payload; it is added later. The sender's buffer must be free after this."""

    token: Token
    push: Push


class Add(NamedTuple):
    """Add `weight` times `token`'s gradient to an open step's sum, after compensation."""

    token: Token
    open_step: int  # Key of the open step (`OpenStep.key`).
    push: Push
    weight: float
    is_first: bool  # The sum is empty: assign.

    @property
    def worker(self) -> int:
        """Rank of the worker that computed the gradient."""
        return self.push.worker


class Update(NamedTuple):
    """Make one optimizer step with an open step's sum times `scale`, and drop the sum."""

    open_step: int  # Key of the open step (`OpenStep.key`).
    scale: float
    present: int  # Bit i: segment i has a gradient; -1 for all.
    hyper: HyperArray
    version: int  # Version of the weights after it.


class Skip(NamedTuple):
    """Give the unchanged weights another version: no worker pushes the steps in between."""

    former: int  # Their version before.
    version: int


class Acknowledge(NamedTuple):
    """Answer a push."""

    token: Token
    verdict: Verdict
    version: int
    push: Push | None = None  # One that has been counted, and will not be added.


class Answer(NamedTuple):
    """Answer a pull with the weights as they are now."""

    token: Token
    worker: int
    version: int
    with_state: bool
    clock: int = 0  # Next step of a worker that has just (re)joined.
    counted: int = -1  # One more than the last step counted of its rank; -1: not asked.
    is_look: bool = False  # Only to be seen (`Pull.is_look`).


Action = Load | Hold | Add | Update | Skip | Acknowledge | Answer
