"""The lines to write: the commands of each host, and those of the script."""

from __future__ import annotations

from collections.abc import Sequence

from pscore.rules import parse_mode
from pscore.timing.choice import AdviceRow
from pscore.timing.evidence import ALONE, DDP
from psworker.advice.situation import Situation

PORT, DATA_PORT = 7070, 7170
SHOWN_MAX = 8  # Shards whose lines are shown, each.
WIDTH = 78
SECRETS = (
    "--tls-cert secrets/server.pem",
    "--tls-key secrets/server.key",
    "--tls-client-ca secrets/ca.pem",
    "--token-file secrets/token",
)
EXPORTS = (
    "PACELINE_TLS_CA=secrets/ca.pem",
    "PACELINE_TOKEN_FILE=secrets/token",
    "PACELINE_TLS_CERT=secrets/client.pem",
    "PACELINE_TLS_KEY=secrets/client.key",
)


def lines_to_write(situation: Situation, shard_hosts: Sequence[int], row: AdviceRow) -> list[str]:
    """Returns the lines with which a way to train begins; a shell joins those of one command.

    Args:
        shard_hosts: The host, or site, of each shard.
    """
    if row.mode == ALONE:
        return ["python train.py"]
    launch = _launch(situation)
    if row.mode == DDP:
        return [*launch, "model = torch.nn.parallel.DistributedDataParallel(model)"]
    arguments = [f'mode="{row.mode}"']
    if row.compression != "none":
        arguments.append(f'compression="{row.compression}"')
    if situation.overlap and not parse_mode(row.mode).outer_optimizer:
        arguments.append("overlap=True")
    if max(situation.groups) > 1:
        arguments.append('local_group="host"' if row.grouped else "local_group=None")
    return [
        *_of_shards(situation, shard_hosts),
        *launch,
        "# in train.py",
        *(["torch.distributed.init_process_group()"] if row.grouped else []),
        "optimizer = psworker.DistributedOptimizer(",
        "    optimizer, named_parameters=model.named_parameters(),",
        f"    {', '.join(arguments)},",
        ")",
    ]


def _launch(situation: Situation) -> list[str]:
    """Returns the command that starts the workers of a host."""
    hosts, here = len(situation.groups), max(situation.groups)
    if situation.has_sites:  # The hosts of a site are not known.
        there = ", ".join(f"{n} on site {site}" for site, n in enumerate(situation.groups))
        nodes = [f"# workers: {there}"]
        launch = ["torchrun", "--nnodes HOSTS", "--nproc-per-node HERE"]
    else:
        nodes = []
        launch = ["torchrun", f"--nnodes {hosts}", f"--nproc-per-node {here}"]
    if hosts > 1:
        launch += ["--rdzv-backend c10d", "--rdzv-endpoint host0:29400"]
    return [*nodes, *_command(*launch, "train.py")]


def _of_shards(situation: Situation, shard_hosts: Sequence[int]) -> list[str]:
    """Returns the commands that start the shards, and say to workers where they are."""
    number = len(shard_hosts)
    places = [(host, shard_hosts[:index].count(host)) for index, host in enumerate(shard_hosts)]
    is_far = len(situation.groups) > 1
    name = "host{}" if is_far else "127.0.0.1"  # On one host nobody else has to connect.
    addresses = [f"{name.format(host)}:{PORT + place}" for host, place in places[:SHOWN_MAX]]
    servers = _listed("export PACELINE_SERVERS=", addresses)
    if not is_far:
        return [f"psserver start --detach --shards {number}", *servers]
    lines = list[str]()
    if situation.tls:
        names = [f"--host host{host}" for host in sorted(set(shard_hosts))[:SHOWN_MAX]]
        lines += ["# once; then copy the folder to each host (docs/machines.md)"]
        lines += _command("psserver certs secrets", *names)
    for index, (host, place) in enumerate(places[:SHOWN_MAX]):
        lines.append(f"# on {'site' if situation.has_sites else 'host'} {host}")
        lines += _command(
            "psserver start",
            "--detach",
            "--cluster advised",
            f"--shards {number}",
            f"--shard-index {index}",
            f"--host host{host}",
            f"--port {PORT + place}",
            f"--data-port {DATA_PORT + place}",
            *(SECRETS if situation.tls else ["--insecure"]),
        )
    if number > SHOWN_MAX:
        lines.append(f"# ... and so on, {number} shards in all, and their addresses")
    lines += ["# on each host of workers", *servers]
    return lines + (_command("export", *EXPORTS) if situation.tls else [])


def _listed(head: str, items: Sequence[str]) -> list[str]:
    """Returns a word with a list, in lines that a shell joins: those behind the first are bare."""
    lines = [f"{head}{items[0]}"]
    for item in items[1:]:
        if len(lines[-1]) + 2 + len(item) > WIDTH:
            lines[-1] += ",\\"
            lines.append(item)
        else:
            lines[-1] += f",{item}"
    return lines


def _command(*parts: str) -> list[str]:
    """Returns a command in lines of at most `WIDTH` columns; a part stays in one."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return lines
