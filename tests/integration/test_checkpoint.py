"""Checkpoints of the shards: one step of all slices, other numbers of shards, the same bits."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import psworker
from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1 import checkpoint_pb2
from psserver.exits import CommandError
from psserver.remote import checkpoint
from psserver.remote.checkpoint_files import read
from psworker.connection.exchange.exchange import Exchange
from psworker.training import declaration
from tests.inside import table_of
from tests.integration.cluster import Shards, Station, Worker, WorkerError, new_job
from tests.integration.command import Command
from tests.integration.models import backward, batch, make_model, same, weights_of

Weights = dict[str, np.ndarray]
HALF, WHOLE = 5, 10
# A fixed threshold: blocks lie elsewhere on other shards, and so would be what is drawn.
COMPRESSIONS = {"2bit": "2bit(threshold=0.5)", "qsgd": "qsgd"}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "2bit": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "qsgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def begin(kind: str, seed: int) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = make_model()
    torch.manual_seed(seed)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    made = OPTIMIZERS[kind](model.parameters())
    compression = COMPRESSIONS.get(kind, "none")
    return model, psworker.DistributedOptimizer(
        made, model.named_parameters(), compression=compression, compress_min_nbytes=0
    )


def steps(me: Station, model: Any, optimizer: Any, span: range) -> None:
    for step in span:
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()


def train(me: Station, kind: str) -> tuple[Weights, Weights]:
    """Trains, and pauses half way until `continue`; returns the weights there and at the end."""
    model, optimizer = begin(kind, 0)
    steps(me, model, optimizer, range(HALF))
    half = {name: array.copy() for name, array in weights_of(model).items()}
    me.tell()
    me.hear()
    steps(me, model, optimizer, range(HALF, WHOLE))
    psworker.shutdown()
    return half, weights_of(model)


def resume(me: Station, kind: str, span: range = range(HALF, WHOLE)) -> tuple[Weights, Weights]:
    """Continues in a job that was restored, with a model that had begun elsewhere."""
    model, optimizer = begin(kind, 1)
    first = {name: array.copy() for name, array in weights_of(model).items()}
    steps(me, model, optimizer, span)
    psworker.shutdown()
    return first, weights_of(model)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def run(command: Command, shards: Shards, *arguments: object, code: int = 0) -> str:
    done = command.run(*arguments, "--servers", ",".join(shards.addresses), code=code)
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_shards"), [("sgd", 3), ("amsgrad", 3), ("nadam", 3), ("2bit", 3), ("qsgd", 2)]
)
def test_a_restored_job_continues_to_the_bit_on_other_shards(
    shards: Shards, command: Command, tmp_path: Path, kind: str, num_shards: int
) -> None:
    folder, job = tmp_path / "checkpoints", new_job()
    with shards.workers(train, kind, num_workers=2, job=job) as workers:
        for worker in workers:
            worker.hear()
        path = Path(run(command, shards, "checkpoint", folder, "--job", job).strip())
        for worker in workers:
            worker.tell()
        (half, whole), (_, other) = [worker.result() for worker in workers]
    assert same(whole, other)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (path.name, manifest["job"], manifest["sequence"]) == (f"{job}-00000001", job, 1)
    (table,) = manifest["tables"]
    assert {entry["version"] for entry in table["slices"].values()} == {HALF}
    merged = load_file(path / "model.safetensors")
    assert all(np.array_equal(merged[name].numpy(), half[name]) for name in half)
    with Shards(num_shards) as others:
        run(command, others, "restore", folder, "--job", job)
        with others.workers(resume, kind, num_workers=2, job=job) as workers:
            for first, final in [worker.result() for worker in workers]:
                assert same(first, half)
                assert same(final, whole)


def train_slices(me: Station, is_near: bool, span: range) -> tuple[list[int], np.ndarray]:
    """Trains a tensor, and pauses until `continue`; returns the lengths of slices, and weights."""
    declaration.is_near = lambda session: is_near
    weights = torch.nn.Parameter(torch.zeros(3_000_000))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.Adam([weights], lr=0.01), [("weights", weights)]
    )
    for step in span:
        generator = torch.Generator().manual_seed(step)
        weights.grad = torch.randn(weights.shape, generator=generator)
        optimizer.step()
        if step == HALF - 1:
            me.tell()
            me.hear()
    numels = [part.numel for part in table_of(optimizer).layout.slices]
    psworker.shutdown()
    return numels, weights.detach().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("is_near", [True, False])
def test_a_restored_job_keeps_its_slices_with_workers_that_would_choose_others(
    shards: Shards, command: Command, tmp_path: Path, is_near: bool
) -> None:
    folder, job = tmp_path / "checkpoints", new_job()
    whole, rest = range(WHOLE), range(HALF, WHOLE)
    with shards.workers(train_slices, is_near, whole, num_workers=1, job=job) as (worker,):
        worker.hear()
        run(command, shards, "checkpoint", folder, "--job", job)
        worker.tell()
        numels, weights = worker.result()
    assert len(numels) == (4 if is_near else 12)
    with Shards(2) as others:
        run(command, others, "restore", folder, "--job", job)
        ((found, final),) = others.run(train_slices, not is_near, rest, num_workers=1, job=job)
    assert found == numels
    assert np.array_equal(final, weights)


@pytest.mark.slow
def test_a_worker_that_comes_back_to_slices_of_another_length_says_what_to_do(
    shards: Shards, command: Command, tmp_path: Path
) -> None:
    folder, job = tmp_path / "checkpoints", new_job()
    with shards.workers(train_slices, False, range(WHOLE), num_workers=1, job=job) as (worker,):
        worker.hear()
        run(command, shards, "checkpoint", folder, "--job", job)
        worker.tell()
        worker.result()
    run(command, shards, "forget", job)
    with shards.workers(train_slices, True, range(WHOLE), num_workers=1, job=job) as (worker,):
        worker.hear()
        saved = read(folder, job, print)[1]
        checkpoint.restore(shards.addresses, ANYONE, saved, job, replaces=True)
        worker.tell()
        with pytest.raises(WorkerError, match=r"JobMismatchError: .* start this worker again"):
            worker.result()


def step_of(path: Path) -> int:
    """Returns the step that a checkpoint is of."""
    (table,) = json.loads((path / "manifest.json").read_text())["tables"]
    return int(table["version"])


def keep_training(me: Station, kind: str = "sgd") -> dict[int, Weights]:
    """Trains until told after which step to end; returns the weights after each step."""
    model, optimizer = begin(kind, 0)
    seen: dict[int, Weights] = {}
    me.tell()
    last = None
    while last is None or len(seen) < last:
        if last is None and me.is_told():
            me.hear()
            me.tell(len(seen))
            last = me.hear()
        steps(me, model, optimizer, range(len(seen), len(seen) + 1))
        seen[len(seen) + 1] = {name: a.copy() for name, a in weights_of(model).items()}
    psworker.shutdown()
    return seen


def end(workers: Sequence[Worker]) -> list[dict[int, Weights]]:
    """Ends all workers after one step; none of them can be more than two ahead of the first."""
    workers[0].tell()
    last = workers[0].hear() + 5
    for worker in workers[1:]:
        worker.tell()
        worker.tell(last)
    workers[0].tell(last)
    return [worker.result() for worker in workers]


@pytest.mark.slow
def test_a_checkpoint_under_load_is_of_one_step(
    shards: Shards, command: Command, tmp_path: Path
) -> None:
    folder, job = tmp_path / "checkpoints", new_job()
    with shards.workers(keep_training, num_workers=1, job=job) as (worker,):
        worker.hear()
        paths = [
            Path(run(command, shards, "checkpoint", folder, "--job", job, "--keep", 2).strip())
            for _ in range(3)
        ]
        exported = tmp_path / "model.safetensors"
        run(command, shards, "export", exported, "--job", job)
        given = ("export", ".", "--job", job, "--servers", shards.servers)
        assert "cannot write .: " in command.run(*given, code=5).stderr
        (seen,) = end([worker])
    assert sorted(os.listdir(folder)) == [".lock", *(path.name for path in paths[1:])]
    for path in paths[1:]:
        merged = load_file(path / "model.safetensors")
        weights = seen[step_of(path)]
        assert all(np.array_equal(merged[name].numpy(), weights[name]) for name in weights)
    merged = load_file(exported)
    assert any(
        all(np.array_equal(merged[name].numpy(), weights[name]) for name in weights)
        for weights in seen.values()
    )


@pytest.mark.slow
def test_a_checkpoint_under_load_has_the_residuals(
    shards: Shards, command: Command, tmp_path: Path
) -> None:
    folder, job = tmp_path / "checkpoints", new_job()
    with shards.workers(keep_training, "2bit", num_workers=2, job=job) as workers:
        for worker in workers:
            worker.hear()
        path = Path(run(command, shards, "checkpoint", folder, "--job", job).strip())
        seen, _ = end(workers)
    step, last = step_of(path), max(seen)
    for rank in (0, 1):
        residual = load_file(path / f"worker.{rank}.residual.safetensors")
        assert all(tensor.count_nonzero() > 0 for tensor in residual.values())
    span = range(step, min(step + HALF, last))
    with Shards(3) as three:
        run(command, three, "restore", folder, "--job", "again")
        with three.workers(resume, "2bit", span, num_workers=2, job="again") as workers:
            for first, final in [worker.result() for worker in workers]:
                assert same(first, seen[step])
                assert same(final, seen[span.stop])


MODE = "diloco(steps=4, fragments=2, outer_lr=0.5, outer_momentum=0.5)"
OFFSETS = (2, 4)  # Ends of rounds in a cycle of 4 steps: of the first elements and of the last.


def target(rank: int, step: int) -> float:
    return float(np.cos(1.0 + rank + 2.0 * step))


def train_fragments(me: Station, until: int | None, begin: float) -> tuple[int, list[float]]:
    """Trains until a step, or until told; returns the first step, and the last weights."""
    weight = torch.nn.Parameter(torch.full((9000,), begin))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.25), [("weight", weight)], mode=MODE
    )
    first = optimizer.steps
    me.tell()
    while not me.is_told() if until is None else optimizer.steps < until:
        weight.grad = weight.detach() - target(me.rank, optimizer.steps)
        optimizer.step()
    with optimizer.global_weights():
        ends = [float(weight[0]), float(weight[-1])]
    psworker.shutdown()
    return first, ends


def follow(offset: int, outer: tuple[float, float], span: range) -> tuple[float, float]:
    """Makes the rounds of one fragment in float64; returns its weight and its momentum."""
    (start, speed), local = outer, [outer[0]] * 2
    for step in span:
        local = [x - 0.25 * (x - target(rank, step)) for rank, x in enumerate(local)]
        if (step + 1 - offset) % 4 == 0:
            move = start - sum(local) / 2
            speed = 0.5 * speed + move
            start -= 0.5 * (move + 0.5 * speed)
            local = [start] * 2
    return start, speed


@pytest.mark.slow
def test_fragments_at_different_rounds_are_saved_after_the_same_number_of_them(
    shards: Shards, command: Command, tmp_path: Path
) -> None:
    """Each slice is copied when its own fragment has ended so many rounds, two steps apart.

    So a restored job begins with the weights and the momentum that each fragment had then, and at
    the end of that cycle; it trains as a job that has come there.
    """
    folder, job = tmp_path / "checkpoints", new_job()
    with shards.workers(train_fragments, None, 0.0, num_workers=2, job=job) as workers:
        for worker in workers:
            worker.hear()
        path = Path(run(command, shards, "checkpoint", folder, "--job", job).strip())
        for worker in workers:
            worker.tell()
        assert all(worker.result()[0] == 0 for worker in workers)
    rounds, again = step_of(path), new_job()
    run(command, shards, "restore", folder / path.name, "--job", again)
    ended, until = 4 * rounds, 4 * rounds + 12
    restored = shards.run(train_fragments, until, 9.0, num_workers=2, job=again)
    expected = []
    for offset in OFFSETS:
        saved = follow(offset, (0.0, 0.0), range(ended - 4 + offset))
        expected.append(follow(offset, saved, range(ended, until))[0])
    for first, ends in restored:
        assert first == ended
        assert ends == pytest.approx(expected, rel=1e-5, abs=1e-6)


def train_torn(me: Station) -> None:
    """Trains, and ends when the first of two shards alone has its push of step `HALF`."""
    model, optimizer = begin("sgd", 0)
    steps(me, model, optimizer, range(HALF))
    push = Exchange.push

    def last(exchange: Exchange, index: int, *args: Any, **options: Any) -> None:
        push(exchange, index, *args, **options)
        exchange.acknowledged(index)
        os._exit(1)

    Exchange.push = last  # type: ignore[assignment, method-assign]
    steps(me, model, optimizer, range(HALF, WHOLE))


def test_a_job_whose_last_worker_ended_in_the_middle_of_a_step_has_a_checkpoint(
    command: Command, tmp_path: Path
) -> None:
    """No version of all slices is there any more, nor will be while there is no worker."""
    folder, job = tmp_path / "checkpoints", new_job()
    with Shards(2, lease_s=5.0) as shards:  # A healthy worker keeps it under load.
        with shards.workers(train_torn, num_workers=1, job=job) as (worker,):
            with pytest.raises(WorkerError, match="ended with 1"):
                worker.result()
            shards.wait_until_lost(job, 0)
        path = Path(run(command, shards, "checkpoint", folder, "--job", job).strip())
    (table,) = json.loads((path / "manifest.json").read_text())["tables"]
    assert {entry["version"] for entry in table["slices"].values()} == {HALF, HALF + 1}
    merged = load_file(path / "model.safetensors")
    with Shards(3) as others:
        run(command, others, "restore", folder, "--job", job)
        span = range(HALF + 1, WHOLE)
        with others.workers(resume, "sgd", span, num_workers=1, job=job) as (worker,):
            first, final = worker.result()
    assert all(np.array_equal(merged[name].numpy(), first[name]) for name in first)
    assert not same(first, final)


def train_until_killed(me: Station) -> None:
    """Trains a job that is longer than its checkpoint, and waits for its end."""
    model, optimizer = begin("sgd", 0)
    steps(me, model, optimizer, range(HALF))
    me.tell()
    me.hear()
    steps(me, model, optimizer, range(HALF, WHOLE - 1))
    me.tell()
    me.hear()


@pytest.mark.slow
def test_a_restore_that_is_killed_between_two_shards_never_mixes_two_steps(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that come next are refused until the restore is repeated."""
    folder, job = tmp_path / "checkpoints", new_job()
    made: list[checkpoint_pb2.FinishRequest] = []
    call = checkpoint.JobShards.call

    def cut(shards: Any, shard: int, method: Any, request: Any) -> Any:
        if isinstance(request, checkpoint_pb2.FinishRequest):
            if made:
                raise KeyboardInterrupt
            made.append(request)
        return call(shards, shard, method, request)

    with Shards(2, lease_s=5.0) as shards:
        with shards.workers(train_until_killed, num_workers=1, job=job) as (worker,):
            worker.hear()
            run(command, shards, "checkpoint", folder, "--job", job)
            worker.tell()
            worker.hear()
            worker.kill()
            shards.wait_until_lost(job, 0)
        monkeypatch.setattr(checkpoint.JobShards, "call", cut)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.restore(shards.addresses, ANYONE, read(folder, job, print)[1], job)
        monkeypatch.undo()
        with (
            shards.workers(resume, "sgd", num_workers=1, job=job) as (worker,),
            pytest.raises(WorkerError, match="Restore a checkpoint with `psserver restore DIR"),
        ):
            worker.result()
        run(command, shards, "restore", folder, "--job", job)
        with shards.workers(resume, "sgd", num_workers=1, job=job) as (worker,):
            first, final = worker.result()
        saved = load_file(next(folder.glob(f"{job}-*")) / "model.safetensors")
        assert all(np.array_equal(saved[name].numpy(), first[name]) for name in first)
        with shards.workers(train, "sgd", num_workers=1, job=new_job()) as (worker,):
            worker.hear()
            worker.tell()
            assert same(worker.result()[1], final)


