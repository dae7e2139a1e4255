"""A shard that admits only peers with a certificate and a token, and the attempts to connect."""

import datetime
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pscore.net.credentials import Credentials
from pscore.net.endpoint import Endpoint
from pscore.net.tls import client_context
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.access import certs
from psworker.connection.shard_link import Link
from tests.integration.command import Command
from tests.integration.worker import Worker

EVERYTHING, TRAIN, OTHER, READS = (f"{number}" * 32 for number in (1, 2, 3, 4))
TOKENS = f"# for tests\n* {EVERYTHING}\n\ntrain {TRAIN}\nother {OTHER}\ntrain:read {READS}\n"
YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
TOMORROW = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)


def certificates(folder: Path, name: str = "files", **options: Any) -> Path:
    """Makes a CA and certificates of its own, good for a day."""
    certs.make(folder / name, [], **{"days": 1, **options})
    return folder / name


def secrets_of(folder: Path, tokens: str = TOKENS) -> Path:
    """Writes a token file."""
    path = folder / "tokens"
    path.write_text(tokens)
    path.chmod(0o600)
    return path


def client(folder: Path, token: str = "", *, own: Path | None = None) -> Credentials:
    """Returns credentials that trust the CA in `folder`, with a certificate of `own`."""
    own = folder if own is None else own
    return Credentials(
        ca=folder / "ca.pem", cert=own / "client.pem", key=own / "client.key", token=token
    )


def flags_of(folder: Path, tokens: Path) -> list[object]:
    """Returns the flags of a shard with these files."""
    return [
        *("--tls-cert", folder / "server.pem", "--tls-key", folder / "server.key"),
        *("--tls-client-ca", folder / "ca.pem", "--token-file", tokens),
    ]


@dataclass
class Fortress:
    """One such shard, with a worker of job "train" inside."""

    command: Command
    address: str
    pid: int
    files: Path
    victim: Worker
    num_steps: int = 0

    def credentials(self, token: str = "") -> Credentials:
        return client(self.files, token)

    def environment(self, token_file: Path | None = None) -> dict[str, Any]:
        """Returns what a command of psserver reads."""
        variables = {
            "PACELINE_TLS_CA": self.files / "ca.pem",
            "PACELINE_TLS_CERT": self.files / "client.pem",
            "PACELINE_TLS_KEY": self.files / "client.key",
            "PACELINE_SERVERS": self.address,
        }
        if token_file is not None:
            variables["PACELINE_TOKEN_FILE"] = token_file
        return {name: str(value) for name, value in variables.items()}

    def endpoint(self, token: str = "", **changes: Any) -> Endpoint:
        """Returns where the data sockets listen, for a bearer of `token`."""
        insider = Link(self.address, patience_s=5.0, credentials=self.credentials(EVERYTHING))
        reply = insider.call(insider.control.Describe, pb.DescribeRequest())
        insider.close()
        found = Endpoint(
            host="127.0.0.1",
            port=reply.data_port,
            local=reply.data_local,
            token=token,
            tls=client_context(self.credentials()),
        )
        return replace(found, **changes)

    def knock(self, **changes: Any) -> socket.socket:
        """Returns a plain connection to the data port."""
        where = self.endpoint(**changes)
        return socket.create_connection((where.host, where.port), 200.0)

    def still_works(self) -> None:
        """The other job continues: a step, its answer, and weights."""
        assert self.victim.push_gradient(self.num_steps).version == self.num_steps
        self.num_steps += 1
        assert self.victim.pull(min_version=self.num_steps, wait_ms=10_000).ready


@contextmanager
def fortress(folder: Path) -> Iterator[Fortress]:
    """Starts it, on a free port of loopback."""
    files, tokens = certificates(folder), secrets_of(folder)
    command = Command(folder)
    # Its worker sends no heartbeats, and tests take their time.
    with command.detached(*flags_of(files, tokens), "--lease-s", 3000) as run:
        (address,) = run["addresses"]
        victim = Worker(address, credentials=client(files, TRAIN))
        victim.join()
        victim.define()
        victim.push_weights()
        pid = run["shards"][0]["pid"]
        yield Fortress(command, address, pid, files, victim)
        victim.close()
