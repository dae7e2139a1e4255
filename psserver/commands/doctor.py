"""`psserver doctor`: checks the shards of this machine or at given addresses, and their files."""

from __future__ import annotations

from pathlib import Path

from pscore.errors import ConfigError
from pscore.observe import doctor
from pscore.observe.doctor import Finding
from psserver.commands.find import find, require_one_way
from psserver.exits import CommandError
from psserver.process.run_dir import RunDirectory


def examine(
    servers: str | None, port: int | None, state_dir: Path | None, job: str | None
) -> list[Finding]:
    """Looks at everything; a missing thing is a finding too.

    Args:
        port: Port of shard 0 on this machine.
        state_dir: As given to `start`.

    Raises:
        ConfigError: An argument would have no effect.
    """
    require_one_way(servers, port, state_dir)
    here = doctor.examine_machine(RunDirectory(state_dir).path)
    try:
        found = find(servers, port, state_dir)
    except (CommandError, ConfigError) as problem:
        what, _, do = str(problem).partition("; ")
        return [*here, doctor.wrong("shards", "here", what, do)]
    return [*here, *doctor.examine(found.addresses, found.credentials, job)]
