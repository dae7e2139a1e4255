"""Time of a step on an embedding of which a batch touches a small part, beside torch's own ways.

Two workers, Adagrad, one table of 32 columns; each worker looks up as many rows at each step,
nearly all of them distinct. `rows`: a row table on two shards; `gloo_sparse`, `ddp_dense`:
DistributedDataParallel over Gloo, with sparse and with dense gradients; `torchrec_cpu`: TorchRec's
fused tables over Gloo, where it is installed, else null.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import kit, measured, transport

MODULE = "benchmarks.rows.step"
DIM, NUM_WORKERS, NUM_SHARDS = 32, 2, 2
FULL = {"num_rows": 1_000_000, "touched": 25_000, "rounds": 20}
QUICK = {"num_rows": 250_000, "touched": 10_000, "rounds": 7}


def _batches(rank: int, num_rows: int, touched: int) -> Callable[[], Any]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    return lambda: torch.randint(num_rows, (touched,), generator=generator)


def run_rows(num_rows: int, touched: int, rounds: int) -> None:
    """Runs a worker of Paceline."""
    import torch

    import psworker

    torch.set_num_threads(1)
    table = psworker.Embedding(num_rows, DIM, name="table", init="zeros")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(DIM, 1)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.Adagrad(psworker.dense_parameters(model)),
        model.named_parameters(),
        rows=torch.optim.Adagrad([table.weight]),
    )
    draw = _batches(psworker.rank(), num_rows, touched)

    def one_step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model["top"](table(draw())).square().mean())
        optimizer.step()

    measured.report(measured.timed(one_step, rounds))
    psworker.shutdown()


def run_ddp(
    num_rows: int, touched: int, rounds: int, rank: int, port: int, is_sparse: bool
) -> None:
    """Runs a process of DistributedDataParallel."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_WORKERS
    )
    table = torch.nn.Embedding(num_rows, DIM, sparse=is_sparse)
    model = torch.nn.Sequential(table, torch.nn.Linear(DIM, 1))
    optimizer = torch.optim.Adagrad(model.parameters())
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    draw = _batches(rank, num_rows, touched)

    def one_step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(wrapped(draw()).square().mean())
        optimizer.step()

    measured.report(measured.timed(one_step, rounds))
    torch.distributed.destroy_process_group()


def run_torchrec(num_rows: int, touched: int, rounds: int, rank: int, port: int) -> None:
    """Runs a process of TorchRec: a table divided by columns, by rows it does so on GPUs only."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_WORKERS
    )
    config = EmbeddingBagConfig(
        num_embeddings=num_rows, embedding_dim=DIM, name="table", feature_names=["ids"]
    )
    tables = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.01}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=NUM_WORKERS, compute_device="cpu"),
        constraints={
            "table": ParameterConstraints(
                sharding_types=["column_wise"], min_partition=DIM // NUM_WORKERS
            )
        },
    )
    plan = planner.collective_plan(tables, [sharder], torch.distributed.group.WORLD)
    sharded = DistributedModelParallel(
        tables, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    top = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(DIM, 1))
    optimizer = torch.optim.Adagrad(top.parameters())
    draw, lengths = _batches(rank, num_rows, touched), torch.ones(touched, dtype=torch.int64)

    def one_step() -> None:
        optimizer.zero_grad()
        given = KeyedJaggedTensor(keys=["ids"], values=draw(), lengths=lengths)
        torch.autograd.backward(top(sharded(given).values()).square().mean())
        optimizer.step()

    measured.report(measured.timed(one_step, rounds))
    torch.distributed.destroy_process_group()


def _run_group(name: str, arguments: dict[str, Any]) -> float:
    """Returns the median milliseconds of a step of processes that find each other by a port."""
    port = transport.free_port()
    started = [
        kit.Role(MODULE, name, {**arguments, "rank": rank, "port": port})
        for rank in range(NUM_WORKERS)
    ]
    with kit.roles(*started):
        for role in started:
            role.line()
        for role in started:
            role.tell()
        results = [role.line() for role in started]
        for role in started:
            assert role.popen.stdin is not None
            role.popen.stdin.close()
    return max(kit.median(result["times_s"]) for result in results) * 1e3


def measure(quick: bool) -> dict[str, float | None]:
    """Returns the median milliseconds of a step, by way.

    Args:
        quick: Whether the case is small.
    """
    case = QUICK if quick else FULL
    results, _ = kit.run_workers(
        MODULE, "rows", case, plane="auto", num_workers=NUM_WORKERS, num_shards=NUM_SHARDS
    )
    has_torchrec = importlib.util.find_spec("torchrec") is not None
    return {
        "rows": max(kit.median(result["times_s"]) for result in results) * 1e3,
        "gloo_sparse": _run_group("ddp", {**case, "is_sparse": True}),
        "torchrec_cpu": _run_group("torchrec", case) if has_torchrec else None,
        "ddp_dense": _run_group("ddp", {**case, "is_sparse": False}),
    }


if __name__ == "__main__":
    measured.serve(sys.argv[1:], {"rows": run_rows, "ddp": run_ddp, "torchrec": run_torchrec})
