"""Kills that fall into a moment of a process: it sends again, rejoins, starts, or saves.

Such a process stops in a moment while a file asks for it, and reports by another file that it has
come there. So a shard is killed exactly then, and not at a random time. The shard that has run
longest is killed: the supervisor waits before it restarts one that was killed again and again.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.survival.cluster import Cluster
from benchmarks.survival.faults import kill_shard, kill_worker
from benchmarks.survival.injector import FIGURES, Damage, FaultInjector, fault, role
from benchmarks.survival.shards import JOB
from pscore.net.channel import FrameChannel
from pscore.net.credentials import ANYONE
from psserver.exits import CommandError
from psserver.remote import checkpoint
from psworker.connection.membership.session import Session

HOLD_S_MAX = 60.0  # Longest time for which a process stays in a moment.
RESEND_KILLS_MAX = 3
POLL_S = 0.005
# The function that a process is about to call in each moment, and whether these arguments count.
MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "resend": (FrameChannel, "_resume", lambda channel, stream: bool(channel._open)),
    "join": (Session, "_declare", lambda *given, **options: True),
    "checkpoint": (checkpoint, "_read", lambda *given: True),
}
COUNTS = {  # Figures of the kills, and the words for the moments.
    "resend_kills": "resends",
    "rejoin_kills": "rejoins",
    "constructor_kills": "constructors",
    "checkpoint_kills": "checkpoints",
}
FIGURES |= dict.fromkeys(COUNTS, 0)


# ----- in a process that stops


def attach(folder: Path, rank: int) -> None:
    """Makes this process stop in the moments that the injector asks for.

    Args:
        folder: Holds the files that ask for it.
        rank: Number of this process, by which the files name it.
    """
    for moment, (where, name, counts) in MOMENTS.items():
        hold = folder / f"hold-{moment}-{rank}"
        setattr(where, name, _stopping(hold, getattr(where, name), counts))


def _stopping(hold: Path, real: Callable[..., Any], counts: Callable[..., bool]) -> Any:
    def stopping(*given: Any, **options: Any) -> Any:
        if hold.exists() and counts(*given, **options):
            hold.with_suffix(".reached").touch()
            end_s = time.monotonic() + HOLD_S_MAX
            while hold.exists() and time.monotonic() < end_s:
                time.sleep(POLL_S)
        return real(*given, **options)

    return stopping


@role
def saver(folder: str, addresses: Sequence[str]) -> dict[str, bool]:
    """Reads a checkpoint of the job, and drops it; returns whether all shards gave their parts."""
    attach(Path(folder), 0)
    try:
        checkpoint.capture(addresses, ANYONE, JOB, weights_only=False)
    except CommandError:
        return {"is_whole": False}
    return {"is_whole": True}


# ----- in the injector


@contextlib.contextmanager
def _held(cluster: Cluster, moment: str, rank: int) -> Iterator[Path]:
    """Makes a process stop in a moment; yields the file that reports that it is there."""
    hold = cluster.folder / f"hold-{moment}-{rank}"
    reached = hold.with_suffix(".reached")
    reached.unlink(missing_ok=True)
    hold.touch()
    try:
        yield reached
    finally:
        hold.unlink(missing_ok=True)


def _oldest(cluster: Cluster) -> int:
    """Returns the shard whose process has run longest."""
    born: dict[int, float] = {}
    for index, pid in cluster.shards.pids().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            born[index] = psutil.Process(pid).create_time()
    return min(born, key=lambda index: born[index], default=0)


def _is_reached(cluster: Cluster, reached: Path, limit_s: float) -> bool:
    """Waits until a process has come to its moment; returns False after `limit_s` seconds."""
    end_s = time.monotonic() + limit_s
    while not reached.exists() and time.monotonic() < end_s:
        cluster.watch(POLL_S)
    return reached.exists()


def _kill_there(
    injector: FaultInjector, reached: Path, figure: str, index: int, *ended: str
) -> Damage:
    """Kills a shard once a process has come to its moment.

    Args:
        injector: Counts the kill.
        reached: The file that reports that the process is there.
        figure: Name of the count.
        index: The shard.
        ended: Processes that the fault has ended before.
    """
    is_there = _is_reached(injector.cluster, reached, HOLD_S_MAX)
    killed = kill_shard(injector, index)
    injector.figures[figure] += bool(is_there and killed.what)
    what = ", ".join(dict.fromkeys([*ended, killed.what]))
    return Damage(what=what, wanted=injector.everything(), ended=[*ended, *killed.ended])


@fault("kill in a resend", "a shard is killed again while a worker sends again")
def kill_in_resend(injector: FaultInjector) -> Damage:
    """SIGKILL of a shard, and of its successor while a worker sends to it again.

    A worker whose lease is over before it is connected rejoins instead, with nothing to send again;
    then the shard is killed once more.
    """
    cluster, index = injector.cluster, _oldest(injector.cluster)
    ended: list[str] = []
    with _held(cluster, "resend", injector.rng.randrange(cluster.setup.workers)) as reached:
        for _ in range(RESEND_KILLS_MAX):
            before = cluster.alive()
            killed = kill_shard(injector, index).ended
            ended += killed
            cluster.await_successors({name: before[name] for name in killed if name in before})
            if _is_reached(cluster, reached, HOLD_S_MAX):
                break
        return _kill_there(injector, reached, "resend_kills", index, *ended)


@fault("kill in a rejoin", "a worker loses its lease, and a shard is killed while it rejoins")
def kill_in_rejoin(injector: FaultInjector) -> Damage:
    """SIGSTOP of a worker beyond its lease, then SIGKILL of a shard while it rejoins."""
    cluster = injector.cluster
    rank = injector.rng.randrange(cluster.setup.workers)
    process = cluster.roles[rank].popen
    with _held(cluster, "join", rank) as reached:
        process.send_signal(signal.SIGSTOP)
        cluster.watch(2.0 * cluster.setup.lease_s)
        process.send_signal(signal.SIGCONT)
        return _kill_there(injector, reached, "rejoin_kills", _oldest(cluster))


@fault("kill in a constructor", "a worker is started again, and a shard is killed while it joins")
def kill_in_constructor(injector: FaultInjector) -> Damage:
    """SIGKILL of a worker, then of a shard while the worker's successor declares its table."""
    cluster = injector.cluster
    rank = injector.rng.randrange(cluster.setup.workers)
    with _held(cluster, "join", rank) as reached:
        killed = kill_worker(injector, rank)
        return _kill_there(injector, reached, "constructor_kills", _oldest(cluster), *killed.ended)


@fault("kill in a checkpoint", "a shard is killed while a checkpoint is read from it")
def kill_in_checkpoint(injector: FaultInjector) -> Damage:
    """SIGKILL of a shard that has copied its slices and has yet to send them."""
    cluster = injector.cluster
    arguments = {"folder": str(cluster.folder), "addresses": cluster.shards.addresses}
    with injector.role("saver", arguments) as (process,):
        with _held(cluster, "checkpoint", 0) as reached:
            damage = _kill_there(injector, reached, "checkpoint_kills", _oldest(cluster))
        if process.result()["is_whole"] and reached.exists():
            cluster.failures.append("a checkpoint was taken, though a shard with copies had ended")
    return damage
