"""Shards that are started one by one, as in containers, make one cluster."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscore.errors import ShardMapError
from psworker.connection.membership.session import Session
from tests.integration.command import Command, eventually, gone, lasting_ports


@contextlib.contextmanager
def part(folder: Path, index: int, cluster: str) -> Iterator[str]:
    """One shard of two, started by a `psserver` of its own; yields its address."""
    folder.mkdir()
    options = ("--shards", 2, "--shard-index", index, "--cluster", cluster, "--metrics-port", 0)
    with Command(folder).detached(*options) as run:
        assert [shard["index"] for shard in run["shards"]] == [index]
        (address,) = run["addresses"]
        yield address


def join(*servers: str) -> Session:
    return Session(servers, job="j", rank=0, num_workers=1)


def test_shards_of_one_name_are_one_cluster(tmp_path: Path) -> None:
    with part(tmp_path / "a", 0, "c") as first, part(tmp_path / "b", 1, "c") as second:
        join(first, second).leave()
        with pytest.raises(ShardMapError, match="not in the order of their shards"):
            join(second, first)
        with pytest.raises(ShardMapError, match="1 server for 2 shards"):
            join(first)


def test_a_second_process_of_a_shard_is_noticed(tmp_path: Path) -> None:
    """It may be for a move; this one does not start, as its address is of no machine here."""
    with part(tmp_path / "a", 0, "c") as first:
        options = ("--shards", 2, "--shard-index", 0, "--cluster", "c", "--metrics-port", 0)
        elsewhere = ("--port", 0, "--host", "192.0.2.1", "--insecure")
        done = Command(tmp_path / "a").run("start", *elsewhere, *options, code=10)
    port = first.rpartition(":")[2]
    assert f"psserver: shard 0 of cluster c runs on port {port} already; a second" in done.stderr


def test_shards_of_several_names_are_no_cluster(tmp_path: Path) -> None:
    with (
        part(tmp_path / "a", 0, "c") as first,
        part(tmp_path / "b", 1, "d") as second,
        pytest.raises(ShardMapError, match="were not started together"),
    ):
        join(first, second)


def test_a_killed_shard_comes_back_as_the_same_part(tmp_path: Path) -> None:
    command, flags = Command(tmp_path), ("--shards", 2, "--shard-index", 1, "--cluster", "c")
    with command.detached(*flags, *lasting_ports(1)) as run:
        pid = run["shards"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: gone(pid))
        eventually(lambda: command.run_file()["shards"][0]["pid"] not in (None, pid))
        assert command.run_file()["addresses"] == run["addresses"]
        assert command.run_file()["cluster"] == "c"
