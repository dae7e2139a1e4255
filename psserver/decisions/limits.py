"""Bounds of a shard: memory for tables, and bytes under way.

A table is refused before its memory is allocated, and a payload before it is received. A peer that
requests weights without reading them is disconnected. Each refusal says how much was wanted and how
much is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.errors import LimitError

UNDER_WAY_NBYTES = 4 << 30
KEEP_ENDED_S = 3600.0
KEEP_INTERRUPTED_S = 7 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one shard.

    Attributes:
        memory_nbytes: For the tables of all jobs: weights, state and sums. None: no bound.
        is_kept: Whether tables outlive the process: then they need memory for state and sums twice.
        keep_ended_s: How long a job that has ended is kept, in seconds.
        keep_interrupted_s: How long a job without workers that could continue is kept, in seconds.
        under_way_nbytes: Payloads that are being received or wait for their turn, and answers that
            wait for slow readers; those of the socket data plane.
    """

    memory_nbytes: int | None = None
    is_kept: bool = False
    under_way_nbytes: int = UNDER_WAY_NBYTES
    keep_ended_s: float = KEEP_ENDED_S
    keep_interrupted_s: float = KEEP_INTERRUPTED_S

    def has_room(self, wanted: int, held: int) -> bool:
        """Returns whether `wanted` bytes may be taken beside those that are held."""
        return self.memory_nbytes is None or held + wanted <= self.memory_nbytes

    def require_memory(self, what: str, wanted: int, held: int) -> None:
        """Checks that a table fits into the memory of the shard.

        Args:
            wanted: Bytes that it needs.
            held: Bytes in use by the tables of this shard.

        Raises:
            LimitError: It does not fit.
        """
        if self.memory_nbytes is not None and not self.has_room(wanted, held):
            raise LimitError(
                f"{what} needs {wanted} bytes of memory, {max(0, self.memory_nbytes - held)} of "
                f"{self.memory_nbytes} are left (memory_mb); `psserver jobs` shows which jobs have "
                "them, `psserver forget JOB` frees one"
            )
