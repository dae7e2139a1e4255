"""The window of an open round: the time that it stays open for others once its quorum is in.

A state machine without a clock: the time comes with each arrival and each tick. A window of fixed
length is that long. One that adapts follows the spread of arrivals, which is how long after its
round's quorum the last worker came:

    latest   largest lateness that was heard since the last close, of those up to a quarter of a
             round; a worker that is later than that is not waited for
    spread   rises to `latest` at once, and falls to it by a quarter of the difference a round
    window   1.5 * spread, at most a quarter of a round

The length of a round is the time between closes, smoothed in the same way. Before one is known the
window is one second. Nothing of it outlives the process: after a restart it is learned again.
"""

from __future__ import annotations

from typing import NamedTuple

from pscore.rules.base import Rule

FIRST_S = 1.0  # Length of a round until one has been measured.
MARGIN = 1.5
PART = 0.25  # The longest window as a part of a round's length.
FALL = 0.25  # Share of a difference that a round makes up for.
KEPT = 64  # Rounds whose quorum's time is remembered, for the lateness of a move.


class Times(NamedTuple):
    """The times of a round that has closed, in seconds of the clock that `tick` gets."""

    opened_s: float | None  # Close of the round before; None: it was not heard.
    quorum_s: float  # Arrival of the quorum, which begins the window.
    closed_s: float


class Window:
    """The window of one slice's open round.

    Attributes:
        now_s: The newest time that was heard, in seconds. Invariant: never falls.
        num_late: Moves that came after their round had closed.
        elsewhere: Rounds below this one have closed in other slices, as a worker has told.
        closed: Times of the newest round that has closed; None: none has.
    """

    def __init__(self, length_s: float, *, holds_late: bool = True) -> None:
        """Starts before the first round.

        Args:
            length_s: Length of the window, in seconds; negative: it adapts.
            holds_late: Whether the pull of a worker whose move was late waits for the open round.
        """
        self.now_s = 0.0
        self._is_timed = False  # Whether a time was heard; after a restart none was.
        self.num_late = self.elsewhere = 0
        self.closed: Times | None = None
        self._fixed_s, self._holds_late = length_s, holds_late
        self._quorum_s: dict[int, float] = {}  # When each round had its quorum, by round.
        self._late_s: dict[int, float] = {}  # Arrivals of late moves in the open round, by worker.
        self._closed_s: float | None = None
        self._round_s: float | None = None  # Smoothed time from close to close.
        self._spread_s = self._latest_s = 0.0

    @classmethod
    def of(cls, rule: Rule) -> Window:
        """Returns the window of a mode.

        With fragments a late worker waits for no open round: it would wait once for each fragment,
        and meanwhile push none of the others, whose rounds may need it.
        """
        schedule = rule.schedule
        is_whole = schedule is None or schedule.number == 1
        return cls(rule.window_s or 0.0, holds_late=is_whole)

    @property
    def length_s(self) -> float:
        """The length of the open round's window, in seconds."""
        if self._fixed_s >= 0.0:
            return self._fixed_s
        if self._round_s is None:
            return FIRST_S
        return min(PART * self._round_s, MARGIN * self._spread_s)

    def left_s(self, step: int) -> float | None:
        """Returns the seconds until a round's window is over; None: it has no quorum yet."""
        if step not in self._quorum_s:
            return None
        return max(0.0, self._quorum_s[step] + self.length_s - self.now_s)

    def tick(self, now_s: float) -> None:
        """Records the time, in seconds."""
        self.now_s, self._is_timed = max(self.now_s, now_s), True

    def arrived(self, worker: int, step: int, version: int) -> None:
        """Notes that a move of round `step` has come while round `version` was open."""
        if step < version:
            self.num_late += 1
            self._late_s[worker] = self.now_s
        late_s = self.now_s - self._quorum_s.get(step, self.now_s)
        if self._round_s is None or late_s <= PART * self._round_s:
            self._latest_s = max(self._latest_s, late_s)

    def holds(self, worker: int) -> bool:
        """Returns whether a worker's pull waits for the round that its late move has entered.

        The weights before do not have the move. The pull waits no longer than a round takes: if the
        others have ended, nobody may close it.
        """
        if not self._holds_late or worker not in self._late_s:
            return False
        longest_s = FIRST_S if self._round_s is None else self._round_s
        return self.now_s - self._late_s[worker] < longest_s

    def closed_elsewhere(self, step: int) -> None:
        """Records that the rounds before `step` have closed in other slices.

        They had their quorum there, and the workers that made it may be gone.
        """
        self.elsewhere = max(self.elsewhere, step)

    def is_behind(self, step: int) -> bool:
        """Returns whether a round has closed in other slices."""
        return step < self.elsewhere

    def is_over(self, step: int) -> bool:
        """Returns whether the window of a round that has its quorum is over; opens it."""
        if not self._is_timed:
            return False
        self._quorum_s.setdefault(step, self.now_s)
        return self.left_s(step) == 0.0

    def close(self, step: int) -> None:
        """Notes that a round has closed, and measures the next window."""
        quorum_s = self._quorum_s.setdefault(step, self.now_s)
        self.closed = Times(self._closed_s, quorum_s, self.now_s) if self._is_timed else None
        self._quorum_s.pop(step - KEPT, None)
        self._spread_s = max(
            self._latest_s, self._spread_s + FALL * (self._latest_s - self._spread_s)
        )
        if self._closed_s is not None:
            took_s = self.now_s - self._closed_s
            former_s = took_s if self._round_s is None else self._round_s
            self._round_s = former_s + FALL * (took_s - former_s)
        self._closed_s, self._latest_s = self.now_s, 0.0
        self._late_s.clear()
