"""Optimizers that the shards do not run: the shards return the mean gradient, the workers step."""

import io
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.command import Command
from tests.integration.models import Branches, backward, batch, make_model, relative_error, same
from tests.integration.models import weights_of as named_weights

STEPS, HALF = 50, 20
SPOILT = 5  # The batch of Lion's run that overflows, on rank 1 alone.
Weights = dict[str, np.ndarray]
Wrap = Callable[[torch.optim.Optimizer, Iterable[tuple[str, Any]]], Any]


class Lion(torch.optim.Optimizer):
    """A user's own optimizer: Chen et al., arXiv:2302.06675, algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((0.9 * mean + 0.1 * parameter.grad).sign(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 0.01)


def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Clips the mean gradient; registered on the optimizer that steps."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    torch.nn.utils.clip_grad_norm_(weights, 0.5)


class Run:
    """Three models, with steps through the shards, or those of one torch process."""

    def __init__(self, wrap: Wrap, seed: int = 0) -> None:
        self.lion_model, self.muon_model, self.branches = make_model(), make_model(), Branches()
        self.models = {"lion": self.lion_model, "muon": self.muon_model, "factor": self.branches}
        if seed:
            torch.manual_seed(seed)
            for model in self.models.values():
                for weight in model.parameters():
                    torch.nn.init.normal_(weight)
        lion = Lion(self.lion_model.parameters())
        lion.register_step_pre_hook(clip)
        self.lion = wrap(lion, self.lion_model.named_parameters())
        matrices, others = (
            [(n, w) for n, w in self.muon_model.named_parameters() if (w.ndim == 2) == is_matrix]
            for is_matrix in (True, False)
        )
        self.muon = wrap(torch.optim.Muon([w for _, w in matrices], lr=0.01), matrices)
        self.adamw = wrap(torch.optim.AdamW([w for _, w in others], lr=0.01), others)
        adafactor = torch.optim.Adafactor(self.branches.parameters(), lr=0.01)
        self.factor = wrap(adafactor, self.branches.named_parameters())
        self.optimizers = [self.lion, self.muon, self.adamw, self.factor]
        self.schedules = [
            torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.5)
            for optimizer in self.optimizers
        ]

    def gradients(self, rank: int, step: int) -> None:
        """Makes one worker's gradients; in each step some branches have none, or on one rank."""
        inputs, classes = batch(rank, step)
        backward(self.muon_model, inputs, classes)
        which = (step // 2 if rank else step // 3) % 3
        loss = torch.nn.functional.cross_entropy(self.branches(inputs, which), classes)
        torch.autograd.backward(loss)

    def lion_loss(self, rank: int, step: int) -> torch.Tensor:
        inputs, classes = batch(rank, step)
        loss = torch.nn.functional.cross_entropy(self.lion_model(inputs), classes)
        return loss * float("inf") if (rank, step) == (1, SPOILT) else loss

    def schedule(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def weights(self) -> Weights:
        return {
            f"{kind}.{name}": weight
            for kind, model in self.models.items()
            for name, weight in named_weights(model).items()
        }

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = [*self.models.values(), *self.optimizers, *self.schedules]
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        states = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for part, state in zip(
            [*self.models.values(), *self.optimizers, *self.schedules], states, strict=True
        ):
            part.load_state_dict(state)


def wrap(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Any]]) -> Any:
    on = "worker" if isinstance(optimizer, torch.optim.AdamW) else "auto"
    return psworker.DistributedOptimizer(optimizer, named, optimizer_on=on)


def steps(run: Run, rank: int, span: range) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in span:
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        run.gradients(rank, step)
        torch.autograd.backward(scaler.scale(run.lion_loss(rank, step)))
        scaler.step(run.lion)
        scaler.update()
        for optimizer in (run.muon, run.adamw, run.factor):
            optimizer.step()
        with run.lion.global_weights():
            pass
        run.schedule()


def train(me: Station, checkpoint: bytes) -> tuple[Weights, bytes]:
    """Trains all steps, or those after a checkpoint, with models that begin elsewhere."""
    torch.set_num_threads(1)
    if checkpoint:
        run = Run(wrap, seed=7 + me.rank)
        run.load(checkpoint)
        steps(run, me.rank, range(HALF, STEPS))
    else:
        run = Run(wrap)
        steps(run, me.rank, range(HALF))
        checkpoint = run.save()
        steps(run, me.rank, range(HALF, STEPS))
    with pytest.raises(psworker.ConfigError, match=r"od.* while the workers run the optimizer"):
        run.lion.set_mode("od")
    psworker.shutdown()
    return run.weights(), checkpoint


