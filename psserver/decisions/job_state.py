"""The states of a job, in a file that a command reads without loading what a shard decides with."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """State of a job."""

    LIVE = "live"
    RESTORED = "restored"
    INTERRUPTED = "interrupted"
    ENDED = "ended"
