"""Models whose processes hold a part each: FSDP2 and tensor parallelism in a group (docs/hosts.md).

The model is a GPT of two blocks with tied weights. Two groups of two processes train it, against
one process that has the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import psworker
from psworker.training import hints
from tests.integration.cluster import Shards, Station, Worker, new_job, results_of
from tests.integration.command import Command, free_ports
from tests.integration.test_groups import GROUPS, SIZE, group_workers
from tests.integration.test_hints import Lines

VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS = 67, 12, 40, 4, 2
STEPS, FEW = 30, 10
SEQUENCES = 2  # Of one process in one step.
LR = 1e-3
MODES = ("ssd(steps=3, warmup=2)", "diloco(steps=4)", "diloco(steps=4, overlap=eager, delay=1)")
Weights = dict[str, npt.NDArray[np.float32]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # A bias of keys has no gradient but rounding, which AdamW makes steps of.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv.unbind()
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        down: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + down


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, step: int, ranks: Iterable[int]) -> torch.Tensor:
    """Returns the mean loss of the sequences of some processes."""
    text = [
        torch.randint(VOCABULARY, (SEQUENCES, CONTEXT + 1), generator=generator)
        for generator in (torch.Generator().manual_seed(1000 * step + rank) for rank in ranks)
    ]
    tokens = torch.cat(text)
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def make(kind: str) -> GPT:
    """Returns the model, sharded over all processes of torch's world."""
    model = GPT()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        if kind == "tensor parallel":
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        elif kind == "fsdp2":
            fully_shard(block, mesh=mesh)
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-6, weight_decay=0.1)


def whole(model: nn.Module) -> Weights:
    """Returns the full tensors by name."""
    found = {}
    for name, value in model.named_parameters():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = full.detach().clone().numpy()  # FSDP2 frees the memory of its tensors.
    return found


@dataclass(frozen=True)
class Case:
    """One job."""

    mode: str = "ssgd"
    kind: str = "fsdp2"
    steps: int = FEW
    clip: float = math.inf
    overflows_at: int = -1  # With a GradScaler; the last process alone overflows.

    def ranks(self, rank: int) -> range:
        """Returns the processes whose data one process uses: all in it of a parallel tensor."""
        first = rank - rank % SIZE
        return range(first, first + SIZE) if self.kind[0] == "t" else range(rank, rank + 1)


class Run:
    """One process's part in a job."""

    def __init__(self, case: Case, rank: int, job: str) -> None:
        self.case, self.rank = case, rank
        self.model = make(case.kind)
        self.optimizer = psworker.DistributedOptimizer(
            optimizer_of(self.model),
            self.model.named_parameters(),
            mode=case.mode,
            model=self.model,
            job=job,
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        self.norms: list[float] = []

    def step(self, step: int, ranks: range | None = None) -> None:
        case, optimizer = self.case, self.optimizer
        optimizer.zero_grad()
        loss = loss_of(self.model, step, ranks or case.ranks(self.rank))
        if case.overflows_at == step and self.rank == GROUPS * SIZE - 1:
            loss = loss * math.inf
        torch.autograd.backward(self.scaler.scale(loss) if case.overflows_at >= 0 else loss)
        if case.clip < math.inf:
            self.norms.append(float(psworker.clip_grad_norm_(optimizer, case.clip)))
        if case.overflows_at >= 0:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def look(self) -> list[Weights]:
        """Returns the weights that forward passes use: here, globally, and here again."""
        seen = []
        for is_global in (False, True, False):
            with self.optimizer.global_weights() if is_global else nullcontext():
                with torch.no_grad():
                    loss = loss_of(self.model, 0, range(1))
                seen.append({**whole(self.model), "loss": loss.numpy()})
        return seen


Result = tuple[list[Weights], Weights, list[float]]


def work(me: Station, job: str, cases: Sequence[Case]) -> list[Result]:
    """Returns for each case a look at the middle, the weights at the end, and norms."""
    torch.distributed.init_process_group("gloo")
    results = []
    for number, case in enumerate(cases):
        run, looked = Run(case, me.rank, f"{job}-{number}"), []
        for step in range(case.steps):
            run.step(step)
            if step == case.steps // 2:
                looked = run.look()
        if number == 0:
            me.tell()
            me.hear()
        psworker.shutdown()
        results.append((looked, whole(run.model), run.norms))
    return results


def alone(case: Case, steps: int) -> tuple[Weights, list[float]]:
    """Returns the weights after the same steps of one process, and the norms of its gradients."""
    model, norms = GPT(), []
    optimizer = optimizer_of(model)
    ranks = range(GROUPS * SIZE)
    data = sorted({one for rank in ranks for one in case.ranks(rank)})
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, step, data))
        if case.clip < math.inf:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        if step != case.overflows_at:
            optimizer.step()
    return whole(model), norms


def distance(ours: Weights, theirs: Weights) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)


def work_restored(me: Station, kind: str) -> Weights:
    """Makes one step with the data of all."""
    torch.distributed.init_process_group("gloo")
    run = Run(Case(kind=kind), me.rank, "")
    assert run.optimizer.steps == STEPS
    run.step(STEPS, range(GROUPS * SIZE))
    psworker.shutdown()
    return whole(run.model)


