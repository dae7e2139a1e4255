"""A parameter server on torch RPC: gradients go out as arguments, weights come back as results.

As in torch's own tutorial of a batch-updating server: a call adds its gradient and gets a future,
which the last worker of the step completes for all. The server makes a momentum step on the mean.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

import torch
from torch.distributed import rpc

from benchmarks import measured

LR, MOMENTUM = 0.1, 0.9
TIMEOUT_S = 300.0
Parts = Sequence[Sequence[Sequence[int]]]  # Shapes of each server's tensors.


class Server:
    """The tensors of one server, which live in the process that serves them."""

    def __init__(self, shapes: Sequence[Sequence[int]], num_workers: int) -> None:
        """Starts with zeros."""
        self.weights = [torch.zeros(*shape) for shape in shapes]
        self.momentum = [torch.zeros(*shape) for shape in shapes]
        self.sums = [torch.zeros(*shape) for shape in shapes]
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
    """Adds a worker's gradient; runs in the server's process."""
    return _served["server"].push_pull(index, grad)


def node(kind: str, rank: int, parts: Parts, port: int, rounds: int) -> None:
    """Runs a server or a worker; the first ranks are servers, each with its part of the shapes."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    num = len(parts)
    if kind == "server":
        _served["server"] = Server(parts[rank], num)
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=TIMEOUT_S)
    rpc.init_rpc(f"{kind}{rank}", rank=rank, world_size=2 * num, rpc_backend_options=options)
    if kind == "server":
        measured.report({})
        rpc.shutdown(graceful=False)
        return
    grads = [[torch.ones(*shape) for shape in part] for part in parts]

    def one_round() -> None:
        waits = [
            rpc.rpc_async(f"server{server}", push_pull, args=(index, grad))
            for server, part in enumerate(grads)
            for index, grad in enumerate(part)
        ]
        torch.futures.wait_all(waits)

    measured.report(measured.timed(one_round, rounds))
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"node": node})
