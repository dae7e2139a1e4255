"""How `psserver` ends: its exit codes, and the error that carries one."""

from __future__ import annotations

import enum

from pscore.errors import PacelineError


class Exit(enum.IntEnum):
    """Exit codes of every `psserver` command; `MEANINGS` says what they mean."""

    OK = 0
    UNHEALTHY = 1
    USAGE = 2
    PORT_TAKEN = 3
    NOT_PERMITTED = 4
    STATE_DIR = 5
    NO_ANSWER = 6
    ALREADY_RUNNING = 7
    SHARD_DIED = 8
    BUG = 9
    HOST = 10
    ACCESS = 11
    OUTPUT = 74
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.UNHEALTHY: "refused by the shards; health: one is not ready; doctor: a problem",
    Exit.USAGE: "a flag, variable or configuration file is wrong",
    Exit.PORT_TAKEN: "another process listens on a port",
    Exit.NOT_PERMITTED: "permission denied for a port or a signal",
    Exit.STATE_DIR: "a directory for state, runs, checkpoints or certificates cannot be used",
    Exit.NO_ANSWER: "no shard answers at an address, or none runs here; publish: no version came",
    Exit.ALREADY_RUNNING: "servers already run on this port",
    Exit.SHARD_DIED: "a shard died, or did not start or stop in time",
    Exit.BUG: "an invariant is violated: please report it with the log",
    Exit.HOST: "the host is not an address of this machine",
    Exit.ACCESS: "a shard refused access: token, certificate, or TLS on one side only",
    Exit.OUTPUT: "standard output cannot be written",
    Exit.INTERRUPTED: "interrupted by Ctrl-C",
}


class CommandError(PacelineError):
    """A command cannot do what it was asked to; the process ends with `code`."""

    def __init__(self, code: Exit, problem: str, remedy: str = "") -> None:
        """Carries an exit code and one sentence for a person, perhaps with a remedy."""
        self.code, self.problem, self.remedy = code, problem, remedy
        self.message = f"{problem}; {remedy}" if remedy else problem
        super().__init__(self.message)
