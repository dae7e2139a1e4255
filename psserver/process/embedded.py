"""Shards for one process: on free ports of this machine, gone when that process is, in any way."""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
from pathlib import Path

from pscore.errors import ConfigError
from pscore.json_text import to_json
from pscore.partition import SHARDS_MAX
from pscore.text import join_address
from psserver.access.files import Trust
from psserver.exits import CommandError, Exit
from psserver.process.shard_plan import PUBLISH_MBIT_MAX, Ready, ShardPlan, parse_every
from psserver.process.supervisor import ShardProcess, ended, stop, wait_ready

GRACE_S = 2.0
LEVELS = ("debug", "info", "warning", "error")
PARENT_POLL_S = 1.0


class EmbeddedServers:
    """Shards that this process has started; a context manager."""

    def __init__(self, shards: list[ShardProcess]) -> None:
        self._shards = shards
        self.addresses = [
            join_address(shard.plan.host, shard.report.port)
            for shard in shards
            if isinstance(shard.report, Ready)
        ]

    def stop(self) -> None:
        """Ends the shards; a second call does nothing."""
        shards, self._shards = self._shards, []
        stop(shards, GRACE_S)

    def require_alive(self) -> None:
        """Raises a `CommandError` if a shard has ended by itself."""
        for shard in self._shards:
            status = shard.wait(0)
            if status is not None:
                index = shard.plan.index
                raise CommandError(Exit.SHARD_DIED, f"embedded shard {index} {ended(status)}")

    def __enter__(self) -> EmbeddedServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_embedded(
    num_shards: int,
    *,
    host: str = "127.0.0.1",
    lease_s: float = 10.0,
    log_level: str = "error",
    trust: Trust | None = None,
    journal_dir: Path | None = None,
) -> EmbeddedServers:
    """Starts shards and returns when all of them answer.

    Args:
        lease_s: Silence until a worker is declared lost, in seconds.
        trust: Peers that may connect; None: all of this machine.
        journal_dir: Where they keep journals. By default nowhere, since a shard is not started
            again here.

    Raises:
        ConfigError: The number of shards, the log level or a variable is not one that there can be.
        CommandError: They could not be started.
    """
    if log_level not in LEVELS:
        raise ConfigError(f"log.level is {log_level!r}, must be one of {', '.join(LEVELS)}")
    if not 1 <= num_shards <= SHARDS_MAX:
        raise ConfigError(f"number of shards is {num_shards}, must be in 1..{SHARDS_MAX}")
    cluster = secrets.token_hex(4)
    publish, mbit = _published()
    plans = [
        ShardPlan(
            index=index,
            num_shards=num_shards,
            cluster=cluster,
            host=host,
            port=0,
            metrics_port=None,
            num_threads=max(1, (os.cpu_count() or 1) // num_shards),
            lease_s=lease_s,
            grace_s=GRACE_S,
            log_format="text",
            log_level=log_level,
            trust=Trust() if trust is None else trust,
            journal_dir=None if journal_dir is None else str(journal_dir),
            timeline=os.environ.get("PACELINE_TIMELINE"),
            publish=publish,
            publish_mbit=mbit,
        )
        for index in range(num_shards)
    ]
    shards: list[ShardProcess] = []
    is_ready = False
    try:
        for plan in plans:
            shards.append(ShardProcess(plan))
        is_ready = wait_ready(shards)
    finally:
        if not is_ready:
            stop(shards, 0.0)
    return EmbeddedServers(shards)


def _published() -> tuple[str, int]:
    """Returns what the environment says of published weights: the jobs, and the limit in Mbit/s."""
    jobs = os.environ.get("PACELINE_PUBLISH", "")
    parse_every(jobs)
    text = os.environ.get("PACELINE_PUBLISH_MBIT") or "0"
    if not text.isdecimal() or int(text) > PUBLISH_MBIT_MAX:
        raise ConfigError(
            f"PACELINE_PUBLISH_MBIT is {text!r}, must be a whole number of Mbit/s in "
            f"0..{PUBLISH_MBIT_MAX}; 0: no limit"
        )
    return jobs, int(text)


def serve_parent(
    num_shards: int, *, lease_s: float, log_level: str, has_token: bool = False
) -> None:
    """Runs `psserver embedded`: serves until standard input ends, or the parent is gone.

    Args:
        lease_s: Seconds of silence until a worker is lost.
        has_token: Make a token for these shards, in a file that only this user can read: loopback
            is open to every user of the machine.

    Raises:
        CommandError: The shards could not be started, or one has died.
    """
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides when its servers may go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.OK))
    trust = Trust(token_file=make_token() if has_token else None)
    _serve(num_shards, lease_s, log_level, trust, parent)


def _serve(num_shards: int, lease_s: float, log_level: str, trust: Trust, parent: int) -> None:
    with start_embedded(num_shards, lease_s=lease_s, log_level=log_level, trust=trust) as servers:
        ready = {"addresses": servers.addresses, "token_file": trust.token_file or ""}
        sys.stdout.write(to_json(ready) + "\n")
        sys.stdout.flush()
        while os.getppid() == parent:
            readable, _, _ = select.select([sys.stdin], [], [], PARENT_POLL_S)
            if readable and not os.read(sys.stdin.fileno(), 1 << 10):
                return
            servers.require_alive()


def make_token() -> str:
    """Makes a token for everything; returns the path of a file that holds it.

    The file is in memory, and processes of this user open it by the number of this process. So it
    goes with this process, however that ends, and leaves nothing behind.
    """
    fd = os.memfd_create("paceline-token")
    os.fchmod(fd, 0o600)
    os.write(fd, f"{secrets.token_hex(32)}\n".encode())
    return f"/proc/{os.getpid()}/fd/{fd}"
