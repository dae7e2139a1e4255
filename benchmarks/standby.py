"""Moves of a shard while its job trains: the pause, beside a step.

    python -m benchmarks.standby --quick --json                          # about a minute
    python -m benchmarks.standby --json                                  # 25.6 million parameters

Two shards and two workers in `ssgd` with momentum, over TCP, on loopback, all on this machine. The
second shard moves to an empty process, then to another one, and so on, each time by `psserver
drain`; the process that it leaves is stopped.

    drain             `pause_s`: the longest time in which a shard answered no worker;
                      `step_s`: the median of a step; `worst_step_s`: the longest step of a run;
                      `moves`; `identical`: whether the weights at the end are those, to the bit, of
                      a run without a move
    machine_lost, cost, off_cost    of a standby, which is not built yet: null
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import kit, measured
from pscore.net.credentials import ANYONE
from psserver.remote.drain import move

MODULE = "benchmarks.standby"
NUM_WORKERS = 2
WARM_STEPS = 10  # The first steps of a job compile loops; they are left out of the times.


def train(rank: int, numel: int, steps: int) -> dict[str, Any]:
    """Trains on drawn gradients; returns the seconds of its steps, and a hash of the weights."""
    import torch

    import psworker

    torch.set_num_threads(1)
    drawn = torch.Generator().manual_seed(rank)
    parts = [torch.nn.Parameter(torch.zeros(numel // 8)) for _ in range(8)]
    named = [(str(number), part) for number, part in enumerate(parts)]
    optimizer = psworker.DistributedOptimizer(torch.optim.SGD(parts, lr=0.1, momentum=0.9), named)
    grads = [torch.randn(numel // 8, generator=drawn) for _ in parts]
    measured.await_go()
    times_s = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad.clone()
        optimizer.step()
        times_s.append(time.perf_counter() - begin_s)
    with optimizer.global_weights():
        whole = torch.cat([part.detach() for part in parts])
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    optimizer.close()
    psworker.shutdown()
    return {"times_s": times_s, "digest": digest}


ROLES = {"train": train}


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def shard(folder: Path, index: int) -> Iterator[str]:
    """Starts the process of one of two shards; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "psserver", "start", "--shards", "2", "--cluster", "bench"]
    command += ["--shard-index", str(index), "--port", str(port), "--metrics-port", "0"]
    command += ["--lease-s", "5", "--log-level", "error"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if not process.stdout.readline().startswith("PACELINE_SERVERS="):
            raise SystemExit("a shard did not start")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def run(numel: int, steps: int, moves: int) -> dict[str, Any]:
    """Trains once, and moves the second shard `moves` times meanwhile."""
    pauses = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first = stack.enter_context(shard(folder, 0))
        left = stack.enter_context(contextlib.ExitStack())
        second = left.enter_context(shard(folder, 1))
        roles = [
            kit.Role(
                MODULE,
                "train",
                {"rank": rank, "numel": numel, "steps": steps},
                kit.worker_environment([first, second], rank, NUM_WORKERS, "tcp", "standby"),
            )
            for rank in range(NUM_WORKERS)
        ]
        with kit.roles(*roles) as workers:
            for worker in workers:
                worker.line()
            for worker in workers:
                worker.tell()
            for _ in range(moves):
                following = stack.enter_context(contextlib.ExitStack())
                to = following.enter_context(shard(folder, 1))
                pauses.append(move(second, to, 0, ANYONE, lambda _: None).pause_s)
                left.close()
                left, second = following, to
            results = [worker.result() for worker in workers]
    return {
        "pauses": pauses,
        "times_s": [time_s for result in results for time_s in result["times_s"][WARM_STEPS:]],
        "digests": {result["digest"] for result in results},
    }


def main() -> None:
    """Measures moves."""
    if measured.serve(sys.argv[1:], ROLES):
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the parameters")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--moves", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    numel = 2_560_000 if options.quick else 25_600_000
    still = run(numel, options.steps, 0)
    moved = run(numel, options.steps, options.moves)
    drain = {
        "pause_s": round(max(moved["pauses"]), 3),
        "step_s": round(kit.median(still["times_s"]), 4),
        "worst_step_s": round(max(moved["times_s"]), 3),
        "moves": options.moves,
        "identical": moved["digests"] == still["digests"] and len(still["digests"]) == 1,
    }
    kit.show("a shard moves", list(drain), [list(drain.values())])
    if options.json:
        found = {"machine_lost": None, "drain": drain, "cost": None, "off_cost": None}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
