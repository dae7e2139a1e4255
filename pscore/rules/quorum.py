"""Rounds that close with a quorum of workers and a window: the server half of decoupled rounds.

Decoupled DiLoCo, arXiv:2604.21428 (abstract): learners push what their weights have moved, and a
synchroniser steps with the learners that are in, once a least number of them is and a grace window
is over. The form of the window is Paceline's own (psserver/decisions/window.py).

    round r closes when all workers are in; or when K are in and its window is over
    D = sum_i n_i D_i / sum_i n_i         over the moves that are in, n_i: the weight of a move
    a move that comes later               enters the round that is open then

The later move was measured from the weights that its worker had, and its worker does not wait for
the update that it enters. Nobody waits for a worker that is slow, dead or on its way.
"""

from __future__ import annotations

from pscore.errors import ConfigError
from pscore.plugins import require_range
from pscore.rules.ssgd import WithBackup

ADAPTIVE = -1.0  # A window that follows the spread of arrivals.
WINDOW_MAX_S = 86400.0


class WithQuorum(WithBackup):
    """The server half of a mode by step whose rounds may close with some of the workers.

    `quorum` and `window` are fields of the mode, beside `backup`.
    """

    quorum: int
    window: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(f"{self.name}.quorum", self.quorum, 0, 4096)
        if self.window != ADAPTIVE:
            require_range(f"{self.name}.window", self.window, 0.0, WINDOW_MAX_S)
            if not self.quorum:
                raise ConfigError(
                    f"{self.name}.window is {self.window:g} without a quorum: a round then waits "
                    f"for all workers; give {self.name}.quorum, the least number of them"
                )
        if self.quorum and self.backup:
            raise ConfigError(
                f"{self.name}.quorum is {self.quorum} and {self.name}.backup is {self.backup}: a "
                "late move enters the next round (quorum) or is dropped (backup); give one of them"
            )

    def require_workers(self, num_workers: int) -> None:
        """Raises ConfigError for a quorum of more workers than the job has."""
        super().require_workers(num_workers)
        if self.quorum > num_workers:
            raise ConfigError(
                f"{self.name}.quorum is {self.quorum}, must be at most the {num_workers} workers"
            )

    @property
    def window_s(self) -> float | None:
        """The window of a round with a quorum, in seconds; negative: it follows the arrivals."""
        return self.window if self.quorum else None

    def least(self, num_expected: int, num_workers: int) -> int:
        """The quorum, or everybody if fewer are left."""
        if not self.quorum:
            return self.fan_in(num_expected, num_workers)
        return min(num_expected, self.quorum)
