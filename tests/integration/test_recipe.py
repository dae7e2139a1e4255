"""The recipe of docs/elastic.md as written there: no batch is drawn twice, though workers join."""

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from pscore.net.credentials import ANYONE
from psserver.remote import checkpoint
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import batch, make_model, sgd

pytestmark = pytest.mark.timeout(400)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "elastic.md"
RESUMED, JOINED, NUM_STEPS = 5, 10, 19

# Each mode, and the step at which a worker begins that joins when the other is at JOINED.
MODES = {
    "ssgd": JOINED,
    "ssd(steps=3, warmup=7)": JOINED,
    "asgd": JOINED,
    "local(steps=4)": 8,
    "local(steps=4, warmup=7)": 7,
    "diloco(steps=6)": 6,
}


def recipe() -> str:
    """Returns the code of the page."""
    (code,) = re.findall(r"```python\n(while .*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return str(code)


def follow(
    model: torch.nn.Module,
    optimizer: psworker.DistributedOptimizer,
    num_steps: int,
    before: Callable[[int], None] = lambda step: None,
) -> list[tuple[int, int]]:
    """Runs the recipe; returns the seeds of its batches. `before` is called with each step."""
    seeds: list[tuple[int, int]] = []

    def draw(seed: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        before(optimizer.steps)
        seeds.append(seed)
        return batch(*seed)

    names = {
        "NUM_STEPS": num_steps,
        "draw": draw,
        "learning_rate": lambda step: 0.1 / (1 + step),
        "model": model,
        "optimizer": optimizer,
        "psworker": psworker,
        "torch": torch,
    }
    exec(compile(recipe(), str(PAGE), "exec"), names)
    return seeds


def begin(mode: str, state: bytes | None) -> tuple[Any, psworker.DistributedOptimizer]:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode, samples=16
    )
    if state is not None and optimizer.steps == 0:  # As the page says.
        optimizer.load_state_dict(torch.load(io.BytesIO(state)))
    return model, optimizer


def train(me: Station, mode: str, state: bytes | None) -> tuple[list[tuple[int, int]], float]:
    """Trains to the end; at step JOINED it waits until the test has seen another worker join."""
    model, optimizer = begin(mode, state)
    is_first = psworker.rank() == 0

    def before(step: int) -> None:
        if step == JOINED and is_first:
            with optimizer.global_weights():  # All that it has pushed is in.
                me.tell()
                me.hear()

    if not is_first:
        me.tell(optimizer.steps)
    seeds = follow(model, optimizer, NUM_STEPS, before)
    seen = optimizer.samples_seen
    psworker.shutdown()
    return seeds, seen


def save(me: Station, mode: str) -> bytes:
    """Returns the state behind the first steps."""
    model, optimizer = begin(mode, None)
    assert follow(model, optimizer, RESUMED) == [(0, step) for step in range(RESUMED)]
    assert optimizer.samples_seen == 16 * RESUMED
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue()


def restored(me: Station, modes: list[str], job: str) -> list[tuple[int, int, float]]:
    """Returns, for each mode, steps after a restore of a checkpoint, after a change, and samples.

    Two workers make RESUMED steps each; in an asynchronous mode there are twice as many versions.
    """
    found = []
    for number, mode in enumerate(modes):
        psworker.init(job=f"{job}-{number}")
        model, optimizer = begin(mode, None)
        follow(model, optimizer, RESUMED)
        with optimizer.global_weights():
            psworker.barrier()
        if me.rank == 0:
            addresses = os.environ["PACELINE_SERVERS"].split(",")
            taken = checkpoint.capture(addresses, ANYONE, f"{job}-{number}", weights_only=False)
            checkpoint.restore(addresses, ANYONE, taken, f"{job}-{number}-again")
        psworker.barrier()
        psworker.shutdown()
        psworker.init(job=f"{job}-{number}-again")
        model, optimizer = begin(mode, None)
        begun = optimizer.steps
        follow(model, optimizer, NUM_STEPS)
        optimizer.set_mode({"local(steps=4)": "local(steps=3)"}.get(mode, "ssp(bound=1)"))
        found.append((begun, optimizer.steps, optimizer.samples_seen))
        psworker.shutdown()
    return found


@pytest.mark.slow
def test_steps_continue_after_a_restore_and_a_change_of_the_mode(shards: Shards) -> None:
    """A round that was open when the checkpoint was taken is not in it."""
    modes = ["ssgd", "asgd", "staleness", "local(steps=4)"]
    for found in shards.run(restored, modes, new_job()):
        assert [begun for begun, _, _ in found] == [RESUMED, RESUMED, RESUMED, 4]
        assert [rest for _, *rest in found] == [[NUM_STEPS, 16 * NUM_STEPS]] * len(modes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "resumed"),
    [*((mode, False) for mode in MODES), ("ssgd", True), ("asgd", True), ("local(steps=4)", True)],
)
def test_no_batch_is_drawn_twice_and_none_is_left_out(
    shards: Shards, mode: str, resumed: bool
) -> None:
    state = shards.run(save, mode, num_workers=1)[0] if resumed else None
    job, first_step = new_job(), RESUMED if resumed else 0
    bounds = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": "2", "PACELINE_RANK": "-1"}
    options: dict[str, Any] = {"num_workers": 1, "job": job, "env": bounds}
    with shards.workers(train, mode, state, **options) as (first,):
        first.hear()
        with shards.workers(train, mode, state, **options) as (second,):
            begun = second.hear()
            first.tell()
            results = [worker.result() for worker in (first, second)]
    assert begun == MODES[mode]
    for rank, step in ((0, first_step), (1, begun)):
        seeds, seen = results[rank]
        assert seeds == [(rank, number) for number in range(step, NUM_STEPS)]
        assert seen == 16 * NUM_STEPS
