"""The history of an asynchronous run, replayed in float64: the order of arrival is taken from the
log.

Only the order of events comes from the run. Gradients are recomputed, at the weights that the
model's own workers hold, and the effect of an arrival is a rule's equation, in each test.
"""

from typing import Any

import numpy as np

from tests.harness import NUMEL, SLICES, Cluster, Vector, quadratic


class History:
    """Global weights, and each worker's copy of them; momentum SGD on every slice."""

    def __init__(self, cluster: Cluster, rule: Any) -> None:
        self.cluster, self.rule = cluster, rule
        count = cluster.num_workers
        self.weights, self.velocity = np.zeros(NUMEL), np.zeros(NUMEL)
        self.views, self.grads = np.zeros((count, NUMEL)), np.zeros((count, NUMEL))
        self.seen = np.zeros((count, cluster.steps, NUMEL))
        self.versions = [0] * len(SLICES)
        self.bases = np.zeros((count, len(SLICES)), dtype=int)  # Version of each view.
        self.clocks = np.zeros((count, len(SLICES)), dtype=int)  # Pushes of each worker.
        self.computed = [0] * count  # Gradients that each worker has computed.
        self.live = set(range(count))
        self.staleness: list[int] = []

    def arrive(self, worker: int, index: int, grad: Vector, staleness: int) -> None:
        """The effect of one gradient on a slice."""
        raise NotImplementedError

    def read(self, worker: int, index: int) -> None:
        """Further effects of an answered pull."""

    def left(self) -> None:
        """Effects of a worker's departure."""

    def step(self, index: int, grad: Vector) -> None:
        """V = m V + g + wd W; W = W - lr V."""
        part, group = SLICES[index], self.cluster.group
        direction = grad + group["weight_decay"] * self.weights[part]
        self.velocity[part] = group["momentum"] * self.velocity[part] + direction
        self.weights[part] -= group["lr"] * self.velocity[part]
        self.versions[index] += 1

    def follow(self) -> tuple[Vector, Vector]:
        """Returns what each worker saw at each step, and the last weights."""
        for event in self.cluster.log:
            who, index = event.worker, event.slice
            if event.kind == "compute":
                self.computed[who] += 1
                self.seen[who, event.number] = self.views[who]
                self.grads[who] = quadratic(who, event.number, self.views[who])
            elif event.kind == "push":
                staleness = self.versions[index] - self.bases[who, index]
                self.staleness.append(int(staleness))
                self.clocks[who, index] += 1
                self.arrive(who, index, self.grads[who, SLICES[index]], int(staleness))
            elif event.kind == "answer":
                assert event.number == self.versions[index]
                self.views[who, SLICES[index]] = self.weights[SLICES[index]]
                self.bases[who, index] = self.versions[index]
                self.read(who, index)
            else:
                assert event.kind == "leave"
                self.live.discard(who)
                self.left()
        return self.seen, self.weights
