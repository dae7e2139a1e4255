"""Steps of row tables on links of 1 Gbit/s, beside sums over all workers: time, and bytes sent.

Four hosts of `benchmarks.netlab` have a shard and a worker each; `measure_others` has two and
eight, as `..._2` and `..._8`. `rows` is the step of step.py. `gloo_sparse` and `gloo_dense` are the
sum of a gradient over Gloo, of the rows of a batch and of the whole table: a step of DDP takes at
least so long. `bytes_of_formula`: all bytes of the hosts, with headers, over the payload between
hosts, which is for each row of a batch its id twice, its values, its gradient and a count.
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
NUM_HOSTS, OTHERS, RATE, GLOO_PORT = 4, (2, 8), "1gbit", 29700
FULL = {"num_rows": 10_000_000, "touched": 25_000, "rounds": 20}
QUICK = {"num_rows": 1_000_000, "touched": 2_500, "rounds": 20}
DENSE_ROUNDS = 2
ROW_NBYTES = 2 * 8 + 2 + 2 * 4 * DIM


def run_sum(
    num_rows: int, touched: int, rounds: int, rank: int, of: int, address: str, port: int
) -> None:
    """Runs one of some workers that add gradients up: dense ones if it touches all rows."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=of
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
    hosts = range(len(started))
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


def _run_rows(lab: Lab, num_hosts: int, case: dict[str, Any]) -> tuple[float, int]:
    """Returns what `_run` does of row tables, a shard and a worker on each host."""
    hosts = range(num_hosts)
    with tempfile.TemporaryDirectory() as folder:
        common = {"num_shards": num_hosts, "folder": folder}
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
                    kit.worker_environment(servers, rank, num_hosts, "auto", "wire"),
                    lab.inside(rank),
                )
                for rank in hosts
            ]
            return _run(lab, workers)


def _run_sum(lab: Lab, num_hosts: int, case: dict[str, Any], port: int) -> float:
    """Returns the median milliseconds of a sum over all workers by Gloo."""
    place = {"of": num_hosts, "address": lab.address(0), "port": port}
    workers = [
        kit.Role(
            MODULE,
            "sum",
            {**case, "rank": rank, **place},
            {"GLOO_SOCKET_IFNAME": "net"},
            lab.inside(rank),
        )
        for rank in range(num_hosts)
    ]
    return _run(lab, workers)[0]


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
    with Lab(NUM_HOSTS, RATE) as lab:
        found["rows"], nbytes = _run_rows(lab, NUM_HOSTS, case)
        payload = ROW_NBYTES * case["touched"] * NUM_HOSTS * (NUM_HOSTS - 1) / NUM_HOSTS
        found["bytes_of_formula"] = round(nbytes / payload / case["rounds"], 3)
        found["gloo_sparse"] = _run_sum(lab, NUM_HOSTS, case, GLOO_PORT)
        found["gloo_dense"] = _run_sum(lab, NUM_HOSTS, whole, GLOO_PORT + 1)
    return found


def measure_others(quick: bool) -> dict[str, float] | None:
    """Returns milliseconds by way and number of hosts; None without hosts.

    Args:
        quick: Whether table and batches are small.
    """
    if available() is not None:
        return None
    case: dict[str, Any] = QUICK if quick else FULL
    found: dict[str, float] = {}
    for number in OTHERS:
        with Lab(number, RATE) as lab:
            found[f"rows_{number}"] = _run_rows(lab, number, case)[0]
            found[f"gloo_sparse_{number}"] = _run_sum(lab, number, case, GLOO_PORT + number)
    return found


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"sum": run_sum})
