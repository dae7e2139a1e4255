"""A parameter server of Ray actors: on one node through the object store, between two by gRPC.

Runs in Ray's environment. As in Ray's own example of a parameter server, gradients are arguments of
a call and weights its result; the call of a step's last worker makes the momentum step for all.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import measured

LR, MOMENTUM = 0.1, 0.9
STORE_NBYTES = 4 << 30


class Server:
    """The tensors of one server."""

    def __init__(self, shapes: Sequence[Sequence[int]], num_workers: int) -> None:
        import numpy as np

        self.weights = [np.zeros(shape, np.float32) for shape in shapes]
        self.momentum = [np.zeros(shape, np.float32) for shape in shapes]
        self.sums = [np.zeros(shape, np.float32) for shape in shapes]
        self.counts = [0] * len(shapes)
        self.done = [asyncio.Event() for _ in shapes]
        self.num_workers = num_workers

    async def push_pull(self, index: int, grad: Any) -> Any:
        """Adds a gradient; returns the weights after the step that it belongs to."""
        self.sums[index] += grad
        self.counts[index] += 1
        done = self.done[index]
        if self.counts[index] == self.num_workers:
            self.momentum[index] *= MOMENTUM
            self.momentum[index] += self.sums[index] / self.num_workers
            self.weights[index] -= LR * self.momentum[index]
            self.sums[index][...] = 0.0
            self.counts[index], self.done[index] = 0, asyncio.Event()
            done.set()
        await done.wait()
        return self.weights[index]


class Worker:
    """One worker; measures itself."""

    def measure(
        self, servers: Sequence[Any], parts: Sequence[Sequence[Sequence[int]]], rounds: int
    ) -> list[float]:
        """Returns the seconds of each round."""
        import time

        import numpy as np
        import ray

        grads = [[np.ones(shape, np.float32) for shape in shapes] for shapes in parts]
        times_s = []
        for _ in range(measured.WARM_ROUNDS + rounds):
            start_s = time.perf_counter()
            answers = [
                server.push_pull.remote(index, grad)
                for server, part in zip(servers, grads, strict=True)
                for index, grad in enumerate(part)
            ]
            ray.get(answers)
            times_s.append(time.perf_counter() - start_s)
        return times_s[measured.WARM_ROUNDS :]


def drive(num_nodes: int, parts: Sequence[Sequence[Sequence[int]]], rounds: int) -> None:
    """Starts nodes and actors, and reports the rounds."""
    import ray
    from ray.cluster_utils import Cluster

    num = len(parts)
    places = [{"servers": num}, {"workers": num}]
    if num_nodes == 1:
        places = [{**places[0], **places[1]}]
    cluster = Cluster()
    for place in places:
        cluster.add_node(num_cpus=2 * num, resources=place, object_store_memory=STORE_NBYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        server, worker = ray.remote(Server), ray.remote(Worker)
        serving = [server.options(resources={"servers": 1}).remote(part, num) for part in parts]
        working = [worker.options(resources={"workers": 1}).remote() for _ in range(num)]
        found = ray.get([one.measure.remote(serving, parts, rounds) for one in working])
    finally:
        ray.shutdown()
        cluster.shutdown()
    times_s = [max(pair) for pair in zip(*found, strict=True)]
    measured.report({"times_s": times_s})


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"drive": drive})
