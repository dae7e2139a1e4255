"""The scripts of docs/recipes.md train as the same scripts without Paceline."""

import functools
import os
import re
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import psworker
from tests.integration import warm
from tests.integration.cluster import ROOT, Shards, Station, new_job
from tests.integration.models import backward, batch, make_model, relative_error, sgd, weights_of
from tests.integration.recipes import PAGE, State, endless, execute, plain, recipes, trained

TOLERANCE = 1e-6  # Relative to the largest element of a tensor.
# A last bit of float32 now and then becomes one of 8 (bfloat16) or 11 bits; torch rounds after each
# occurrence of a row, and the norm of clipping multiplies last bits that differ with the processor.
ROUNDED = {
    "Autocast": 1e-2,
    "Autocast with GradScaler": 1e-2,
    "Clipping": 3e-6,
    "Sparse embeddings": 3e-6,
}
OWN_BATCH = "BatchNorm, and evaluation on rank 0"  # Each worker's model sees its own batch.
SSGD_ONLY = {"Weights that the script changes"}  # The workers hold the weights.


def run_all(me: Station, mode: str, job: str) -> dict[str, State]:
    """Runs every recipe as a job of its own; returns what each has trained."""
    psworker.DistributedOptimizer = functools.partial(  # type: ignore[misc, assignment]
        psworker.DistributedOptimizer, mode=mode
    )
    found = {}
    for number, (title, code) in enumerate(recipes().items()):
        if title in SSGD_ONLY and mode != "ssgd":
            continue
        psworker.init(job=f"{job}-{number}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "GradScaler is going to stop")
            names = execute(code, title)
        psworker.shutdown()
        found[title] = trained(names)
    return found


@functools.cache
def plain_scripts() -> dict[str, State]:
    return {title: trained(execute(plain(code), title)) for title, code in recipes().items()}


def differences(title: str, ours: State, theirs: State, tolerance: float) -> list[str]:
    assert ours.keys() == theirs.keys(), title
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    return [f"{title}: {name}: {error}" for name, error in errors.items() if error > tolerance]


@pytest.mark.slow
def test_one_worker_trains_as_the_plain_script_does(shards: Shards) -> None:
    (found,) = shards.run(run_all, "ssgd", new_job(), num_workers=1)
    wrong = [
        line
        for title, ours in found.items()
        for line in differences(title, ours, plain_scripts()[title], ROUNDED.get(title, TOLERANCE))
    ]
    assert not wrong


@pytest.mark.slow
def test_two_workers_train_as_the_plain_script_does_with_both_batches(shards: Shards) -> None:
    first, second = shards.run(run_all, "ssgd", new_job())
    accuracy = first[OWN_BATCH].pop("accuracy")
    assert 0.0 <= accuracy <= 1.0
    wrong = []
    for title, theirs in plain_scripts().items():
        for ours in (first, second):
            if title != OWN_BATCH:
                limit = ROUNDED.get(title, TOLERANCE)
                wrong += differences(title, ours[title], theirs, limit)
    assert not wrong
    weights = [name for name in second[OWN_BATCH] if name.endswith(("weight", "bias"))]
    assert all(np.array_equal(first[OWN_BATCH][name], second[OWN_BATCH][name]) for name in weights)


@pytest.mark.slow
def test_every_recipe_runs_in_a_mode_with_delayed_pulls(shards: Shards) -> None:
    """Its promise is another one: after the end all workers have the same, finite weights."""
    first, second = shards.run(run_all, "ssd(steps=3, warmup=3)", new_job())
    for title, ours in first.items():
        for name, values in ours.items():
            assert np.isfinite(values).all(), (title, name)
            if name.endswith(("weight", "bias")) and not name.startswith("ema."):
                assert np.array_equal(values, second[title][name]), (title, name)


# ----- every scheduler of torch

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
}


def follow(name: str, job: str | None, *, before: bool = False) -> State:
    """Trains eight steps under a scheduler; `before`: it is made before the wrapper."""
    model, make = make_model(), SCHEDULERS[name]
    optimizer = sgd(model.parameters())
    scheduler = make(optimizer) if before else None
    if job is not None:
        psworker.init(job=job)
        optimizer = psworker.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = scheduler or make(optimizer)
    for step in range(8):
        optimizer.zero_grad()
        loss = backward(model, *batch(0, step))
        optimizer.step()
        scheduler.step(*[loss] * (name == "ReduceLROnPlateau"))
    psworker.shutdown()
    return weights_of(model)


def follow_all(me: Station, job: str) -> dict[tuple[str, bool], State]:
    warnings.simplefilter("error")
    return {
        (name, before): follow(name, f"{job}-{name}-{before}", before=before)
        for name in SCHEDULERS
        for before in (False, True)
    }


@pytest.mark.slow
def test_every_scheduler_of_torch_may_be_made_before_or_after_the_wrapper(shards: Shards) -> None:
    missing = set(lr_scheduler.__all__) - {"LRScheduler", "_LRScheduler"} - SCHEDULERS.keys()
    assert not missing
    (found,) = shards.run(follow_all, new_job(), num_workers=1)
    for (name, _), ours in found.items():
        theirs = follow(name, None)
        assert not differences(name, ours, theirs, TOLERANCE)


# ----- ends


def launch(*words: object, folder: Path) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "MASTER_"))}
    command = ["-m", "psworker", "run", "--workers", 2, *words]
    pipe = subprocess.PIPE
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])}
    return warm.Popen(
        command, cwd=folder, env=kept | paths, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_after_ctrl_c_the_first_worker_saves(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(endless())
    with launch("--", script, folder=tmp_path) as process:
        assert process.stdout is not None
        said = "".join(iter(process.stdout.readline, "[0] step 3\n"))
        process.send_signal(signal.SIGINT)
        said += process.communicate(timeout=200)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    saved = torch.load(tmp_path / "interrupted.pt")
    start = execute(plain(endless().partition("try:")[0]), "start")["model"].state_dict()
    assert saved.keys() == start.keys()
    assert all(not torch.equal(saved[name], start[name]) for name in start)
    assert all(bool(values.isfinite().all()) for values in saved.values())


@pytest.mark.slow
def test_after_an_exception_in_one_worker_the_other_continues(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    broken = (
        "        if step == 3 and psworker.rank() == 1:\n            raise ValueError('broken')\n"
    )
    code = endless().replace("100_000", "20")
    script.write_text(code.replace("        inputs, labels", broken + "        inputs, labels"))
    words = ("--on-failure", "continue", "--", script)
    with launch(*words, folder=tmp_path) as process:
        said = process.communicate(timeout=200)[0]
    assert process.returncode == 1, said
    assert "[1] ValueError: broken" in said
    assert "[0] step 19\n" in said
    assert "[1] step 2\n" in said
    assert "[1] step 3\n" not in said


# ----- the page


def test_a_plain_script_has_nothing_of_ours_left() -> None:
    for title, code in (recipes() | recipes(heavy=True)).items():
        assert not re.search("psworker|Paceline|Plain", plain(code)), title


def test_every_python_block_of_the_page_is_a_recipe() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first = recipes()[OWN_BATCH].index("torch.manual_seed(0)\nmodel")
    common = recipes()[OWN_BATCH][:first].rstrip()
    assert text.count("```python") == 2 + len(recipes()) + len(recipes(heavy=True))
    assert all(code.startswith(common) for code in recipes(heavy=True).values())
