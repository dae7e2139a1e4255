"""A parameter server on torch RPC: gradients go out as arguments, weights come back as results.

As in torch's own tutorial of a batch-updating server: a call adds its gradient and gets a future,
which the last worker of the step completes for all. The server makes a momentum step on the mean.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import torch
from torch.distributed import rpc

from benchmarks import kit

MODULE = "benchmarks.peers.torch_rpc"
LR, MOMENTUM = 0.1, 0.9
WARM_ROUNDS = 3


class Server:
    """The tensors of one server, which live in the process that serves them."""

    def __init__(self, shapes: list[tuple[int, ...]], num_workers: int) -> None:
        """Starts with zeros."""
        self.weights = [torch.zeros(shape) for shape in shapes]
        self.momentum = [torch.zeros(shape) for shape in shapes]
        self.sums = [torch.zeros(shape) for shape in shapes]
        self.counts = [0] * len(shapes)
        self.futures = [torch.futures.Future[torch.Tensor]() for _ in shapes]
        self.num_workers = num_workers
        self.lock = threading.Lock()

    def push_pull(self, index: int, grad: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Adds a gradient; the future has the weights after the step that it belongs to."""
        with self.lock:
            self.sums[index] += grad
            self.counts[index] += 1
            future = self.futures[index]
            if self.counts[index] == self.num_workers:
                mean = 1.0 / self.num_workers
                self.momentum[index].mul_(MOMENTUM).add_(self.sums[index], alpha=mean)
                self.weights[index].sub_(self.momentum[index], alpha=LR)
                self.sums[index].zero_()
                self.counts[index] = 0
                self.futures[index] = torch.futures.Future[torch.Tensor]()
                future.set_result(self.weights[index])
        return future


_served: dict[str, Server] = {}


@rpc.functions.async_execution
def push_pull(index: int, grad: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Is called by workers, in the server's process."""
    return _served["server"].push_pull(index, grad)


def node(kind: str, rank: int, num: int, case: str, port: int, rounds: int) -> None:
    """Is a server or a worker; ranks 0 to `num - 1` are servers."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    parts = split(case, num)
    if kind == "server":
        _served["server"] = Server(parts[rank], num)
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=kit.ROLE_TIMEOUT_S)
    rpc.init_rpc(f"{kind}{rank}", rank=rank, world_size=2 * num, rpc_backend_options=options)
    if kind == "server":
        kit.await_go()
        cpu_s = kit.own_cpu_s()
        sys.stdin.readline()
        kit.report({"cpu_s": kit.own_cpu_s() - cpu_s})
        rpc.shutdown(graceful=False)
        return
    grads = [[torch.ones(shape) for shape in part] for part in parts]

    def one_round() -> None:
        waits = [
            rpc.rpc_async(f"server{server}", push_pull, args=(index, grad))
            for server, part in enumerate(grads)
            for index, grad in enumerate(part)
        ]
        torch.futures.wait_all(waits)

    for _ in range(WARM_ROUNDS):
        one_round()
    kit.await_go()
    cpu_s, times_s = kit.own_cpu_s(), []
    for _ in range(rounds):
        start_s = time.perf_counter()
        one_round()
        times_s.append(time.perf_counter() - start_s)
    kit.report({"times_s": times_s, "cpu_s": kit.own_cpu_s() - cpu_s})
    rpc.shutdown(graceful=False)


def split(case: str, num: int) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of each server's tensors: whole tensors, the flat one in equal parts."""
    if case == "flat":
        return [[(kit.FLAT_NUMEL // num,)] for _ in range(num)]
    shapes = kit.resnet50_shapes()
    return [shapes[server::num] for server in range(num)]


def measure(case: str, num: int, rounds: int) -> tuple[list[float], float]:
    """Returns the seconds of each round, and CPU seconds of all processes per round."""
    from benchmarks.transport import free_port

    port = free_port()
    common = {"num": num, "case": case, "port": port, "rounds": rounds}

    def start(kind: str, rank: int) -> kit.Role:
        return kit.Role(MODULE, "node", {"kind": kind, "rank": rank, **common})

    servers = [start("server", rank) for rank in range(num)]
    workers = [start("worker", num + rank) for rank in range(num)]
    with kit.roles(*servers, *workers):
        for role in (*workers, *servers):
            role.line()  # Warm.
        for role in (*servers, *workers):
            tell(role)
        results = [role.line() for role in workers]
        for role in servers:
            tell(role)
        served = [role.line() for role in servers]
    times_s = [max(pair) for pair in zip(*(r["times_s"] for r in results), strict=True)]
    return times_s, sum(result["cpu_s"] for result in [*results, *served]) / rounds


def tell(role: kit.Role) -> None:
    """Lets a process go on."""
    assert role.popen.stdin is not None
    role.popen.stdin.write("go\n")
    role.popen.stdin.flush()


ROLES: dict[str, Any] = {"node": node}

if __name__ == "__main__":
    kit.serve_role(sys.argv[1:], ROLES)
