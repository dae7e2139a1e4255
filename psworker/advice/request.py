"""The flags of `psworker advise`, and the situation that they describe."""

from __future__ import annotations

from dataclasses import dataclass

from pscore.errors import ConfigError
from psworker.advice.situation import Situation, parse_sites, read_situation, split_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRequest:
    """The flags of `psworker advise`; None: not given."""

    model: str | None
    workers: int | None
    hosts: int | None
    gpus: int | None
    gbit: float | None
    compute_ms: float | None
    latency_ms: float | None
    sites: str | None
    between_gbit: float | None
    optimizer: str
    tls: bool
    overlap: bool

    def read(self) -> Situation:
        """Returns the situation.

        Raises:
            ConfigError: A number is missing or out of its range, or flags exclude each other.
        """
        if self.model is None:
            raise ConfigError("--model is missing: a known name, or a number of parameters: 350M")
        if self.gbit is None:
            raise ConfigError("--gbit is missing: bandwidth of each host's link, in 10^9 bit/s")
        if self.compute_ms is None:
            raise ConfigError(
                "--compute-ms is missing: milliseconds of forward and backward of a step, as "
                "`psserver status` shows them for a running job"
            )
        return read_situation(
            model=self.model,
            groups=self._groups(),
            gbit=self.gbit,
            compute_ms=self.compute_ms,
            between_gbit=self.between_gbit,
            latency_ms=self.latency_ms,
            optimizer=self.optimizer,
            tls=self.tls,
            overlap=self.overlap,
            on_gpu=None if self.gpus is None else self.gpus > 0,
        )

    def _groups(self) -> tuple[int, ...]:
        """Returns the workers of each host, or of each site."""
        if (self.sites is None) != (self.between_gbit is None):
            raise ConfigError("--sites and --between-gbit belong together")
        if self.sites is None:
            return split_hosts(self.workers, self.hosts, self.gpus)
        if (self.workers, self.hosts, self.gpus) != (None, None, None):
            raise ConfigError("--sites says how many workers there are: leave out --workers, "
                              "--hosts and --gpus")  # fmt: skip
        return parse_sites(self.sites)