@contextmanager
def one_group(shards: Shards, job: str, size: int, kind: str) -> Iterator[list[Worker]]:
    """Starts a job of one group."""
    (port,), started = free_ports(1), []
    try:
        for rank in range(size):
            env = shards.environment(rank, size, job) | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "none",
            }
            started.append(Worker(work_restored, rank, (kind,), env))
        yield started
    finally:
        for worker in started:
            worker.close()


CASES = [
    Case(steps=STEPS),
    Case(clip=0.5),
    Case(overflows_at=4),
    Case(kind="tensor parallel", clip=0.5),
    *(Case(mode, kind) for mode in MODES for kind in ("fsdp2", "whole")),
]


def change_weights(me: Station, job: str, kinds: Sequence[str]) -> list[list[str]]:
    """Makes steps, scales a parameter, and makes one more; returns the warnings, by kind."""
    torch.distributed.init_process_group("gloo")
    told = []
    for kind in kinds:
        lines = Lines()
        run = Run(Case(kind=kind), me.rank, f"{job}-{kind}")
        for step in range(3):
            run.step(step)
        with torch.no_grad():
            next(run.model.parameters()).mul_(0.5)
        run.step(3)
        psworker.shutdown()
        told.append([line.partition(",")[0] for line in lines.end()])
    return told


@pytest.mark.slow
def test_weights_that_the_script_changes_are_told_of_in_a_sharded_model_too(shards: Shards) -> None:
    kinds, job, groups = ("fsdp2", "whole"), new_job(), (0, 1)
    warning = "the weights of 'tokens.weight' were changed in place"
    with group_workers(shards, change_weights, job, kinds, job=job, groups=groups) as workers:
        assert results_of(workers) == [[[warning]] * len(kinds)] * (GROUPS * SIZE)


def clip_by_torch(me: Station, job: str) -> list[list[str]]:
    """Clips each worker's gradient in one step and the mean in others; returns the warnings.

    Torch's function fails by itself where only some parameters are DTensors.
    """
    torch.distributed.init_process_group("gloo")
    told = []
    for clips in (True, False):
        lines = Lines()
        run = Run(Case(clip=0.1), me.rank, f"{job}-{clips}")
        run.step(0)
        run.optimizer.zero_grad()
        torch.autograd.backward(loss_of(run.model, 1, run.case.ranks(me.rank)))
        if clips:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        run.step(2)
        psworker.shutdown()
        told.append(lines.end())
    return told


@pytest.mark.slow
def test_a_clip_before_the_mean_is_told_of_in_a_sharded_model_too(shards: Shards) -> None:
    job = new_job()
    with group_workers(shards, clip_by_torch, job, job=job, groups=(0, 1)) as workers:
        assert results_of(workers) == [[[hints.CHANGED], []]] * (GROUPS * SIZE)


@pytest.mark.slow
def test_sharded_models_of_two_groups_of_two_equal_one_process(
    shards: Shards, tmp_path: Path
) -> None:
    """Also restored on one process and on three, and exported; in other modes as without shards."""
    command, folder, job = Command(tmp_path), tmp_path / "checkpoints", new_job()
    arguments = ("--job", f"{job}-0", "--servers", shards.servers)
    with group_workers(shards, work, job, CASES, job=job, groups=(0, 1)) as workers:
        for worker in workers:
            worker.hear()
        command.run("checkpoint", folder, *arguments)
        command.run("export", tmp_path / "model.safetensors", *arguments)
        for worker in workers:
            worker.tell()
        results = results_of(workers)
    for number, case in enumerate(CASES):
        first, *others = [result[number] for result in results]
        here, _, again = first[0]
        assert distance(here, again) == 0.0, case  # Also where FSDP2 has kept whole weights.
        assert all(distance(first[1], other[1]) == 0.0 for other in others), case
        assert all(distance(first[0][1], other[0][1]) == 0.0 for other in others), case
        if case.mode == "ssgd":
            expected, norms = alone(case, case.steps)
            assert np.allclose(first[2], norms, rtol=1e-5), case
            assert distance(first[1], expected) < 1e-5, case
        elif case.kind == "fsdp2":
            looked, expected, _ = results[0][number + 1]
            assert distance(first[0][1], looked[1]) < 1e-5, case
            assert distance(first[1], expected) < 1e-5, case
    expected = alone(CASES[0], STEPS)[0]
    exported = GPT()
    load_model(exported, tmp_path / "model.safetensors")
    assert distance(whole(exported), expected) < 1e-5
    expected = alone(CASES[0], STEPS + 1)[0]
    for size, kind in ((1, "whole"), (3, "fsdp2")):
        with Shards(1) as restored:
            place = ("--job", f"{job}-0", "--servers", restored.servers)
            command.run("restore", folder, "--workers", 1, *place)
            with one_group(restored, f"{job}-0", size, kind) as workers:
                for found in results_of(workers):
                    assert distance(found, expected) < 1e-5
