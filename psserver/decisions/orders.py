"""The orders of a slice's clock (slice_clock.py), which its queue (slice_queue.py) executes."""

from __future__ import annotations

from dataclasses import dataclass

from pscore.types import HyperArray, Push, Role, Verdict
from psserver.decisions.progress import Token


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Take the weights (and state) in `token`'s payload as they are."""

    token: Token
    role: Role
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Keep `token`'s payload; it is added later. The sender's buffer must be free after this."""

    token: Token
    push: Push


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Make one optimizer step with an open step's sum times `scale`, and drop the sum."""

    open_step: int  # Key of the open step (`OpenStep.key`).
    scale: float
    present: int  # Bit i: segment i has a gradient; -1 for all.
    hyper: HyperArray
    version: int  # Version of the weights after it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Give the unchanged weights another version: no worker pushes the steps in between."""

    former: int  # Their version before.
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge:
    """Answer a push."""

    token: Token
    verdict: Verdict
    version: int
    push: Push | None = None  # One that has been counted, and will not be added.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer a pull with the weights as they are now."""

    token: Token
    worker: int
    version: int
    with_state: bool
    clock: int = 0  # Next step of a worker that has just (re)joined.
    counted: int = -1  # One more than the last step counted of its rank; -1: not asked.
    is_look: bool = False  # Only to be seen (`Pull.is_look`).


Action = Load | Hold | Add | Update | Skip | Acknowledge | Answer
