"""The cost of a push as work grows: `python -m benchmarks.growth [--json]`.

Counts workers x slices x tensors on one shard, through shared memory, in `ssgd` with SGD and
momentum. Slices are short (6,400 elements): their number costs Python time and memory, and 2,500 of
4 MiB would be 10 GB. So each process of a case has another `SLICE_NUMEL_MAX`. A few processes hold
all workers: each worker has a session, connections and gradients of its own, and those of a process
share the memory of their weights.

A push is that of one slice by one worker, with its pull. CPU is that of all threads of one side
over the pushes of all workers. Memory is what a process has more of its own (not shared) after the
first round than before the table; in the shard the optimizer's state is part of it, and it is
divided by the workers in their processes.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any
from unittest import mock

from benchmarks import kit, measured
from pscore import partition
from psserver.process import supervisor
from psserver.process.embedded import EmbeddedServers, start_embedded

MODULE = "benchmarks.growth"
WORKERS, SLICES, TENSORS = (1, 2, 4, 8, 16, 64), (25, 250, 2500), (161, 10_000)
SLICE_NUMEL = 6_400
BLOCK = 16  # Elements of the shortest tensor: one beside the next, without a gap.
PROCESSES_MAX = 4
PUSHES = 20_000  # Measured in each case, at least: a search for garbage then adds little to each.
PATIENCE_S = 600.0
HYPER = {"lr": 0.01, "momentum": 0.9}
SHARD = f"""
import sys
from pscore import partition
from psserver.process import daemon
partition.SLICE_NUMEL_MAX = {SLICE_NUMEL}
daemon.main(sys.argv[1])
"""


def private_nbytes(pid: int | str = "self") -> int:
    """Returns the bytes of a process's own memory, without what it shares."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"process {pid} has no memory")


