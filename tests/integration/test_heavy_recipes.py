"""The recipes that need Lightning, Hugging Face or a compiler, beside their plain scripts.

`make test-recipes` runs them in an environment of their own.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station, Worker, new_job
from tests.integration.models import relative_error
from tests.integration.recipes import State, execute, plain, recipes, trained

TOLERANCE = 2e-6
DEADLINE_S = 400.0  # A compiler may have to be started.
pytestmark = [pytest.mark.recipes, pytest.mark.timeout(600)]


def run(me: Station, title: str, folder: Path, has_psworker: bool) -> State:
    """Runs a recipe in a folder, or its plain script; returns the weights of its models."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    code = recipes(heavy=True)[title]
    if not has_psworker:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        return trained(execute(plain(code), title))
    names = execute(code, title)
    psworker.shutdown()
    return trained(names)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("title", recipes(heavy=True))
def test_a_library_trains_as_its_plain_script_does(
    shards: Shards, tmp_path: Path, title: str
) -> None:
    """With one worker and with two, which leave the same files as one process does."""
    folders = [tmp_path / name for name in ("plain", "one", "two")]
    for folder in folders:
        folder.mkdir()
    found = []
    for number, folder in zip((1, 1, 2), folders, strict=True):
        has_psworker = folder.name != "plain"
        with shards.workers(run, title, folder, has_psworker, num_workers=number) as workers:
            found += [worker.result(DEADLINE_S) for worker in workers]
    theirs, one, first, second = found
    assert theirs
    for ours in (one, first, second):
        assert ours.keys() == theirs.keys()
        errors = {name: relative_error(ours[name], weight) for name, weight in theirs.items()}
        assert max(errors.values()) <= TOLERANCE, errors
    assert all(np.array_equal(first[name], second[name]) for name in theirs)
    assert files(folders[0]) == files(folders[1]) == files(folders[2])


def train_for_the_best(me: Station, folder: Path) -> State:
    """Trains three epochs, of which the metric calls the first the best; returns the weights."""
    import transformers

    from psworker.integrations import hide_launcher
    from psworker.integrations.transformers import PacelineTrainer

    os.chdir(folder)
    hide_launcher()
    psworker.init()
    torch.manual_seed(0)
    data = [{"inputs": torch.randn(20), "labels": number % 10} for number in range(32)]
    arguments = transformers.TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        report_to="none",
        use_cpu=True,
    )
    model = Classifier()
    part = data[psworker.rank() :: psworker.size()]
    PacelineTrainer(model, arguments, train_dataset=part, eval_dataset=data).train()
    psworker.shutdown()
    return {name: weight.detach().numpy() for name, weight in model.named_parameters()}


class Classifier(torch.nn.Module):
    """A layer with the loss that Transformers wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 10)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(inputs)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def test_every_rank_ends_with_the_best_weights(shards: Shards, tmp_path: Path) -> None:
    with shards.workers(train_for_the_best, tmp_path, num_workers=2) as workers:
        first, second = (worker.result(DEADLINE_S) for worker in workers)
    from safetensors.torch import load_file

    best = load_file(tmp_path / "trained" / "checkpoint-2" / "model.safetensors")
    assert first.keys() == second.keys() == best.keys()
    assert all(np.array_equal(first[name], best[name].numpy()) for name in best)
    assert all(np.array_equal(second[name], best[name].numpy()) for name in best)


Trained = tuple[list[int], list[float], State]  # Own steps, by their number in the job; rates.


def train_with_transformers(me: Station, folder: Path, hold_at: int) -> Trained:
    """Trains 3 epochs of 5 steps.

    Args:
        hold_at: The step behind which it tells, and waits for the test; 0: it tells at the start.
    """
    import transformers

    from psworker.integrations import hide_launcher
    from psworker.integrations.transformers import PacelineTrainer

    steps: list[int] = []
    rates: list[float] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, **more: Any) -> None:
            if not hold_at:
                me.tell()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            steps.append(state.global_step)
            rates.append(more["lr_scheduler"].get_last_lr()[0])
            if state.global_step == hold_at:
                me.tell()
                me.hear()

    hide_launcher()
    psworker.init()
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trained"),
        per_device_train_batch_size=4,
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to="none",
        use_cpu=True,
    )
    data = [{"inputs": torch.randn(20), "labels": number % 10} for number in range(20)]
    model = Classifier()
    trainer = PacelineTrainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=[Watch()]
    )
    trainer.train()
    psworker.shutdown()
    return steps, rates, {name: w.detach().numpy() for name, w in model.named_parameters()}


def train_with_lightning(me: Station, folder: Path, hold_at: int) -> Trained:
    """Trains as `train_with_transformers`."""
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from psworker.integrations.lightning import PacelineCallback

    steps: list[int] = []
    rates: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(20, 10)

        def training_step(self, rows: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(rows[0]), rows[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    class Watch(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, *given: Any) -> None:
            if not hold_at:
                me.tell()

        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            steps.append(trainer.global_step)
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            if trainer.global_step == hold_at:
                me.tell()
                me.hear()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 20), torch.randint(10, (20,)))
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=3,
        devices=1,
        accelerator="cpu",
        callbacks=[PacelineCallback(), Watch()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    psworker.shutdown()
    return steps, rates, {name: w.detach().numpy() for name, w in module.named_parameters()}


@pytest.mark.parametrize("train", [train_with_transformers, train_with_lightning])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_started_again_goes_on_with_the_others(
    tmp_path: Path, train: Callable[..., Trained], victim: int
) -> None:
    """It made all of the steps once more, from the first one of its schedule."""
    job, other = new_job(), 1 - victim
    with Shards(2, lease_s=2.0) as shards, ExitStack() as stack:
        workers: dict[int, Worker] = {}
        for rank in (0, 1):
            hold_at = 3 if rank == victim else 7
            started = shards.workers(train, tmp_path, hold_at, ranks=[rank], job=job)
            (workers[rank],) = stack.enter_context(started)
        workers[victim].hear(DEADLINE_S)
        workers[victim].kill()
        workers[other].hear(DEADLINE_S)
        again = shards.workers(train, tmp_path, 0, ranks=[victim], job=job)
        (workers[victim],) = stack.enter_context(again)
        workers[victim].hear(DEADLINE_S)
        assert "loop by optimizer.steps" not in workers[victim].written()
        workers[other].tell()
        found = [workers[rank].result(DEADLINE_S) for rank in (victim, other)]
    (steps, rates, ours), (all_steps, all_rates, theirs) = found
    assert all_steps == list(range(1, 16))
    assert steps == list(range(8, 16))
    assert rates == all_rates[7:]
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
