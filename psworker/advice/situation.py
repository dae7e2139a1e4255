"""The situation of a person who asks: numbers that are given, measured or assumed, with sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pscore.errors import ConfigError
from pscore.optimizers import OPTIMIZERS
from pscore.text import counted
from pscore.timing.deployment import (
    FAR_S,
    GBIT,
    GPU_RATES,
    GPU_SOURCE,
    PACED,
    RATE_SOURCES,
    Deployment,
    MachineRates,
    cut_slices,
)
from pscore.timing.shown import in_ms
from psworker.advice.sizes import parse_model

WORKERS_MAX = 4096
GBIT_MIN, GBIT_MAX = 1e-4, 1e5
COMPUTE_MS_MIN, COMPUTE_MS_MAX = 1e-3, 1e7
TRIP_MS = 0.2
OPTIMIZER = "sgd"
ASSUMED, GIVEN = "assumed", "given"
PER_SHARD_MAX = 16  # Slices of a shard: of more the closed form knows nothing new.


@dataclass(frozen=True, slots=True)
class Sourced:
    """A number of the situation, as text, and where it comes from."""

    value: str
    source: str


ENCRYPTED, PLAIN = Sourced("TLS, but for those of ddp", GIVEN), Sourced("not encrypted", ASSUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Workers on hosts, links, a model, and the time that a step computes."""

    numel: int  # Parameters of the model.
    groups: tuple[int, ...]  # Workers of each host; with sites, of each site.
    link: float  # Nominal bytes per second of a host's link, each way; with sites, of a site's.
    # Bytes per second between two processes of a host or site; None: memory.
    near: float | None = None
    round_trip_s: float = TRIP_MS / 1e3  # Round trip between two hosts.
    compute_s: float  # Seconds of forward and backward of a worker.
    deviation: float = 0.0  # Standard deviation of them, over the mean.
    slow: dict[int, float] = field(default_factory=dict)  # Factors on `compute_s`, by worker.
    num_state: int = 1  # State arrays of the shards' optimizer.
    tls: bool = False  # Whether connections between hosts are encrypted.
    overlap: bool = True  # Whether pushes may leave during backward.
    has_sites: bool = False  # Whether `groups` are sites of several hosts.
    rates: MachineRates = GPU_RATES  # Costs of a machine.
    # Every number with its source, by name.
    sources: dict[str, Sourced] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        """Number of workers, processes with a GPU or CPU each."""
        return sum(self.groups)

    @property
    def worker_hosts(self) -> tuple[int, ...]:
        """The host of each worker."""
        return tuple(host for host, number in enumerate(self.groups) for _ in range(number))

    def deployment(self, shard_hosts: Sequence[int], *, grouped: bool = False) -> Deployment:
        """Returns the job with shards on these hosts.

        Args:
            grouped: Whether the processes of a host are one worker (`local_group="host"`).
        """
        hosts = tuple(range(len(self.groups))) if grouped else self.worker_hosts
        rates = self.rates
        if self.near is not None:  # NCCL knows no sites: its ring passes all hosts.
            rates = replace(rates, memory=self.near, tree_hosts=0)
        slow = {} if grouped else self.slow
        if grouped and self.slow:  # The slowest process of a host decides.
            places = self.worker_hosts
            for rank, factor in self.slow.items():
                slow[places[rank]] = max(factor, slow.get(places[rank], 1.0))
        return Deployment(
            worker_hosts=hosts,
            shard_hosts=tuple(shard_hosts),
            slices=cut_slices(self.numel, len(shard_hosts), PER_SHARD_MAX),
            link=self.link,
            round_trip_s=self.round_trip_s,
            compute_s=self.compute_s,
            deviation=self.deviation,
            slow=slow,
            group=max(self.groups) if grouped else 1,
            overlap=self.overlap,
            num_state=self.num_state,
            tls=self.tls,
            rates=rates,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns every number with its source, by name."""
        return {
            name: {"value": each.value, "source": each.source}
            for name, each in self.sources.items()
        }


def require_between(name: str, value: float, least: float, most: float) -> None:
    """Raises ConfigError for a number of the command line that is out of its range."""
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value:.10g}, must be {least:.10g} to {most:.10g}")


def split_hosts(workers: int | None, hosts: int | None, gpus: int | None) -> tuple[int, ...]:
    """Returns the number of workers on each host.

    Args:
        workers: Number of workers; None: one for each GPU.
        hosts: Number of hosts; None: one for each worker.
        gpus: Number of GPUs on all hosts; 0: computing is on CPUs; None: not given.

    Raises:
        ConfigError: They do not fit together.
    """
    require_between("--gpus", gpus or 0, 0, WORKERS_MAX)
    if workers is None and gpus:
        workers = gpus
    if workers is None:
        raise ConfigError("--workers is missing: the number of processes that train, or --gpus")
    require_between("--workers", workers, 1, WORKERS_MAX)
    if gpus and gpus < workers:
        raise ConfigError(f"--workers is {workers}, and there are {gpus} GPUs (--gpus)")
    hosts = workers if hosts is None else hosts
    require_between("--hosts", hosts, 1, WORKERS_MAX)
    if hosts > workers:
        raise ConfigError(
            f"--hosts is {hosts} and --workers is {workers}: a host needs a worker or more"
        )
    if workers % hosts:
        raise ConfigError(
            f"{hosts} hosts cannot share {workers} workers equally: advise for "
            f"{workers // hosts * hosts} workers or another number of hosts"
        )
    return (workers // hosts,) * hosts


def parse_sites(sites: str) -> tuple[int, ...]:
    """Returns the workers of each site: `6,2`.

    Raises:
        ConfigError: It names less than two sites, or one without a worker.
    """
    parts = [part.strip() for part in sites.split(",")]
    least = 2
    if len(parts) < least or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--sites is {sites!r}, must be the workers of each site, such as 6,2")
    groups = tuple(int(part) for part in parts)
    require_between("the workers of --sites", sum(groups), least, WORKERS_MAX)
    return groups


def read_situation(
    *,
    model: str,
    groups: tuple[int, ...],
    gbit: float,
    compute_ms: float,
    between_gbit: float | None = None,
    latency_ms: float | None = None,
    optimizer: str = OPTIMIZER,
    tls: bool = False,
    overlap: bool = True,
    on_gpu: bool | None = None,
    paces: bool = False,
) -> Situation:
    """Returns the situation that the flags of a command describe.

    Args:
        model: A known name, or a number of parameters.
        groups: Workers of each host, or of each site.
        gbit: Bandwidth of each host's link, in 10^9 bits per second.
        compute_ms: Milliseconds of forward and backward.
        between_gbit: Bandwidth between sites; None: `groups` are hosts.
        latency_ms: Round trip in ms; None: `TRIP_MS` is assumed.
        on_gpu: Whether the model is on a GPU; None: that is assumed.
        paces: Whether connections to far hosts are paced.

    Raises:
        ConfigError: A number is out of its range, or a name is unknown.
    """
    numel, source = parse_model(model)
    _require_numbers(gbit, compute_ms, latency_ms, between_gbit)
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {optimizer!r}, must be one of {', '.join(OPTIMIZERS)}")
    num_state, has_sites = len(OPTIMIZERS[optimizer].state_names), between_gbit is not None
    trip_ms = TRIP_MS if latency_ms is None else latency_ms
    rates = _rates_of(trip_ms, on_gpu=on_gpu, paces=paces)
    places = counted(len(groups), "site" if has_sites else "host")
    sources = {
        "parameters": Sourced(f"{numel:,}", source),
        "workers": Sourced(f"{sum(groups)} on {places}", GIVEN),
        "link": Sourced(f"{gbit:g} Gbit/s each way, of each host", GIVEN),
        "round trip": Sourced(
            f"{trip_ms:g} ms", f"{ASSUMED}: a switch" if latency_ms is None else GIVEN
        ),
        "connections": ENCRYPTED if tls else PLAIN,
        "computing": Sourced(f"{in_ms(compute_ms / 1e3)} a step", GIVEN),
        "optimizer": Sourced(
            f"{optimizer}, {counted(num_state, 'array')} of state",
            ASSUMED if optimizer == OPTIMIZER else GIVEN,
        ),
        **_of_machine(rates, overlap=overlap, on_gpu=on_gpu),
    }
    if between_gbit is not None:
        sources["between sites"] = Sourced(f"{between_gbit:g} Gbit/s each way", GIVEN)
    return Situation(
        numel=numel,
        groups=groups,
        link=(gbit if between_gbit is None else between_gbit) * GBIT,
        near=gbit * GBIT * rates.link_share if has_sites else None,
        round_trip_s=trip_ms / 1e3,
        compute_s=compute_ms / 1e3,
        num_state=num_state,
        tls=tls,
        overlap=overlap,
        has_sites=has_sites,
        rates=rates,
        sources=sources,
    )


def _require_numbers(
    gbit: float, compute_ms: float, latency_ms: float | None, between_gbit: float | None
) -> None:
    """Refuses numbers of the command line that are out of their ranges."""
    require_between("--gbit", gbit, GBIT_MIN, GBIT_MAX)
    require_between("--compute-ms", compute_ms, COMPUTE_MS_MIN, COMPUTE_MS_MAX)
    if latency_ms is not None:
        require_between("--latency-ms", latency_ms, 0.0, 1e5)
    if between_gbit is not None:
        require_between("--between-gbit", between_gbit, GBIT_MIN, GBIT_MAX)


def _rates_of(trip_ms: float, *, on_gpu: bool | None, paces: bool) -> MachineRates:
    """Returns the costs of a machine at some distance from the others."""
    rates = MachineRates() if on_gpu is False else GPU_RATES
    return replace(rates, far_share=PACED) if paces and trip_ms / 1e3 > FAR_S else rates


def _of_machine(rates: MachineRates, *, overlap: bool, on_gpu: bool | None) -> dict[str, Sourced]:
    """Returns the numbers of a machine that matter most, with their sources."""
    return {
        "payload": Sourced(
            f"{rates.link_share * rates.far_share:.0%} of the link",
            RATE_SOURCES["link_share" if rates.far_share == 1.0 else "far_share"],
        ),
        "device": Sourced(
            "a CPU" if on_gpu is False else "a GPU of each worker",
            GIVEN if on_gpu is False else GPU_SOURCE,
        ),
        "all-reduce": Sourced(
            f"a tree between {rates.tree_hosts} hosts, a ring between more"
            if rates.tree_hosts
            else "a ring",
            RATE_SOURCES["tree_hosts" if rates.tree_hosts else "ring"],
        ),
        "overlap": Sourced(
            "pushes leave during backward" if overlap else "pushes leave at step()",
            "assumed: overlap=True, and no gradient is changed behind backward"
            if overlap
            else GIVEN,
        ),
        "shards' threads": Sourced(
            f"{rates.receive / 1e9:g} GB/s received and added, {rates.send / 1e9:g} GB/s sent each",
            RATE_SOURCES["receive"],
        ),
    }
