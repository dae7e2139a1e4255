"""State machines of a move: the process that gives a shard away, and the one that takes it.

    giver   SERVING --start--> COPYING --copied--> FOLLOWED --freeze--> FROZEN --give--> GIVEN
               ^-------- give_up ---+-----------------+-------------------+    --begun--> MOVED
    taker   EMPTY --offer--> TAKING --prepare--> PREPARED --begin--> SERVING
                                ^----- offer ---------+

PREPARED and GIVEN hold beyond the death of a process, because files say so: PREPARED (the taker
has all of it), and GIVEN (the giver never serves again). A taker is only told to begin by a giver
that is GIVEN, and a giver becomes GIVEN only when the taker is PREPARED. So at every moment at most
one of the two answers workers, whichever of them is killed; a giver that is GIVEN repeats `begin`
until it is answered, also in its next process.

A standby is a taker that stays FOLLOWING, and a giver that stays FOLLOWED: everything that is
answered is on both. A person may promote the standby, or a register lets it take over
(succession.py). So a giver that cannot reach it any more, or one that was killed meanwhile
(ASKING), answers nothing until it knows that the standby does not serve, nor will.

    giver   FOLLOWED ---------+---- the standby does not ---> SERVING
            killed --> ASKING +---- the standby serves ---> GIVEN
    taker   TAKING --follow--> FOLLOWING --prepare--> PREPARED       FOLLOWING --release--> EMPTY
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pscore.errors import RemoteProtocolError


class Giver(enum.Enum):
    """The phases of the process that has the shard."""

    SERVING = "serving"
    COPYING = "copying"
    FOLLOWED = "followed"
    ASKING = "asking"
    FROZEN = "frozen"
    GIVEN = "given"
    MOVED = "moved"


class Taker(enum.Enum):
    """The phases of the process that gets it."""

    EMPTY = "empty"
    TAKING = "taking"
    FOLLOWING = "following"
    PREPARED = "prepared"
    SERVING = "serving"


@dataclass(slots=True)
class Giving:
    """The decisions of the process that has the shard."""

    phase: Giver

    @staticmethod
    def resumed(*, is_given: bool, has_standby: bool = False) -> Giving:
        """Returns the state of a new process, from the marks that the one before it has left."""
        if is_given:
            return Giving(Giver.GIVEN)
        return Giving(Giver.ASKING if has_standby else Giver.SERVING)

    @property
    def serves(self) -> bool:
        """Whether requests of workers are answered here."""
        return self.phase in (Giver.SERVING, Giver.COPYING, Giver.FOLLOWED)

    def start(self) -> None:
        """Begins to copy; raises RemoteProtocolError if the shard is being moved, or has been."""
        if self.phase is not Giver.SERVING:
            raise RemoteProtocolError(f"this shard cannot be moved now: it is {self.phase.value}")
        self.phase = Giver.COPYING

    def copied(self) -> None:
        """Notes that the taker has all slices, and gets each change before it is answered."""
        assert self.phase is Giver.COPYING
        self.phase = Giver.FOLLOWED

    def freeze(self) -> None:
        """Ends the answers to workers, until the move succeeds or is given up."""
        assert self.phase is Giver.FOLLOWED
        self.phase = Giver.FROZEN

    def give_up(self) -> None:
        """Returns to workers; only before the shard is given."""
        assert self.phase in (Giver.COPYING, Giver.FOLLOWED, Giver.FROZEN, Giver.ASKING)
        self.phase = Giver.SERVING

    def lose(self) -> None:
        """Gives the shard to a standby that was promoted."""
        assert self.phase in (Giver.FOLLOWED, Giver.FROZEN, Giver.ASKING)
        self.phase = Giver.GIVEN

    def give(self) -> None:
        """Gives the shard away for good: the taker is prepared, and the mark is written."""
        assert self.phase is Giver.FROZEN
        self.phase = Giver.GIVEN

    def begun(self) -> None:
        """Notes that the taker serves."""
        assert self.phase is Giver.GIVEN
        self.phase = Giver.MOVED


@dataclass(slots=True)
class Taking:
    """The decisions of the process that gets the shard.

    Attributes:
        id: The move that it takes part in; empty: none yet.
        is_ending: Whether the process is about to end, and takes no shard any more.
    """

    phase: Taker
    id: str = ""
    is_ending: bool = False

    @staticmethod
    def resumed(prepared: str, taken: str) -> Taking:
        """Returns the state of a new process, from the marks that the one before it has left.

        Args:
            prepared: The move that is complete here and has not begun; empty: none.
            taken: The last move that has begun here; empty: none.
        """
        if prepared:
            return Taking(Taker.PREPARED, prepared)
        return Taking(Taker.SERVING, taken) if taken else Taking(Taker.EMPTY)

    def offer(self, move: str, *, has_jobs: bool) -> None:
        """Begins to take a move; an earlier one that was not begun is dropped.

        Raises:
            RemoteProtocolError: This process has jobs of its own, or is about to end.
        """
        self.require_staying()
        if has_jobs:
            raise RemoteProtocolError("the process that is to take the shard has jobs of its own")
        self.phase, self.id = Taker.TAKING, move

    def require_staying(self) -> None:
        """Raises RemoteProtocolError if the process is about to end."""
        if self.is_ending:
            raise RemoteProtocolError("the process that is to take the shard is about to end")

    def require(self, move: str) -> None:
        """Raises RemoteProtocolError for pieces of another move."""
        if self.phase not in (Taker.TAKING, Taker.FOLLOWING) or self.id != move:
            raise RemoteProtocolError(f"no move {move!r} is taken here: it is {self.phase.value}")

    def follow(self, move: str) -> None:
        """Notes that all of the shard is here, and that each change comes before its answer."""
        self.require(move)
        self.phase = Taker.FOLLOWING

    def waits_for(self, move: str) -> bool:
        """Whether this is a standby that has everything of a move, and does not serve."""
        return self.id == move and self.phase in (Taker.FOLLOWING, Taker.PREPARED)

    def release(self) -> bool:
        """Forgets the shard, unless it is served here; returns whether it is."""
        if self.phase is not Taker.SERVING:
            self.phase, self.id = Taker.EMPTY, ""
        return self.phase is Taker.SERVING

    def require_promotable(self, *, was_standby: bool) -> None:
        """Refuses a promotion of a process that lacks something.

        Args:
            was_standby: Whether the move that is complete here was a standby's before.

        Raises:
            RemoteProtocolError: It is no standby, or has not got all of the shard yet.
        """
        if self.phase is not Taker.FOLLOWING and not (was_standby and self.phase is Taker.PREPARED):
            raise RemoteProtocolError(
                f"this process is no standby that has everything: it is {self.phase.value}"
            )

    def prepare(self, move: str) -> None:
        """Notes that all of the move is here, and that the mark is written."""
        self.require(move)
        self.phase = Taker.PREPARED

    def begin(self, move: str) -> bool:
        """Decides to serve; returns False if it does so already.

        Raises:
            RemoteProtocolError: The move is not complete here.
        """
        if self.id != move or self.phase not in (Taker.PREPARED, Taker.SERVING):
            raise RemoteProtocolError(
                f"move {move!r} is not complete here: it is {self.phase.value}"
            )
        was_serving, self.phase = self.phase is Taker.SERVING, Taker.SERVING
        return not was_serving


def is_free(giving: Giving, taking: Taking, *, begins_here: bool, has_jobs: bool) -> bool:
    """Returns whether one of a shard's two places is to be the standby of the other one.

    That is so where the shard is elsewhere, and not given to this process. A copy that is on its
    way is asked for again: the process that sent it may have been killed, and know nothing of it.

    Args:
        begins_here: Whether the shard begins at this place.
        has_jobs: Whether this process has jobs; those that have moved do not count.
    """
    if taking.is_ending:
        return False
    if giving.phase is Giver.MOVED:
        return taking.phase in (Taker.EMPTY, Taker.TAKING, Taker.SERVING)
    is_new = giving.phase is Giver.SERVING and taking.phase in (Taker.EMPTY, Taker.TAKING)
    return is_new and not (begins_here or has_jobs)
