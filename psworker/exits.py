"""How `psworker` ends: its exit codes."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of every `psworker` command; `MEANINGS` explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_SHARDS = 6
    OUTPUT = 74
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done; run: every worker ended with 0",
    Exit.FAILED: "a shard refused a request, doctor found a problem, or the demo failed",
    Exit.USAGE: "a flag, variable or file is wrong",
    Exit.NO_SHARDS: "no shard answers, or the shards that were started for the job ended",
    Exit.OUTPUT: "standard output cannot be written",
    Exit.INTERRUPTED: "interrupted by Ctrl-C",
    Exit.TERMINATED: "ended by SIGTERM",
}
