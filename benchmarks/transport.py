"""Push and pull of a ResNet-50's worth of float32: `python -m benchmarks.transport [--json]`.

In one round every worker pushes its gradient (25.6 million float32), the shards make one SGD step
with momentum, and every worker pulls the weights: ssgd, uncompressed. GB/s is the payload pushed
and pulled by all workers, divided by the median round. `flat` is one tensor whose gradient is in
the flat vector already. `keys` are ResNet-50's 161 tensors, whose gradients are where a backward
pass has left them, through `DistributedOptimizer.step`. `tiny` is one slice of 1,024 elements.

Measured in the same run, in turns with these: a memory copy on all cores, a plain-socket round that
only adds (two connections), and Gloo's all-reduce in two processes. `--results FILE` keeps
everything as one line of JSON, from which `python -m benchmarks.pages` makes the table of
docs/dataplane.md.

In the JSON line `floor_share` is the floor of that page divided by the median round, and
`interpreter_ms_per_slice` the CPU time of the worker and of the shard in a round of `tiny` through
shared memory. It is the cost of a slice besides its bytes, with the cost of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kit, measured

MODULE = "benchmarks.transport"
SUFFIXES = {"flat": "", "keys": "_keys", "tiny": "_tiny"}
SHARES = {"local": "shm", "tcp": "tcp"}  # Names of data planes in the line of JSON.
TINY_ROUNDS = 100  # Of `tiny`, for one of another case: their median stands for them.
PIECE_NUMEL = 1 << 20
HYPER = {"lr": 0.01, "momentum": 0.9}


# ----- our own round


def exchange_rounds(case: str, rounds: int) -> None:
    """Runs one worker."""
    import torch

    torch.set_num_threads(1)
    if case == "keys":
        _keys_rounds(rounds)
    else:
        _flat_rounds(kit.shapes_of(case)[0], rounds)


def _flat_rounds(shape: tuple[int, ...], rounds: int) -> None:
    import torch

    from pscore.compressors.none import NoCompression
    from pscore.contents import FLAT, LONG
    from pscore.optimizers.sgd import SGD
    from pscore.rules import SSGD
    from pscore.table_spec import TableSpec
    from pscore.types import Role, TensorSpec
    from psworker.connection.exchange.exchange import Exchange
    from psworker.job import context
    from psworker.replica.replica import Replica
    from psworker.training.declaration import is_near

    session = context.join().session
    spec = TensorSpec(name="flat", shape=shape, dtype="float32")
    table = TableSpec(
        name="model",
        tensors=(spec,),
        num_shards=len(session.links),
        rule=SSGD(),
        compressor=NoCompression(),
        optimizer=SGD.name,
        num_groups=1,
        content=LONG if is_near(session) else FLAT,
    )
    exchange = Exchange(session, table, share=True)
    layout = exchange.layout
    replica = Replica(layout, SSGD(), SGD(), 1, torch.zeros(layout.numel), session.rank)
    row = [HYPER.get(name, 0.0) for name in SGD.hyper_names]
    for part in replica.parts:
        part.hyper = np.array([row])
    if session.rank == 0:
        for part in layout.slices:
            exchange.load(part.index, Role.WEIGHTS, [np.zeros(part.numel, np.float32)], [])
        exchange.flush()
    exchange.run(replica.begin(exchange))
    assert exchange.grads is not None
    flat = torch.from_numpy(exchange.grads).fill_(1.0)
    grads = [flat[part.start : part.stop] for part in layout.slices]

    def one_round() -> None:
        with exchange.together:
            for index in replica.front_first():
                replica.push(index, grads[index], -1, 1.0, exchange)
        exchange.run(replica.finish(grads, exchange, 1.0))

    measured.report(measured.timed(one_round, rounds))
    context.shutdown()


def _keys_rounds(rounds: int) -> None:
    import torch

    import psworker

    model = torch.nn.ParameterList([torch.zeros(s) for s in kit.resnet50_shapes()])
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), **HYPER),
        named_parameters=model.named_parameters(),
        overlap=True,
        gradient_as_bucket_view=True,
    )
    torch.autograd.backward([parameter.sum() for parameter in model.parameters()])
    measured.report(measured.timed(optimizer.step, rounds))
    psworker.shutdown()


def measure_ours(
    plane: str, case: str, num: int, rounds: int, journal_dir: Path | None = None
) -> tuple[list[float], float, float]:
    """Returns the seconds of each round, and CPU seconds per round of workers and of shards."""
    results, marks = kit.run_workers(
        MODULE,
        "exchange",
        {"case": case, "rounds": rounds},
        plane=plane,
        num_workers=num,
        num_shards=num,
        journal_dir=journal_dir,
    )
    times_s = [max(per_round) for per_round in zip(*(r["times_s"] for r in results), strict=True)]
    worker_s = sum(result["cpu_s"] for result in results) / rounds
    return times_s, worker_s, (marks[1] - marks[0]) / rounds


# ----- what it is compared with


def copy_rounds(rounds: int, num_threads: int = 1) -> list[float]:
    """Returns the seconds of each copy of a flat gradient, of which each thread copies a part."""
    sources = np.array_split(np.ones(kit.FLAT_NUMEL, np.float32), num_threads)
    targets = np.array_split(np.zeros(kit.FLAT_NUMEL, np.float32), num_threads)
    times_s = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(rounds):
            start_s = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            times_s.append(time.perf_counter() - start_s)
    return times_s


def gloo_rounds(case: str, rank: int, port: int, rounds: int) -> dict[str, Any]:
    """Runs one of two processes that all-reduce the same tensors."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensors = [torch.ones(shape) for shape in kit.shapes_of(case)]

    def one_round() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    result = measured.timed(one_round, rounds)
    dist.barrier()
    dist.destroy_process_group()
    return result


