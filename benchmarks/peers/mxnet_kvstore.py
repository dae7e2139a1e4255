"""MXNet's KVStore (ps-lite): `dist_sync` and `dist_async`, SGD with momentum on the servers.

Runs in MXNet's environment. MXNet reads a process's role from DMLC_* variables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import measured


def load() -> Any:
    """Returns MXNet, which still asks numpy for names that are gone."""
    import numpy

    numpy.bool = bool
    import mxnet

    return mxnet


def serve() -> None:
    """Runs the scheduler or a server: importing MXNet serves, and exits when the job is over."""
    load()


def work(kind: str, shapes: Sequence[Sequence[int]], rounds: int, num: int) -> None:
    """Runs a worker."""
    mx = load()
    store = mx.kv.create(kind)
    mean = 1.0 / num if kind == "dist_sync" else 1.0
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=mean))
    grads = [mx.nd.ones(tuple(shape)) for shape in shapes]
    weights = [mx.nd.zeros(tuple(shape)) for shape in shapes]
    for index, value in enumerate(weights):
        store.init(index, value)

    def one_round() -> None:
        for index, grad in enumerate(grads):
            store.push(index, grad, priority=-index)
        for index, value in enumerate(weights):
            store.pull(index, out=value, priority=-index)
        mx.nd.waitall()

    measured.report(measured.timed(one_round, rounds))


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"serve": serve, "work": work})
