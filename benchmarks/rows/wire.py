"""Steps of row tables on links of 1 Gbit/s, beside sums over all workers: time, and bytes sent.

Four hosts of `benchmarks.netlab` have a shard and a worker each. `rows` is the step of step.py on
them. `gloo_sparse` and `gloo_dense` are only the sum of a gradient over Gloo, of the rows of a
batch and of the whole table: a step of DDP takes at least so long. `bytes_of_formula`: all bytes of
the hosts, with headers, over the payload between hosts, which is for each row of a batch its
id twice, its values, its gradient and a count.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from benchmarks import kit, measured
from benchmarks.hosts import PORT
from benchmarks.netlab import Lab, available, shaped_nbytes
from benchmarks.rows.step import DIM

MODULE, HOSTS = "benchmarks.rows.wire", "benchmarks.hosts"
NUM_HOSTS, RATE, GLOO_PORT = 4, "1gbit", 29700
FULL = {"num_rows": 10_000_000, "touched": 25_000, "rounds": 20}
QUICK = {"num_rows": 1_000_000, "touched": 2_500, "rounds": 20}
DENSE_ROUNDS = 2
ROW_NBYTES = 2 * 8 + 2 + 2 * 4 * DIM


def run_sum(num_rows: int, touched: int, rounds: int, rank: int, address: str, port: int) -> None:
    """Runs a worker that adds gradients up: dense ones if it touches all rows."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=NUM_HOSTS
    )
    dense, values = torch.ones(0), torch.ones(touched, DIM)
    if touched == num_rows:
        dense = values
    generator = torch.Generator().manual_seed(rank)

    def one_round() -> None:
        if len(dense):
            torch.distributed.all_reduce(dense)
            return
        ids = torch.randint(num_rows, (touched,), generator=generator).unique()
        rows = torch.sparse_coo_tensor(ids[None], values[: len(ids)], (num_rows, DIM))
        torch.distributed.all_reduce(rows.coalesce())

    measured.report(measured.timed(one_round, rounds))
    torch.distributed.destroy_process_group()


def _run(lab: Lab, started: list[kit.Role]) -> tuple[float, int]:
    """Returns the median milliseconds of a round, and the bytes that all hosts have sent."""
    hosts = range(NUM_HOSTS)
    with kit.roles(*started):
        for role in started:
            role.line()
        before = sum(shaped_nbytes("net", lab.name(host)) for host in hosts)
        for role in started:
            role.tell()
        results = [role.line() for role in started]
        nbytes = sum(shaped_nbytes("net", lab.name(host)) for host in hosts) - before
        for role in started:
            assert role.popen.stdin is not None
            role.popen.stdin.close()
            role.popen.wait(kit.ROLE_TIMEOUT_S)
    return 1e3 * max(kit.median(result["times_s"]) for result in results), nbytes


def measure(quick: bool) -> dict[str, float] | None:
    """Returns milliseconds by way, and the bytes of rows over the formula; None without hosts.

    Args:
        quick: Whether table and batches are small.
    """
    if available() is not None:
        return None
    case: dict[str, Any] = QUICK if quick else FULL
    whole = {**case, "touched": case["num_rows"], "rounds": DENSE_ROUNDS}
    found: dict[str, float] = {}
    hosts = range(NUM_HOSTS)
    with Lab(NUM_HOSTS, RATE) as lab, tempfile.TemporaryDirectory() as folder:
        common = {"num_shards": NUM_HOSTS, "folder": folder}
        shards = [
            kit.Role(
                HOSTS,
                "serve",
                {"host": lab.address(host), "index": host, **common},
                prefix=lab.inside(host),
            )
            for host in hosts
        ]
        with kit.roles(*shards):
            for shard in shards:
                assert shard.popen.stdout is not None
                if not shard.popen.stdout.readline():
                    raise RuntimeError(f"{shard.what} ended\n{shard.written()}")
            servers = [f"{lab.address(host)}:{PORT}" for host in hosts]
            workers = [
                kit.Role(
                    "benchmarks.rows.step",
                    "rows",
                    case,
                    kit.worker_environment(servers, rank, NUM_HOSTS, "auto", "wire"),
                    lab.inside(rank),
                )
                for rank in hosts
            ]
            found["rows"], nbytes = _run(lab, workers)
        payload = ROW_NBYTES * case["touched"] * NUM_HOSTS * (NUM_HOSTS - 1) / NUM_HOSTS
        found["bytes_of_formula"] = round(nbytes / payload / case["rounds"], 3)
        for number, (name, given) in enumerate({"gloo_sparse": case, "gloo_dense": whole}.items()):
            place = {"address": lab.address(0), "port": GLOO_PORT + number}
            groups = [
                kit.Role(
                    MODULE,
                    "sum",
                    {**given, "rank": rank, **place},
                    {"GLOO_SOCKET_IFNAME": "net"},
                    lab.inside(rank),
                )
                for rank in hosts
            ]
            found[name], _ = _run(lab, groups)
    return found


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"sum": run_sum})