def measure_gloo(case: str, rounds: int) -> tuple[list[float], float]:
    """Returns the seconds of each round, and CPU seconds per round."""
    port = free_port()
    started = [
        kit.Role(MODULE, "gloo", {"case": case, "rank": rank, "port": port, "rounds": rounds})
        for rank in range(2)
    ]
    with kit.roles(*started):
        for role in started:
            role.line()
        for role in started:
            role.tell()
        results = [role.line() for role in started]
    times_s = [max(pair) for pair in zip(*(r["times_s"] for r in results), strict=True)]
    return times_s, sum(result["cpu_s"] for result in results) / rounds


def pieces_of(case: str) -> list[int]:
    """Returns the lengths of the messages of a plain-socket round, in elements."""
    if case == "keys":
        return [kit.numel_of([shape]) for shape in kit.resnet50_shapes()]
    full, rest = divmod(kit.FLAT_NUMEL, PIECE_NUMEL)
    return [PIECE_NUMEL] * full + ([rest] if rest else [])


def socket_server(case: str) -> dict[str, Any]:
    """Adds what comes on each of two connections and answers each piece with the sum."""
    listener = socket.create_server(("127.0.0.1", 0))
    cpu_s = measured.own_cpu_s()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    threads = []
    for half in range(2):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = threading.Thread(target=_add_pieces, args=(connection, pieces_of(case)[half::2]))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return {"cpu_s": measured.own_cpu_s() - cpu_s}


def _add_pieces(connection: socket.socket, pieces: list[int]) -> None:
    scratch = np.empty(max(pieces), np.float32)
    sums = [np.zeros(numel, np.float32) for numel in pieces]
    with connection:
        while True:
            for total in sums:
                piece = scratch[: len(total)]
                if not _fill(connection, memoryview(piece).cast("B")):
                    return
                np.add(total, piece, out=total)
                connection.sendall(memoryview(total).cast("B"))


def _fill(connection: socket.socket, target: memoryview) -> bool:
    filled = 0
    while filled < target.nbytes:
        count = connection.recv_into(target[filled:], 0, socket.MSG_WAITALL)
        if count == 0:
            return False
        filled += count
    return True


def measure_socket(case: str, rounds: int) -> tuple[list[float], float]:
    """Returns the seconds of each plain-socket round, and CPU seconds per round."""
    server = kit.Role(MODULE, "socket", {"case": case})
    with kit.roles(server):
        port = int(server.line()["port"])
        halves = [pieces_of(case)[half::2] for half in range(2)]
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in halves]
        grads = [[np.ones(numel, np.float32) for numel in half] for half in halves]
        weights = [[np.zeros(numel, np.float32) for numel in half] for half in halves]
        cpu_s, times_s = 0.0, []
        for number in range(measured.WARM_ROUNDS + rounds):
            if number == measured.WARM_ROUNDS:
                cpu_s = measured.own_cpu_s()
            start_s = time.perf_counter()
            _socket_round(connections, grads, weights)
            times_s.append(time.perf_counter() - start_s)
        cpu_s = measured.own_cpu_s() - cpu_s
        for connection in connections:
            connection.close()
        served = server.line()
    total = measured.WARM_ROUNDS + rounds
    return times_s[measured.WARM_ROUNDS :], cpu_s / rounds + float(served["cpu_s"]) / total


