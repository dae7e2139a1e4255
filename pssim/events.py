"""Events of a simulated run, each with its worker or shard and its time."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pscore.types import Verdict
from psserver.decisions.orders import Acknowledge, Answer, Update
from psserver.decisions.slice_clock import LOADS
from pssim.shard import Decision


class What(StrEnum):
    """The kinds of events, in the order of a gradient's way."""

    COMPUTE_STARTED = "compute started"
    COMPUTE_ENDED = "compute ended"
    PUSH_SENT = "push sent"
    PUSH_COUNTED = "push counted"  # The shard has decided which update it belongs to.
    PUSH_TOO_LATE = "push too late"  # The shard closed that step without it.
    UPDATED = "updated"
    PULL_SENT = "pull sent"
    PULL_ANSWERED = "pull answered"
    PULL_LANDED = "pull landed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event."""

    time_s: float  # Virtual time in seconds.
    who: str  # `worker 0` or `shard 0`: the process in which it happened.
    what: What  # Its kind.
    # Rank of the worker whose step, push or pull it is; None for an update.
    worker: int | None = None
    # The worker's step: of its own program for computing, of the wire for a push; None for a pull
    # and an update.
    step: int | None = None
    slice: int | None = None  # Slice of a push, pull or update; None for computing.
    # Version that an update makes, that a pull brings, or (`PULL_SENT`) that a pull waits for; None
    # for computing and pushes.
    version: int | None = None


class Recorder:
    """Collects the events of a run in the order in which they happen."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Starts empty; `now` returns the virtual time in seconds."""
        self.events: list[Event] = []
        self._left_out: set[int] = set()
        self._now = now

    def leave_out(self, worker: int) -> None:
        """Ignores a worker's events from now on: it only fetches the final weights."""
        self._left_out.add(worker)

    def decided(self, decision: Decision) -> None:
        """Records a shard's decision about a push, a pull or an update."""
        action, sender, index = decision.action, decision.sender, decision.slice
        if isinstance(action, Update):
            self.note(decision.shard, What.UPDATED, slice=index, version=action.version)
        elif sender is None or sender.role in LOADS:
            return
        elif isinstance(action, Acknowledge):
            is_late = action.verdict is Verdict.TOO_LATE
            what = What.PUSH_TOO_LATE if is_late else What.PUSH_COUNTED
            self.note(decision.shard, what, worker=sender.worker, step=sender.step, slice=index)
        elif isinstance(action, Answer):
            version = action.version
            self.note(
                decision.shard,
                What.PULL_ANSWERED,
                worker=sender.worker,
                slice=index,
                version=version,
            )

    def note(
        self,
        who: str,
        what: What,
        *,
        worker: int | None = None,
        step: int | None = None,
        slice: int | None = None,
        version: int | None = None,
    ) -> None:
        """Records one event at the current time."""
        if worker in self._left_out:
            return
        self.events.append(
            Event(
                time_s=self._now(),
                who=who,
                what=what,
                worker=worker,
                step=step,
                slice=slice,
                version=version,
            )
        )
