"""The recipes that need Lightning, Hugging Face or a compiler, beside their plain scripts.

`make test-recipes` runs them in an environment of their own.
"""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station
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
