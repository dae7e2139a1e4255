"""Each peer as one function: its processes started, its rounds measured, its processes ended."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import kit, transport
from benchmarks.peers.environments import LeftOutError, python_of

Measure = Callable[[str, int, int], list[float]]  # Case, number of workers, rounds.
LOCALHOST = "127.0.0.1"
HANGS_S = 240.0  # No peer takes so long that has not stopped.


def split(case: str, num: int) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of each server's tensors: whole tensors, the flat one in equal parts."""
    if case == "flat":
        return [[(kit.FLAT_NUMEL // num,)] for _ in range(num)]
    shapes = kit.resnet50_shapes()
    return [shapes[server::num] for server in range(num)]


def ours(plane: str, case: str, num: int, rounds: int) -> list[float]:
    """Measures Paceline."""
    return transport.measure_ours(plane, case, num, rounds)[0]


def gloo(case: str, num: int, rounds: int) -> list[float]:
    """Measures Gloo's all-reduce."""
    if num == 1:
        raise LeftOutError("an all-reduce needs two workers")
    return transport.measure_gloo(case, rounds)[0]


def torch_rpc(case: str, num: int, rounds: int) -> list[float]:
    """Measures torch RPC (TensorPipe), in our own environment."""
    common = {"parts": split(case, num), "port": transport.free_port(), "rounds": rounds}
    start = partial(_role, "torch_rpc", Path(sys.executable), "node")
    servers = [start({"kind": "server", "rank": rank, **common}) for rank in range(num)]
    workers = [start({"kind": "worker", "rank": num + rank, **common}) for rank in range(num)]
    return _rounds(workers, servers)


def mxnet(kind: str, case: str, num: int, rounds: int) -> list[float]:
    """Measures MXNet's KVStore; MXNet itself splits large tensors between servers."""
    python = python_of("mxnet")
    env = {
        "DMLC_PS_ROOT_URI": LOCALHOST,
        "DMLC_PS_ROOT_PORT": str(transport.free_port()),
        "DMLC_NUM_SERVER": str(num),
        "DMLC_NUM_WORKER": str(num),
    }
    arguments = {"kind": kind, "shapes": kit.shapes_of(case), "rounds": rounds, "num": num}

    def start(what: str, function: str, arguments: Mapping[str, Any]) -> kit.Role:
        return _role("mxnet_kvstore", python, function, arguments, {**env, "DMLC_ROLE": what})

    servers = [start(what, "serve", {}) for what in ["scheduler"] + ["server"] * num]
    return _rounds([start("worker", "work", arguments) for _ in range(num)], servers)


def tensorflow(case: str, num: int, rounds: int, *, is_sync: bool) -> list[float]:
    """Measures TensorFlow's parameter servers."""
    python = python_of("tensorflow")
    cluster = {
        kind: [f"{LOCALHOST}:{transport.free_port()}" for _ in range(num)]
        for kind in ("ps", "worker")
    }
    start = partial(_role, "tensorflow_servers", python)
    common = {"parts": split(case, num), "is_sync": is_sync, "rounds": rounds}
    servers = [start("serve", {"cluster": cluster, "index": index}) for index in range(num)]
    workers = [
        start("work", {"cluster": cluster, "index": index, **common}) for index in range(num)
    ]
    return _rounds(workers, servers)


def ray(num_nodes: int, case: str, num: int, rounds: int) -> list[float]:
    """Measures Ray's actors, on one node or between two."""
    python = python_of("ray")
    arguments = {"num_nodes": num_nodes, "parts": split(case, num), "rounds": rounds}
    role = _role("ray_actors", python, "drive", arguments)
    with _within(HANGS_S, role):
        times_s: list[float] = role.line()["times_s"]
    return times_s


PEERS: dict[str, Measure] = {
    "Paceline, shared memory": partial(ours, "local"),
    "Paceline, TCP": partial(ours, "tcp"),
    "torch RPC": torch_rpc,
    "Gloo all-reduce": gloo,
    "MXNet dist_sync": partial(mxnet, "dist_sync"),
    "MXNet dist_async": partial(mxnet, "dist_async"),
    "TensorFlow servers, sync": partial(tensorflow, is_sync=True),
    "TensorFlow servers, async": partial(tensorflow, is_sync=False),
    "Ray actors, one node": partial(ray, 1),
    "Ray actors, two nodes": partial(ray, 2),
}


def _role(
    module: str,
    python: Path,
    function: str,
    arguments: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
) -> kit.Role:
    return kit.Role(f"benchmarks.peers.{module}", function, arguments, env, python=python)


def _rounds(workers: Sequence[kit.Role], others: Sequence[kit.Role]) -> list[float]:
    """Returns the seconds of each round, that of the slowest worker."""
    with _within(HANGS_S, *others, *workers):
        for role in workers:
            role.line()  # Warm.
        for role in workers:
            role.tell()
        results = [role.line() for role in workers]
    return [max(times_s) for times_s in zip(*(r["times_s"] for r in results), strict=True)]


@contextlib.contextmanager
def _within(limit_s: float, *started: kit.Role) -> Iterator[None]:
    """Ends processes in any case, and after `limit_s`: then they are measured no further."""

    def end() -> None:
        for role in started:
            role.popen.kill()

    alarm = threading.Timer(limit_s, end)
    alarm.start()
    try:
        with kit.roles(*started):
            yield
    finally:
        alarm.cancel()