def _socket_round(connections: list[socket.socket], grads: Any, weights: Any) -> None:
    threads = []
    for connection, out, back in zip(connections, grads, weights, strict=True):
        threads.append(threading.Thread(target=_send_pieces, args=(connection, out)))
        threads.append(threading.Thread(target=_receive_pieces, args=(connection, back)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send_pieces(connection: socket.socket, pieces: list[np.ndarray]) -> None:
    for piece in pieces:
        connection.sendall(memoryview(piece).cast("B"))


def _receive_pieces(connection: socket.socket, pieces: list[np.ndarray]) -> None:
    for piece in pieces:
        _fill(connection, memoryview(piece).cast("B"))


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# ----- all of it


class Case:
    """One line of the table: rounds from several turns."""

    def __init__(self, name: str, plane: str, workers: int, case: str, measure: Any) -> None:
        self.name = name
        self.plane = plane  # Or `socket` or `gloo`.
        self.workers = workers
        self.case = case
        self.times_s: list[float] = []
        self._cpu_s: list[list[float]] = []
        self._measure = measure

    def turn(self, rounds: int) -> None:
        """Measures some rounds more."""
        size = TINY_ROUNDS if self.case == "tiny" else 1
        times_s, *cpu_s = self._measure(rounds * size)
        self.times_s += [kit.median(times_s[i : i + size]) for i in range(0, len(times_s), size)]
        self._cpu_s.append(cpu_s)

    @property
    def seconds(self) -> float:
        """Median round."""
        return kit.median(self.times_s)

    @property
    def gbytes(self) -> float:
        """Payload of one round, both ways, all workers."""
        return 2 * 4e-9 * kit.numel_of(kit.shapes_of(self.case)) * self.workers

    @property
    def gbps(self) -> float:
        """Payload over the median round."""
        return self.gbytes / self.seconds

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes per round."""
        return kit.median([sum(parts) for parts in self._cpu_s])

    @property
    def cpu_ms_by_side(self) -> dict[str, float]:
        """CPU milliseconds per round of the workers and of the shards; of our own cases."""
        sides = zip(*self._cpu_s, strict=True)
        return {
            side: round(1e3 * kit.median(list(parts)), 3)
            for side, parts in zip(("worker", "shard"), sides, strict=True)
        }

    def row(self) -> list[Any]:
        """Returns the line of the table."""
        return [
            self.name,
            self.case,
            f"{self.workers}x{self.workers}",
            1e3 * self.seconds,
            1e3 * min(self.times_s),
            self.gbps,
            self.cpu_s / self.gbytes,
        ]


def cases_of(planes: list[str], kinds: list[str], compare: bool) -> dict[str, Case]:
    """Returns the cases, by name."""
    cases: dict[str, Case] = {}
    for kind in kinds:
        for plane in planes:
            for num in (1,) if kind == "tiny" else (1, 2):
                cases[f"{plane} {num} {kind}"] = Case(
                    f"paceline {plane}",
                    plane,
                    num,
                    kind,
                    lambda rounds, p=plane, k=kind, n=num: measure_ours(p, k, n, rounds),
                )
        if compare and kind != "tiny":
            cases[f"socket 1 {kind}"] = Case(
                "plain TCP sockets",
                "socket",
                1,
                kind,
                lambda rounds, k=kind: measure_socket(k, rounds),
            )
            cases[f"gloo 2 {kind}"] = Case(
                "gloo all-reduce", "gloo", 2, kind, lambda rounds, k=kind: measure_gloo(k, rounds)
            )
    return cases


def summary(cases: dict[str, Case], copies_s: list[float]) -> dict[str, Any]:
    """Returns the main figures, by name."""
    from benchmarks import pages  # Loads the commands, which the measured processes do without.

    figures: dict[str, Any] = {}
    memcpy_gbps = 4e-9 * kit.FLAT_NUMEL / kit.median(copies_s)
    for kind, suffix in SUFFIXES.items():
        wanted = {
            "shm_1x1_gbps": (f"local 1 {kind}", "gbps"),
            "shm_2x2_s": (f"local 2 {kind}", "seconds"),
            "gloo_2x2_s": (f"gloo 2 {kind}", "seconds"),
            "tcp_1x1_gbps": (f"tcp 1 {kind}", "gbps"),
            "tcp_socket_1x1_gbps": (f"socket 1 {kind}", "gbps"),
            "grpc_1x1_gbps": (f"grpc 1 {kind}", "gbps"),
        }
        figures["memcpy_gbps" + suffix] = round(memcpy_gbps, 3)
        for name, (key, attribute) in wanted.items():
            if key in cases:
                figures[name + suffix] = round(getattr(cases[key], attribute), 5)
    run = pages.TransportRun(result(cases, copies_s))
    for round_ in run.rounds():
        if round_.plane in SHARES and round_.floor_ms is not None:
            shares = figures.setdefault("floor_share" + SUFFIXES[round_.case], {})
            path = f"{SHARES[round_.plane]}_{round_.workers}x{round_.workers}"
            shares[path] = round(round_.share, 3)
    if "local 1 tiny" in cases:
        tiny = cases["local 1 tiny"]
        figures["round_ms_tiny"] = round(1e3 * tiny.seconds, 3)
        figures["interpreter_ms_per_slice"] = tiny.cpu_ms_by_side
    return figures


def result(cases: dict[str, Case], copies_s: list[float]) -> dict[str, Any]:
    """Returns everything that was measured, for a file of results."""
    return {
        "program": "transport",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": kit.commit(),
        "machine": kit.machine(),
        "nbytes": 4 * kit.FLAT_NUMEL,
        "copy_threads": num_cores(),
        "copy_ms": _milliseconds(copies_s),
        "cases": [
            {
                "plane": case.plane,
                "case": case.case,
                "workers": case.workers,
                "gbytes": case.gbytes,
                "ms": _milliseconds(case.times_s),
                "cpu_s": round(case.cpu_s, 5),
            }
            for case in cases.values()
        ],
    }


def _milliseconds(times_s: list[float]) -> list[float]:
    return [round(1e3 * seconds, 3) for seconds in times_s]


def num_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=9, help="of each case, per turn")
    parser.add_argument("--turns", type=int, default=3, help="through all cases")
    parser.add_argument("--planes", default="local,tcp,grpc", help="also tcp+tls, grpc+tls")
    parser.add_argument("--cases", default="flat,keys,tiny")
    parser.add_argument("--only-ours", action="store_true", help="without Gloo and sockets")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the plot")
    parser.add_argument("--results", type=Path, help="file that gets the run as a line of JSON")
    options = parser.parse_args()
    cases = cases_of(
        options.planes.split(","), options.cases.split(","), compare=not options.only_ours
    )
    copies_s: list[float] = []
    for turn in range(options.turns):
        copies_s += copy_rounds(options.rounds, num_cores())
        for key, case in cases.items():
            case.turn(options.rounds)
            if sys.stderr.isatty():
                print(f"turn {turn + 1} {key}: {case.gbps:.2f} GB/s", file=sys.stderr)
    memcpy_gbps = 4e-9 * kit.FLAT_NUMEL / kit.median(copies_s)
    kit.show(
        f"push + pull of 25.6M float32, {options.rounds * options.turns} rounds each",
        ["path", "case", "workers x shards", "median ms", "best ms", "GB/s", "CPU s/GB"],
        [case.row() for case in cases.values()]
        + [["memory copy", "flat", "", 1e3 * kit.median(copies_s), 1e3 * min(copies_s),
            memcpy_gbps, ""]],
    )  # fmt: skip
    kit.plot_bars(
        options.out / "transport.png",
        "Push + pull of 25.6M float32",
        "GB/s of payload, both ways, all workers",
        {f"{c.name} {c.case} {c.workers}x{c.workers}": c.gbps for c in cases.values()},
    )
    if options.results is not None:
        options.results.write_text(json.dumps(result(cases, copies_s)) + "\n")
    if options.json:
        print(json.dumps(summary(cases, copies_s)))


ROLES = {"exchange": exchange_rounds, "gloo": gloo_rounds, "socket": socket_server}

if __name__ == "__main__":
    if not measured.serve(sys.argv[1:], ROLES):
        main()
