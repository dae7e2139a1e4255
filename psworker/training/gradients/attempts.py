"""Attempts at steps: the numbers of the rounds in which workers agree before they make a step.

Workers meet before a step to agree on it (scaling.py), or to exchange gradients (clipping.py). They
must number these rounds alike, also those that join or come back between a round and its step: to
these the round is over, and they use its result. A count of rounds would differ. So the number
consists of the life of the job, the clock of the step that follows, and how often all workers have
left this step out.
"""

from __future__ import annotations

from psworker.connection.membership.session import Session
from psworker.replica.replica import Replica

BITS = 12  # Bits of the attempts at one step.
CLOCK_BITS = 36


class Attempts:
    """Numbers the attempts of one worker at the steps of one table.

    Attributes:
        clipped: The last attempt in which this worker has exchanged gradients to clip them.
    """

    def __init__(self, session: Session, replica: Replica) -> None:
        """Starts at the first attempt at the replica's next step.

        Args:
            replica: Its clock is that of the next push.
        """
        self._session = session
        self._replica = replica
        self.clipped = -1
        self._step = -1  # Life and clock.
        self._attempt = 0

    @property
    def number(self) -> int:
        """The number of the next attempt; larger than those of all attempts before."""
        step = (self._session.known.life << CLOCK_BITS) + self._replica.next_push
        if step != self._step:
            self._step, self._attempt = step, 0
        return (self._step << BITS) + self._attempt

    def follow(self, newest: int) -> bool:
        """Skips to the newest attempt of the other workers, if it is one at the same step.

        Returns:
            Whether this worker was behind: the others have left out its attempt.
        """
        number = self.number
        if newest <= number or newest >> BITS != number >> BITS:
            return False
        self._attempt += newest - number
        return True

    def leave_out(self) -> None:
        """Records that all workers leave out the attempt."""
        self.follow(self.number + 1)
