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
        self, rule: Rule, clocks: SliceClocks, holds: Callable[[int], bool]
    ) -> list[tuple[Token, Pull]]:
        """Removes and returns the pulls that can be answered, in the order of their arrival.

        Args:
            rule: The table's mode.
            clocks: The state of the slice that the mode decides by.
            holds: Whether a worker that trains waits for the open step too.
        """
        ready = [
            (token, pull)
            for token, pull in self.items()
            if rule.readable(clocks, pull.worker, pull.clock, pull.min_version)
            and (pull.is_look or pull.begins or not pull.clock or not holds(pull.worker))
        ]
        for token, _ in ready:
            del self[token]
        return ready
