"""A real etcd of one member, from Debian's etcd-server."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from psserver.standby.etcd_register import EtcdRegister
from tests.integration.command import eventually, free_ports


@contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """Starts etcd with its data in a folder; yields the URL of registers in it."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    addresses = {"listen-client-urls": client, "advertise-client-urls": client}
    addresses |= {"listen-peer-urls": peer, "initial-advertise-peer-urls": peer}
    addresses |= {"initial-cluster": f"default={peer}", "data-dir": str(folder)}
    line = [program, *(f"--{name}={value}" for name, value in addresses.items())]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = client.replace("http", "etcd")
    try:
        eventually(lambda: _answers(f"{url}/probe"))
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return EtcdRegister(url, "shard").newest() is None
    except OSError:
        return False