def train_alone() -> Weights:
    """Returns the weights of one torch process that steps with the mean of two gradients."""
    run = Run(lambda optimizer, named: optimizer)
    for step in range(STEPS):
        grads = []
        for rank in range(2):
            for optimizer in run.optimizers:
                optimizer.zero_grad()
            run.gradients(rank, step)
            torch.autograd.backward(run.lion_loss(rank, step))
            grads.append(
                [w.grad for o in run.optimizers for g in o.param_groups for w in g["params"]]
            )
        parameters = [w for o in run.optimizers for g in o.param_groups for w in g["params"]]
        for parameter, *both in zip(parameters, *grads, strict=True):
            found = [grad for grad in both if grad is not None]
            parameter.grad = torch.stack(found).sum(0) / 2 if found else None
        for optimizer in run.optimizers[step == SPOILT :]:
            optimizer.step()
        run.schedule()
    return run.weights()


@pytest.mark.slow
def test_workers_that_step_end_where_one_process_ends_and_resume_to_the_bit(shards: Shards) -> None:
    """Lion with a scaler and a clipped mean; Muon beside AdamW; Adafactor with absent gradients."""
    alone = train_alone()
    (first, checkpoint), (second, other) = shards.run(train, b"")
    assert same(first, second)
    for name, weight in alone.items():
        assert relative_error(first[name], weight) <= 1e-6, name
    assert len(checkpoint) == len(other)
    for weights, _ in shards.run(train, other):
        assert same(weights, first)


def train_until_told(me: Station) -> str:
    """Trains while the test says so; returns the error that has ended it."""
    model = make_model()
    try:
        optimizer = wrap(Lion(model.parameters()), model.named_parameters())
        me.tell("ready")
        for step in itertools.count():
            optimizer.zero_grad()
            backward(model, *batch(me.rank, step))
            optimizer.step()
            if step in (3, 5):
                me.tell(step)
            if step == 3:
                me.hear()
            if step > 5 and me.is_told():
                break
        psworker.shutdown()
    except psworker.PacelineError as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


@pytest.mark.slow
def test_a_worker_that_comes_again_is_refused_and_the_others_continue(
    shards: Shards, tmp_path: Path
) -> None:
    job = new_job()
    with shards.workers(train_until_told, job=job) as (first, second):
        for worker in (first, second):
            assert [worker.hear(), worker.hear()] == ["ready", 3]
        second.kill()
        with shards.workers(train_until_told, job=job, ranks=[1]) as (again,):
            first.tell()
            problem = again.result()
        assert problem.startswith("StateLostError: worker 1 comes to job")
        assert "optimizer_on='worker'" in problem
        assert first.hear() == 5
        servers = ("--servers", ",".join(shards.addresses))
        done = Command(tmp_path).run("checkpoint", tmp_path, "--job", job, *servers, code=2)
        assert "the shards have no weights to save; let the script save state_dict()" in done.stderr
        first.tell()
        assert first.result() == ""


def test_a_mode_with_rounds_runs_it_and_a_model_that_grows_keeps_its_state(shards: Shards) -> None:
    (rounds, grown), (other_rounds, other_grown) = shards.run(train_others)
    assert same(rounds, other_rounds)
    assert same(grown, other_grown)
    model = make_model()
    alone, later = growing(model)
    for step in range(6):
        if step == 3:
            thaw(model, alone, later)
        parts = [batch(rank, step) for rank in range(2)]
        alone.zero_grad()
        backward(model, *(torch.cat(part) for part in zip(*parts, strict=True)))
        alone.step()
    for name, weight in named_weights(model).items():
        assert relative_error(grown[name], weight) <= 1e-6, name


def growing(model: torch.nn.Module) -> tuple[Any, list[torch.nn.Parameter]]:
    """Returns an optimizer of the last layer, and the frozen parameters of the others."""
    *later, weight, bias = model.parameters()
    for parameter in later:
        parameter.requires_grad_(False)
    return torch.optim.Adafactor([weight, bias], lr=0.01), later


def thaw(model: torch.nn.Module, optimizer: Any, later: list[torch.nn.Parameter]) -> None:
    for parameter in later:
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": later, "lr": 0.005})


def train_others(me: Station) -> tuple[Weights, Weights]:
    """Trains in a mode with rounds, and a model that grows in ssgd."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        Lion(model.parameters()),
        model.named_parameters(),
        mode="local(steps=2)",
        optimizer_on="worker",
    )
    for step in range(4):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    model_2 = make_model()
    made, later = growing(model_2)
    optimizer = wrap(made, list(model_2.named_parameters()))
    for step in range(6):
        if step == 3:
            thaw(model_2, optimizer, later)
        optimizer.zero_grad()
        backward(model_2, *batch(me.rank, step))
        optimizer.step()
    return named_weights(model), named_weights(model_2)
