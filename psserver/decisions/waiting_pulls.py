"""The pulls of one slice that are not answered yet."""

from __future__ import annotations

from collections.abc import Callable

from pscore.rules.base import Rule, SliceClocks
from pscore.types import Pull
from psserver.decisions.progress import Token


class WaitingPulls(dict[Token, Pull]):
    """Pulls by token, in the order of their arrival; they wait for a version or for other workers.

    Invariant: none is readable once the clock has handled a message.
    """

    def take_readable(
        self, rule: Rule, clocks: SliceClocks, holds: Callable[[Pull], bool]
    ) -> list[tuple[Token, Pull]]:
        """Removes and returns the pulls that can be answered, in the order of their arrival.

        Args:
            clocks: The state of the slice that the mode decides by.
            holds: Whether the pull waits for a move of its own worker too.
        """
        ready = [
            (token, pull)
            for token, pull in self.items()
            if rule.readable(clocks, pull.worker, pull.clock, pull.min_version) and not holds(pull)
        ]
        for token, _ in ready:
            del self[token]
        return ready
