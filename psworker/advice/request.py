"""The flags of `psworker advise`, and the situation that they describe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pscore.errors import ConfigError
from pscore.net.congestion import system_paces
from pscore.net.credentials import EVERY, read_credentials
from pscore.net.wire import FLOAT_NBYTES
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
    tls: bool | None
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
                "`psworker advise -- train.py` measures them"
            )
        situation = read_situation(
            model=self.model,
            groups=self._groups(),
            gbit=self.gbit,
            compute_ms=self.compute_ms,
            between_gbit=self.between_gbit,
            latency_ms=self.latency_ms,
            optimizer=self.optimizer,
            tls=bool(self.tls),
            overlap=self.overlap,
            on_gpu=self._on_gpu,
            paces=system_paces(),
        )
        workers = situation.sources["workers"]
        if self.sites is None and self.hosts is None and situation.num_workers > 1:
            workers = replace(workers, source="given; assumed: a host for each (--hosts)")
        return replace(situation, sources=situation.sources | {"workers": workers})

    def of_job(self, job: str, addresses: Sequence[str]) -> Situation:
        """Returns the situation of a job that runs.

        Raises:
            ConfigError: There is no such job, no address, or a flag that has no effect; or it
                trains row tables.
            ServerUnavailableError: A shard does not answer.
        """
        self._require_no_numbers()
        if not addresses:
            raise ConfigError("--job needs --servers, host:port,..., or PACELINE_SERVERS")
        from psworker.advice.running import read_job, require_dense, situation_of_job

        credentials = read_credentials(os.environ, job=EVERY)
        found = read_job(addresses, credentials, job)
        require_dense(found, f"job {job!r}")
        return situation_of_job(
            found,
            self.gbit,
            tls=credentials.ca is not None if self.tls is None else self.tls,
            latency_ms=self.latency_ms,
            overlap=self.overlap,
            on_gpu=self._on_gpu,
        )

    def of_script(self, command: Sequence[str]) -> Situation:
        """Returns the situation of a script, which runs for a minute with one worker.

        Raises:
            ConfigError: A flag is missing or has no effect, or the script made too few steps.
        """
        if self.model is not None or self.compute_ms is not None:
            raise ConfigError(
                f"--model and --compute-ms have no effect with a script, here {command[0]!r}: it "
                "has them"
            )
        replace(self, model="1", compute_ms=1.0).read()  # Refuses flags before the minute.
        from psworker.advice.measuring import measure_script

        found = measure_script(command)
        measured = replace(
            self,
            model=str(found.nbytes // FLOAT_NBYTES),
            compute_ms=1e3 * found.paces[0].step_s,
            optimizer=found.optimizer or self.optimizer,
        )
        situation = measured.read()
        source = f"measured: {command[0]}, {found.paces[0].num_steps} steps of one worker"
        names = ("parameters", "computing", "optimizer")
        sources = {name: replace(situation.sources[name], source=source) for name in names}
        return replace(situation, sources=situation.sources | sources)

    @property
    def _on_gpu(self) -> bool | None:
        return None if self.gpus is None else self.gpus > 0

    def _require_no_numbers(self) -> None:
        given = (self.model, self.workers, self.hosts, self.compute_ms, self.sites)
        if any(value is not None for value in (*given, self.between_gbit, self.gpus or None)):
            raise ConfigError("--job has the model, workers, hosts and computing of its job: "
                              "leave them out (but --gpus 0: it computes on CPUs)")  # fmt: skip

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
