"""Shards that a process starts for its own job, on its machine; without torch, for the launcher."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from pscore.errors import ServerUnavailableError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnShards:
    """Shards of this process, and the file with their addresses for other local workers."""

    addresses: tuple[str, ...]
    process: subprocess.Popen[str]
    token_file: str = ""
    rendezvous: Path | None = None

    def end(self) -> None:
        """Ends the shards."""
        if self.rendezvous is not None:
            self.rendezvous.unlink(missing_ok=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def start_shards(num_shards: int = 1) -> OwnShards:
    """Starts shards that end when this process's end of the pipe closes.

    Raises:
        ServerUnavailableError: They did not start; their message is on standard error.
    """
    shards = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "psserver"),
            *("embedded", "--token", "--shards", str(num_shards)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the worker; the shard ends after it.
    )
    assert shards.stdin is not None
    assert shards.stdout is not None
    line = shards.stdout.readline()
    if not line:
        shards.stdin.close()
        shards.stdout.close()
        raise ServerUnavailableError(
            f"shards on this machine did not start (exit status {shards.wait()}); their message "
            "is above"
        )
    ready = json.loads(line)
    return OwnShards(
        addresses=tuple(ready["addresses"]), process=shards, token_file=ready["token_file"]
    )
