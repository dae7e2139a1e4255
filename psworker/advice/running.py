"""The situation of a job that runs, from the counts of its workers; nothing is probed.

Computing is the seconds of a step without its waits, as each worker reports them. The link carries
at least the bytes of a step over the time in which pushes or pulls were under way: a lower bound,
which is named as such, unless `--gbit` gives the bandwidth.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from pscore.errors import ConfigError, ServerUnavailableError
from pscore.net.addresses import explain_silence
from pscore.net.credentials import Credentials
from pscore.net.wire import FLOAT_NBYTES
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from pscore.table_names import BESIDE, next_name
from pscore.text import counted
from pscore.timing.deployment import GBIT
from pscore.timing.shown import in_ms, three_figures
from pscore.timing.waiting import PaceSums, advice_line
from psworker.advice.situation import (
    GBIT_MAX,
    OPTIMIZER,
    Situation,
    Sourced,
    read_situation,
)
from psworker.connection.accounts.pace import sums_of

ASK_TIMEOUT_S = 10.0
LIVE = "live"
UNEQUAL = 1.15  # A worker that computes for so many times the median is slow.
GBIT_LEAST = 1e-3  # Taken for links that have carried next to nothing.
STEPS_MIN = 3  # Steps that each worker has to have made.


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob:
    """A job as its shards know it."""

    name: str
    mode: str
    optimizer: str  # Optimizer of its shards.
    nbytes: int  # Bytes of its weights.
    hosts: Sequence[str]  # Host of each live worker; if none is live, of each that was.
    paces: Sequence[PaceSums]  # Sums of the same workers, in the same order.
    moved_nbytes: int  # Bytes pushed and pulled by all workers so far.
    has_ended: bool = False  # Whether no worker is live.
    has_rows: bool = False  # Whether it trains row tables.

    @property
    def is_ready(self) -> bool:
        """Whether each worker has made enough steps to say something."""
        return bool(self.paces) and all(pace.num_steps >= STEPS_MIN for pace in self.paces)

    @property
    def step_s(self) -> float:
        """Seconds of a step, of the slowest worker."""
        return max(pace.mean_s for pace in self.paces)


def read_job(addresses: Sequence[str], credentials: Credentials, name: str) -> ObservedJob:
    """Asks every shard for a job.

    Raises:
        ServerUnavailableError: A shard does not answer.
        ConfigError: There is no such job, or nothing that it trains.
    """
    parts: list[pb.JobStatus] = []
    for address in addresses:
        with credentials.channel(address) as channel:
            try:
                reply = control_pb2_grpc.ControlStub(channel).Status(
                    pb.StatusRequest(), timeout=ASK_TIMEOUT_S
                )
            except grpc.RpcError as failure:
                remedy = explain_silence(address) or (
                    "start the shards with `psserver start`, or correct --servers"
                )
                raise ServerUnavailableError(
                    f"the shard at {address} does not answer; {remedy}"
                ) from failure
        found = [job for job in reply.jobs if job.job == name]
        if not found:
            names = ", ".join(sorted(job.job for job in reply.jobs)) or "none"
            raise ConfigError(f"no job {name!r} at {address}; there are {names}")
        parts += found
    every = [table for part in parts for table in part.tables if table.nbytes]
    tables = _of_step(every)
    if not tables:
        raise ConfigError(f"job {name!r} has declared no model yet")
    largest = max(tables, key=lambda table: table.nbytes)
    live = [worker for worker in parts[0].workers if worker.state == LIVE]
    workers = live or [worker for worker in parts[0].workers if worker.pace.num_steps]
    return ObservedJob(
        name=name,
        mode=largest.mode,
        optimizer=largest.optimizer,
        nbytes=sum(table.nbytes for table in tables),
        hosts=[worker.host for worker in workers],
        paces=[sums_of(worker.rank, worker.pace) for worker in workers],
        has_ended=not live,
        moved_nbytes=sum(part.pushed_nbytes + part.pulled_nbytes for part in parts),
        has_rows=any(BESIDE in table.name for table in every),
    )


def _of_step(tables: Sequence[pb.TableStatus]) -> list[pb.TableStatus]:
    """Returns the tables that a step moves whole: no row tables, and none that has grown since."""
    names = {table.name for table in tables}
    return [one for one in tables if BESIDE not in one.name and next_name(one.name) not in names]


def situation_of_job(
    job: ObservedJob,
    gbit: float | None,
    *,
    tls: bool = False,
    latency_ms: float | None = None,
    overlap: bool = True,
    on_gpu: bool | None = None,
) -> Situation:
    """Returns the situation of a job that runs.

    Args:
        gbit: Bandwidth of each host's link in 10^9 bit/s; None: as much as it has carried.
        latency_ms: Round trip in ms; None: it is assumed.
        on_gpu: Whether the model is on a GPU; None: that is assumed.

    Raises:
        ConfigError: Its workers have made too few steps.
    """
    if not job.is_ready:
        when = "before they were gone" if job.has_ended else "yet: ask later"
        raise ConfigError(
            f"the workers of job {job.name!r} have made fewer than {1 + STEPS_MIN} steps {when}"
        )
    computing = sorted(pace.step_s for pace in job.paces)
    median_s = computing[(len(computing) - 1) // 2]
    groups = tuple(Counter(job.hosts).values())
    measured = f"measured: job {job.name!r}" + (", whose workers are gone" if job.has_ended else "")
    carried, link = gbit, Sourced(f"{gbit} Gbit/s each way", "given")
    if carried is None:
        carried = min(max(GBIT_LEAST, _carried_gbit(job, len(groups))), GBIT_MAX)
        link = Sourced(
            f"at least {three_figures(carried)} Gbit/s each way",
            f"{measured}, bytes over the time with requests under way; --gbit gives the bandwidth",
        )
    situation = read_situation(
        model=str(job.nbytes // FLOAT_NBYTES),
        groups=groups,
        gbit=carried,
        compute_ms=1e3 * median_s,
        optimizer=job.optimizer or OPTIMIZER,
        tls=tls,
        latency_ms=latency_ms,
        overlap=overlap,
        on_gpu=on_gpu,
    )
    # A situation has the workers of one host next to each other, in any order of ranks.
    by_host = sorted(zip(job.hosts, job.paces, strict=True), key=lambda w: job.hosts.index(w[0]))
    slow = {
        place: pace.step_s / median_s
        for place, (_, pace) in enumerate(by_host)
        if pace.step_s > UNEQUAL * median_s
    }
    sources = situation.sources | {
        "parameters": Sourced(f"{situation.numel:,}", measured),
        "workers": Sourced(f"{len(job.hosts)} on {counted(len(groups), 'host')}", measured),
        "computing": Sourced(
            f"{in_ms(median_s)} a step, the slowest {in_ms(computing[-1])}", measured
        ),
        "a step now": Sourced(f"{in_ms(job.step_s)} in {job.mode}", measured),
        "waits": Sourced(advice_line(job.mode, job.paces) or "workers hardly wait", measured),
        "link": link,
        "optimizer": Sourced(situation.sources["optimizer"].value, measured),
        "connections": replace(
            situation.sources["connections"], source="PACELINE_TLS_CA, or --tls"
        ),
    }
    return replace(situation, slow=slow, sources=sources)


def require_dense(job: ObservedJob, what: str) -> None:
    """Raises ConfigError for row tables: a step sends the rows of its batch, not the model."""
    if job.has_rows:
        raise ConfigError(
            f"{what} trains row tables, of which a step sends only the rows that it touches: "
            "advice is for dense models (docs/rows.md)"
        )


def _carried_gbit(job: ObservedJob, num_hosts: int) -> float:
    """Returns what the links of hosts have carried at least, in 10^9 bit/s, each way."""
    requests_s = sum(pace.requests_s for pace in job.paces) / len(job.paces)
    steps = max(pace.num_steps for pace in job.paces)
    if requests_s <= 0 or not steps:
        return 0.0
    way = job.moved_nbytes / 2 / num_hosts
    return way / requests_s / GBIT


def await_job(
    addresses: Sequence[str], credentials: Credentials, name: str, is_over: Callable[[], bool]
) -> ObservedJob | None:
    """Returns a job's last state, asked until `is_over`; None: it has none."""
    newest: ObservedJob | None = None
    while not is_over():
        try:
            found = read_job(addresses, credentials, name)
        except (ConfigError, ServerUnavailableError):
            found = None
        if found is not None and found.paces:
            newest = found
            if found.has_ended:
                break
        time.sleep(0.5)
    return newest