def shapes(slices: int, tensors: int) -> list[int]:
    """Returns the lengths of tensors that fill so many slices to the last element."""
    each, more = divmod(slices * SLICE_NUMEL // BLOCK, tensors)
    return [BLOCK * (each + (index < more)) for index in range(tensors)]


# ----- one process of workers


def workers(ranks: list[int], num_workers: int, slices: int, tensors: int, rounds: int) -> None:
    """Runs some workers of a job in one thread, each with a session of its own."""
    import torch

    from psworker.connection.membership.session import Session

    torch.set_num_threads(1)
    table = declared(slices, tensors)
    weights = torch.zeros(slices * SLICE_NUMEL)
    servers = os.environ["PACELINE_SERVERS"].split(",")
    job = os.environ["PACELINE_JOB"]
    measured.await_go()
    before, start_s = private_nbytes(), time.perf_counter()
    times_s: dict[str, float] = {}
    replicas: list[Worker] = []
    for rank in ranks:
        session = Session(
            servers,
            job=job,
            rank=rank,
            num_workers=num_workers,
            data_plane="local",
            patience_s=PATIENCE_S,
        )
        one = Worker(session, table, weights)
        if not replicas:
            times_s["declare_s"] = time.perf_counter() - start_s
        if rank == 0:
            start_s = time.perf_counter()
            one.load()
            times_s["load_s"] = time.perf_counter() - start_s
        replicas.append(one)
    for one in replicas:
        one.begin()

    def one_round() -> None:
        for one in replicas:
            one.push()
        for one in replicas:
            one.finish()

    print(json.dumps(times_s), flush=True)
    sys.stdin.readline()
    one_round()
    grown = private_nbytes() - before
    measured.await_go()
    cpu_s, start_s = measured.own_cpu_s(), time.perf_counter()
    for _ in range(rounds):
        one_round()
    measured.report(
        {
            "round_s": (time.perf_counter() - start_s) / rounds,
            "cpu_s": (measured.own_cpu_s() - cpu_s) / rounds,
            "nbytes": grown,
        }
    )
    for one in replicas:
        one.session.leave("finished")


def declared(slices: int, tensors: int) -> Any:
    """Returns the declaration of the table."""
    from pscore.compressors.none import NoCompression
    from pscore.optimizers.sgd import SGD
    from pscore.rules import SSGD
    from pscore.table_spec import TableSpec
    from pscore.types import TensorSpec

    partition.SLICE_NUMEL_MAX = SLICE_NUMEL
    return TableSpec(
        name="model",
        tensors=tuple(
            TensorSpec(name=f"layers.{index}.weight", shape=(numel,), dtype="float32")
            for index, numel in enumerate(shapes(slices, tensors))
        ),
        num_shards=1,
        rule=SSGD(),
        compressor=NoCompression(),
        optimizer=SGD.name,
        num_groups=1,
    )


class Worker:
    """One worker: a session, and a replica whose weights others of the process have too."""

    def __init__(self, session: Any, table: Any, weights: Any) -> None:
        """Declares the table."""
        import numpy as np
        import torch

        from pscore.optimizers.sgd import SGD
        from psworker.connection.exchange.exchange import Exchange
        from psworker.replica.replica import Replica

        self.session = session
        self.exchange = Exchange(session, table, share=True)
        layout = self.exchange.layout
        self.replica = Replica(layout, table.rule, SGD(), 1, weights, session.rank)
        row = np.array([[HYPER.get(name, 0.0) for name in SGD.hyper_names]])
        for part in self.replica.parts:
            part.hyper = row
        assert self.exchange.grads is not None
        flat = torch.from_numpy(self.exchange.grads).fill_(1.0)
        self._grads = [flat[part.start : part.stop] for part in layout.slices]

    def load(self) -> None:
        """Brings the first weights of the job."""
        import numpy as np

        from pscore.types import Role

        for part in self.exchange.layout.slices:
            self.exchange.load(part.index, Role.WEIGHTS, [np.zeros(part.numel, np.float32)], [])
        self.exchange.flush()

    def begin(self) -> None:
        """Pulls the weights."""
        self.exchange.run(self.replica.begin(self.exchange))

    def push(self) -> None:
        """Pushes and pulls all slices; waits for none."""
        with self.exchange.together:
            for index in self.replica.front_first():
                self.replica.push(index, self._grads[index], -1, 1.0, self.exchange)

    def finish(self) -> None:
        """Waits for the weights."""
        self.exchange.run(self.replica.finish(self._grads, self.exchange, 1.0))


# ----- all of it


def measure(num_workers: int, slices: int, tensors: int) -> dict[str, Any]:
    """Returns the figures of one case."""
    import psutil

    pushes = num_workers * slices
    rounds = -(-PUSHES // pushes)
    num_processes = min(num_workers, PROCESSES_MAX)
    job = f"growth-{os.getpid()}"
    with start_shard() as servers:
        shard, cpu = psutil.Process().children()[-1], kit.Cpu(1)
        started = [
            kit.Role(
                MODULE,
                "workers",
                {
                    "ranks": list(range(number, num_workers, num_processes)),
                    "num_workers": num_workers,
                    "slices": slices,
                    "tensors": tensors,
                    "rounds": rounds,
                },
                kit.worker_environment(servers.addresses, 0, num_workers, "local", job),
            )
            for number in range(num_processes)
        ]
        with kit.roles(*started):
            for role in started:
                role.line()
            before = private_nbytes(shard.pid)
            times_s: dict[str, float] = {}
            for role in started:  # One behind the other: the first one declares the table.
                role.tell()
                times_s = role.line() | times_s
            for role in started:
                role.tell()
            for role in started:
                role.line()
            grown, mark_s = private_nbytes(shard.pid) - before, cpu.seconds()
            for role in started:
                role.tell()
            results = [role.line() for role in started]
            shard_s = (cpu.seconds() - mark_s) / rounds
            read = restore(servers.addresses, job) if num_workers == 1 else {}
            for role in started:
                assert role.popen.stdin is not None
                role.popen.stdin.close()
            for role in started:
                role.popen.wait(kit.ROLE_TIMEOUT_S)
    return {
        "workers": num_workers,
        "slices": slices,
        "tensors": tensors,
        "processes": num_processes,
        "rounds": rounds,
        "round_s": round(max(result["round_s"] for result in results), 4),
        "shard_ms": round(1e3 * shard_s / pushes, 4),
        "worker_ms": round(1e3 * sum(result["cpu_s"] for result in results) / pushes, 4),
        "shard_nbytes": grown,
        "worker_nbytes": round(sum(result["nbytes"] for result in results) / num_workers),
        **{name: round(seconds, 3) for name, seconds in times_s.items()},
        **read,
    }


def start_shard() -> EmbeddedServers:
    """Starts a shard whose tables have short slices."""

    def start(plan: str, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        command, pipe = [sys.executable, "-c", SHARD, plan], subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, process_group=0)

    partition.SLICE_NUMEL_MAX = SLICE_NUMEL  # A job's reader computes its layout too.
    with mock.patch.object(supervisor, "start_process", start):
        return start_embedded(1)


def restore(addresses: list[str], job: str) -> dict[str, float]:
    """Returns the seconds in which a job is read out of a shard, and made again in another."""
    from pscore.net.credentials import ANYONE
    from psserver.remote import checkpoint

    start_s = time.perf_counter()
    captured = checkpoint.capture(addresses, ANYONE, job, weights_only=False)
    read_s = time.perf_counter() - start_s
    with start_shard() as others:
        start_s = time.perf_counter()
        checkpoint.restore(others.addresses, ANYONE, captured, job)
        return {"read_s": round(read_s, 3), "restore_s": round(time.perf_counter() - start_s, 3)}


def counts(text: str) -> list[int]:
    """Returns the numbers of a list on the command line."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    for name, values in (("workers", WORKERS), ("slices", SLICES), ("tensors", TENSORS)):
        usual = ",".join(map(str, values))
        parser.add_argument(f"--{name}", type=counts, default=usual, help="default: %(default)s")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="add the cases to it")
    options = parser.parse_args()
    found = {}
    if options.results is not None and options.results.exists():
        found = {key(one): one for one in json.loads(options.results.read_text())["cases"]}
    about = {"commit": kit.commit(), "date": datetime.date.today().isoformat()}
    for wanted in itertools.product(options.workers, options.slices, options.tensors):
        one = measure(*wanted) | about | {"machine": kit.machine()}
        found[key(one)] = one
        if options.results is not None:
            cases = [found[name] for name in sorted(found)]
            options.results.write_text(
                json.dumps({"command": f"python -m {MODULE}", "cases": cases}, indent=1) + "\n"
            )
        if sys.stderr.isatty():
            print(one, file=sys.stderr)
    columns = ["workers", "slices", "tensors", "round_s", "shard_ms", "worker_ms"]
    kit.show(
        "one push and its pull as work grows",
        columns,
        [[one[name] for name in columns] for _, one in sorted(found.items())],
    )
    if options.json:
        print(json.dumps([found[name] for name in sorted(found)]))


def key(case: dict[str, Any]) -> tuple[int, int, int]:
    """Returns the counts that a case is of."""
    return case["tensors"], case["workers"], case["slices"]


if __name__ == "__main__" and not measured.serve(sys.argv[1:], {"workers": workers}):
    main()
