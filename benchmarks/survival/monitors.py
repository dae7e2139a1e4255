"""Monitors of the kill loop: probes of each shard's health, and the checkpoints of the job.

Both look at the whole run. A delay counts where no fault excuses it: a shard that is killed or
stopped answers no probe, and no checkpoint is written without all shards and a disk. All else, such
as thousands of idle connections or stopped workers, must delay neither.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import measured
from benchmarks.survival.injector import DISK, FIGURES, Absence, FaultInjector, monitor, role
from benchmarks.survival.shards import CHECKPOINT_S, JOB
from pscore.net.rpc import CHANNEL_OPTIONS

PROBE_S_MAX = 1.0  # Target for the slowest probe.
GAP_S_MAX = 2.0 * CHECKPOINT_S  # Target for the time between two checkpoints.
EVERY_S = 0.25  # From the answer to a probe to the next one of the same kind.
AGAIN_S = 0.02  # From a connection that is refused or closed to the next one.
TRY_S = 10.0  # For one connection.
LOOK_S = 0.1  # Between two looks at the folder of checkpoints.
FIGURES |= {"probes": 0, "probes_again": 0, "probe_s_max": 0.0, "checkpoint_gap_s_max": 0.0}


# ----- probes


class Probe(NamedTuple):
    """One probe of a shard: the time until it had an answer, in as many tries as that needed."""

    shard: int
    began_s: float  # Of the machine's monotonic clock.
    took_s: float
    tries: int


@role
def prober(host: str, addresses: Sequence[str], pages: Sequence[int]) -> None:
    """Probes shards until a line of standard input comes, and prints the probes.

    Args:
        host: Host of the shards.
        addresses: Addresses of the shards.
        pages: Ports of their metrics pages.
    """
    over = threading.Event()
    probes: list[Probe] = []

    def watch(shard: int, ask: Callable[[], None]) -> None:
        while not over.is_set():
            began_s, tries = time.monotonic(), 0
            is_answered = False
            while not (is_answered or over.is_set()):
                tries += 1
                try:
                    ask()
                    is_answered = True
                except (OSError, http.client.HTTPException, grpc.RpcError):
                    over.wait(AGAIN_S)
            probes.append(Probe(shard, began_s, time.monotonic() - began_s, tries))
            over.wait(EVERY_S)

    threads = []
    for shard, (address, page) in enumerate(zip(addresses, pages, strict=True)):
        for ask in (_ask_page(host, page), _ask_health(address)):
            threads.append(threading.Thread(target=watch, args=(shard, ask)))
    for thread in threads:
        thread.start()
    measured.await_go()
    over.set()
    for thread in threads:
        thread.join()
    measured.report({"probes": probes})


def _ask_page(host: str, port: int) -> Callable[[], None]:
    """Returns a function that asks a metrics page for `/healthz`, over a new connection."""

    def ask() -> None:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=TRY_S)) as page:
            page.request("GET", "/healthz")
            page.getresponse().read()

    return ask


def _ask_health(address: str) -> Callable[[], None]:
    """Returns a function that asks the health service of gRPC, over a new connection."""

    def ask() -> None:
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=TRY_S)

    return ask


@monitor
@contextlib.contextmanager
def probe_health(injector: FaultInjector) -> Iterator[None]:
    """Probes all shards from a process of its own."""
    shards = injector.cluster.shards
    arguments = {"host": shards.host, "addresses": shards.addresses, "pages": shards.pages}
    with injector.role("prober", arguments) as (process,):
        process.line()
        yield
        process.tell()
        found = [Probe(*each) for each in process.line()["probes"]]
    counted = unexcused(found, injector.absences)
    injector.figures["probes"] = len(counted)
    injector.figures["probes_again"] = sum(probe.tries > 1 for probe in counted)
    injector.figures["probe_s_max"] = max((probe.took_s for probe in counted), default=0.0)


def unexcused(probes: Sequence[Probe], absences: Sequence[Absence]) -> list[Probe]:
    """Returns the probes during which their shard was not away."""
    return [
        probe
        for probe in probes
        if not any(
            absence.name == f"shard {probe.shard}"
            and absence.from_s < probe.began_s + probe.took_s
            and probe.began_s < absence.to_s
            for absence in absences
        )
    ]


# ----- checkpoints


@monitor
@contextlib.contextmanager
def watch_checkpoints(injector: FaultInjector) -> Iterator[None]:
    """Notes when the scheduled checkpoints of the job come."""
    folder = injector.cluster.state / "checkpoints"
    name = re.compile(re.escape(JOB) + r"-\d+")
    over = threading.Event()
    times: list[float] = []
    seen: set[str] = set()

    def watch() -> None:
        while not over.wait(LOOK_S):
            found = {path.name for path in folder.glob("*") if name.fullmatch(path.name)}
            if found - seen:
                times.append(time.monotonic())
                seen.update(found)

    thread = threading.Thread(target=watch)
    began_s = time.monotonic()
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    gap_s = longest_gap(times, began_s, time.monotonic(), injector.absences)
    injector.figures["checkpoint_gap_s_max"] = gap_s


def longest_gap(
    times: Sequence[float], began_s: float, ended_s: float, absences: Sequence[Absence]
) -> float:
    """Returns the longest time without a checkpoint in which no shard and no disk was away.

    Args:
        times: Times of the checkpoints, in order.
        began_s: Begin of the run.
        ended_s: Its end.
        absences: Times in which something was away.
    """
    excuses = sorted(
        (absence.from_s, absence.to_s)
        for absence in absences
        if absence.name == DISK or absence.name.startswith("shard")
    )
    longest_s = 0.0
    for from_s, to_s in [*excuses, (ended_s, ended_s)]:
        inside = [began_s, *(t for t in times if began_s < t < from_s), from_s]
        gaps = (later - earlier for earlier, later in itertools.pairwise(inside))
        longest_s = max(longest_s, *gaps)
        began_s = max(began_s, to_s)
    return longest_s