@pytest.mark.slow
def test_residuals_that_do_not_come_are_named_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "RESIDUALS_WAIT_S", 0.5)
    job = new_job()
    with (
        Shards(1, lease_s=3000) as shards,
        shards.workers(train, "2bit", num_workers=1, job=job) as (worker,),
    ):
        worker.hear()
        worker.kill(signal.SIGSTOP)
        with pytest.raises(CommandError, match=r"has not sent its residuals: \[0\]; the job"):
            checkpoint.capture(shards.addresses, ANYONE, job, weights_only=False)


def test_errors_of_the_command_are_one_sentence(
    shards: Shards, command: Command, tmp_path: Path
) -> None:
    job = new_job()
    with shards.workers(train, "sgd", num_workers=1, job=job) as (worker,):
        worker.hear()
        folder = tmp_path / "checkpoints"
        path = Path(run(command, shards, "checkpoint", folder, "--job", job).strip())
        said = run(command, shards, "checkpoint", folder, "--job", "nobody", code=2)
        assert "this needs a job 'nobody' with weights" in said
        assert job in said
        said = run(command, shards, "restore", path, "--job", job, code=1)
        assert "has live workers on shard 0" in said
        (tmp_path / "file").write_text("")
        said = run(command, shards, "checkpoint", tmp_path / "file" / "x", "--job", job, code=5)
        assert "cannot write" in said
        assert "Not a directory; nothing there was changed" in said
        worker.tell()
        worker.result()
    weights = path / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(bytes(damaged))
    said = run(command, shards, "restore", folder, "--job", "other", code=5)
    assert "model.safetensors has changed since it was written" in said
