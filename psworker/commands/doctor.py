"""`psworker doctor`: diagnoses the path from this machine to the shards."""

from __future__ import annotations

import os

from pscore.errors import ConfigError
from pscore.net.addresses import parse_addresses
from pscore.net.credentials import EVERY, read_credentials
from pscore.observe import doctor
from pscore.observe.doctor import Finding
from pscore.partition import fingerprint
from pscore.types import TensorSpec
from psworker.commands.model_plan import shapes_of
from psworker.job.environment import Environment


def examine(servers: str | None, job: str | None, model: str | None) -> list[Finding]:
    """Checks everything; an answer that is missing is a finding too.

    Args:
        servers: Addresses with commas between them; None: as in the environment.
        model: As for `psworker plan`; the job's model must match it, uncompressed, in one group.

    Raises:
        ConfigError: `model` would have no effect, because there is no job to compare it with.
    """
    if model is not None and job is None:
        raise ConfigError(
            f"--model {model} has no effect without --job: it is compared with that job's model"
        )
    findings = doctor.examine_machine()
    try:
        environment = Environment.read()
        addresses = parse_addresses(servers) or environment.servers
        credentials = read_credentials(os.environ, job=job or EVERY)
    except ConfigError as problem:
        what, _, do = str(problem).partition("; ")
        return [*findings, doctor.wrong("settings", "here", what, do)]
    if not addresses and job is not None:
        what = f"job {job!r} is looked for, and there is no server address"
        return [*findings, doctor.wrong("settings", "here", what, "give --servers, host:port,...")]
    if not addresses:
        do = "set PACELINE_SERVERS or --servers to look at shards elsewhere"
        what = "no server address: a worker starts shards of its own"
        return [*findings, doctor.good("settings", "here", f"{what}; {do}")]
    wanted = ""
    if model is not None:
        shapes = shapes_of(model)
        specs = [TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes]
        wanted = fingerprint(specs, len(addresses))
    return [*findings, *doctor.examine(addresses, credentials, job, wanted)]
