"""`psserver relay`: checks its arguments, and serves until it is interrupted."""

from __future__ import annotations

from pscore.errors import ConfigError
from pscore.text import is_loopback
from psserver.access.files import Trust, require_whole
from psserver.commands.dashboard import split_listen
from psserver.commands.find import FoundServers
from psserver.process.relay import RelayPlan, run_relay

MBIT_NBYTES = 125_000


def relay_weights(
    found: FoundServers,
    listen: str,
    trust: Trust,
    *,
    job: str,
    table: str,
    mbit: int,
    data_port: int,
    metrics_port: int | None,
    is_insecure: bool,
) -> None:
    """Serves the published weights of a job until it is interrupted.

    Args:
        found: All shards of the job, or another relay.
        listen: Host, and port of shard 0; port 0 takes free ones.
        mbit: Most Mbit/s to all readers on other hosts together; 0: no limit.
        data_port: Port of shard 0's data sockets, the others follow; 0 takes free ones.
        metrics_port: Port of the metrics page; 0 takes a free one, None is off.
        is_insecure: Whether other machines may read without TLS and token.

    Raises:
        ConfigError: An argument is wrong.
        CommandError: A port cannot be bound.
        PacelineError: A shard refuses this reader.
    """
    host, port = split_listen(listen)
    require_whole(trust)
    trust.check()
    is_guarded = trust.cert is not None and trust.token_file is not None
    if not (is_guarded or is_loopback(host) or is_insecure):
        raise ConfigError(
            f"--listen {listen} is open to other machines, which needs --tls-cert, --tls-key and "
            "--token-file; give these, or --insecure if nobody else uses the network"
        )
    run_relay(
        RelayPlan(
            servers=found.addresses,
            job=job,
            table=table,
            host=host,
            port=port,
            trust=trust,
            rate=mbit * MBIT_NBYTES,
            data_port=data_port,
            metrics_port=metrics_port,
        )
    )
