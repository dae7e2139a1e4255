"""Rule 13: looks at the weights change nothing and show the shards' own, in every mode."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscore.compressors import COMPRESSORS
from pscore.net.credentials import ANYONE
from pscore.rules import RULES
from psserver.remote import ask, checkpoint, status
from tests.inside import forget_worker, table_of
from tests.integration.cluster import Shards, Station, new_job, wait_until
from tests.integration.models import backward, batch, make_model, same, sgd, weights_of

pytestmark = pytest.mark.timeout(400)
Weights = dict[str, np.ndarray]

# Modes by name, and then the one that each is changed to in the middle of training; another one
# has the first and the last of its examples.
ARGUMENTS = {
    "ssgd": ("ssgd", "ssd(steps=2, warmup=0)"),
    "asgd": ("asgd", "dcasgd"),
    "staleness": ("staleness", "dcasgd"),
    "dcasgd": ("dcasgd(variance_control=2.0)", "dcasgd(adaptive=True)"),
    "ssp": ("ssp(bound=2)", "ssp(bound=0)"),
    "od": ("od(warmup=2)", "od(warmup=2, local=mirror)"),
    "ssd": ("ssd(steps=3, warmup=2)", "ssd(steps=2, warmup=2, local=glu)"),
    "cd": ("cd(steps=2, warmup=2)", "cd(steps=3, warmup=2, correction=flush)"),
    "local": ("local(steps=3, warmup=2, overlap=blend)", "local(steps=2)"),
    "slowmo": ("slowmo(steps=3, warmup=2, overlap=eager)", "slowmo(steps=2)"),
    "diloco": ("diloco(steps=3, warmup=2)", "diloco(steps=2, warmup=1, overlap=mirror)"),
    "delayed_nesterov": ("delayed_nesterov(steps=3)", "delayed_nesterov(steps=2, every=2)"),
}
MODES = {
    name: ARGUMENTS.get(name, (name + rule.examples[0], name + rule.examples[-1]))
    for name, rule in RULES.own.items()
    if not rule.gossip  # Never compressed.
}
RAW = ("none", "none")
# Compressors of gradients and of pulled weights, by mode; those of another mode are these.
PAIRS = {
    "ssgd": ("fp16", "2bit"),
    "asgd": ("bf16", "1bit"),
    "staleness": ("int8", "topk"),
    "dcasgd": ("2bit", "int8"),
    "ssp": ("1bit", "2bit"),
    "od": ("qsgd", "1bit"),
    "ssd": ("terngrad", "topk"),
    "cd": ("topk", "int8"),
    "local": ("randomk", "2bit"),
    "slowmo": ("dgc", "1bit"),
    "diloco": ("natural", "topk"),
    "delayed_nesterov": ("sparseloco", "int8"),
}
OTHER = ("2bit", "2bit")
LEFT = COMPRESSORS.own.keys() - {"none"} - {first for first, _ in PAIRS.values()}
# Uncompressed pulls are tested for every mode in tests/unit/psworker/test_peek.py.
CASES = [
    *((name, PAIRS.get(name, OTHER)) for name in MODES),
    *(("ssgd", (name, "2bit")) for name in sorted(LEFT)),
    ("dcasgd", RAW),
]
CHANGE, LOST, STEPS = 5, 8, 12  # The loss is noticed in that step or in the next.
CAPTURED = (0, 4, CHANGE + 1, STEPS - 1)


def at_shards(job: str, optimizer: psworker.DistributedOptimizer) -> Weights:
    """Returns the weights of a job as `psserver export` writes them, once its pushes count."""
    settle(optimizer)
    addresses = os.environ["PACELINE_SERVERS"].split(",")
    found = checkpoint.capture(addresses, ANYONE, job, weights_only=True)
    return dict(found.tables[0].arrays["weights"])


def look(model: Any, optimizer: psworker.DistributedOptimizer, captured: Weights | None) -> None:
    """Looks in every way that there is, and compares what is seen."""
    before = weights_of(model)
    with optimizer.global_weights():
        shown = weights_of(model)
    assert same(weights_of(model), before)
    optimizer.state_dict()
    assert same(weights_of(model), before)
    if captured is not None:
        assert same(captured, shown)


def settle(optimizer: psworker.DistributedOptimizer) -> None:
    """Waits until nothing is on its way: the next events do not depend on workers' speeds."""
    exchange = table_of(optimizer).exchange
    slices = range(len(exchange.layout.slices))
    wait_until(lambda: not exchange.is_busy() and all(map(exchange.has_landed, slices)))


def lose(optimizer: psworker.DistributedOptimizer) -> None:
    """Makes the shards declare this worker lost: it comes back with one of its next steps."""
    settle(optimizer)
    forget_worker(optimizer)


def wrap(model: torch.nn.Module, mode: str, pair: tuple[str, str]) -> Any:
    return psworker.DistributedOptimizer(
        sgd(model.parameters()),
        model.named_parameters(),
        mode=mode,
        compression=pair[0],
        pull_compression=pair[1],
        compress_min_nbytes=1024,
        overlap=True,
    )


def train(job: str, name: str, pair: tuple[str, str], looks: bool) -> list[Weights]:
    """Returns the weights after each step, and the last ones."""
    psworker.init(job=job)
    model = make_model()
    optimizer = wrap(model, MODES[name][0], pair)
    path = []
    for step in range(STEPS):
        if looks and step != LOST + 1:
            look(model, optimizer, at_shards(job, optimizer) if step in CAPTURED else None)
        if step == CHANGE:
            optimizer.set_mode(MODES[name][1])
            if looks:
                look(model, optimizer, at_shards(job, optimizer))
        if step == LOST:
            lose(optimizer)
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
        if step == LOST:
            settle(optimizer)
        path.append(weights_of(model))
    psworker.shutdown()
    return [*path, weights_of(model)]


def train_all(me: Station) -> None:
    """Trains in each case twice, without a look and with many, and tells both paths."""
    for name, pair in CASES:
        job = new_job()  # Compressors draw their numbers by its name.
        me.tell([train(job, name, pair, looks) for looks in (False, True)])


@pytest.fixture(scope="module")
def patient() -> Iterator[Shards]:
    """A worker that compiles kernels on a slow machine sends no heartbeat: no lease may be over."""
    with Shards(2, lease_s=3000) as started:
        yield started


@pytest.fixture(scope="module")
def paths(patient: Shards) -> Iterator[dict[Any, list[list[Weights]]]]:
    """Of each case: one process makes them all, since each would have to compile kernels."""
    with patient.workers(train_all, num_workers=1) as (worker,):
        yield {case: worker.hear() for case in CASES}


@pytest.mark.parametrize(("name", "pair"), CASES, ids=str)
def test_looks_change_nothing_and_show_the_weights_of_the_shards(
    paths: dict[Any, list[list[Weights]]], name: str, pair: tuple[str, str]
) -> None:
    without, with_looks = paths[name, pair]
    for step, (one, other) in enumerate(zip(without, with_looks, strict=True)):
        assert same(one, other), step


def end_inside(me: Station, mode: str, job: str, inside: bool) -> Weights:
    """Trains, and ends inside of `global_weights` or after it; returns the model afterwards."""
    psworker.init(job=job)
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode
    )
    for step in range(4):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    with optimizer.global_weights():
        if inside:
            psworker.shutdown()
    psworker.shutdown()
    return weights_of(model)


@pytest.mark.parametrize("mode", ["ssd(steps=5, warmup=1)", "diloco(steps=3)"])
def test_the_end_of_training_while_looking_is_as_it_is_after_that(
    shards: Shards, mode: str
) -> None:
    after, inside = (shards.run(end_inside, mode, new_job(), flag) for flag in (False, True))
    for one, other in zip(after, inside, strict=True):
        assert same(one, other)


def look_when_lost(me: Station, job: str) -> None:
    """A worker that was lost looks, and continues."""
    for number, (mode, has_state) in enumerate(
        (mode, has_state) for mode in ("asgd", "ssd(steps=2, warmup=0)") for has_state in (0, 1)
    ):
        psworker.init(job=f"{job}-{number}")
        model = make_model()
        optimizer = wrap(model, mode, RAW)
        for step in range(8):
            if step == 4:
                lose(optimizer)
                with contextlib.nullcontext() if has_state else optimizer.global_weights():
                    optimizer.state_dict()
            assert optimizer.steps == step
            optimizer.zero_grad()
            backward(model, *batch(0, step))
            optimizer.step()
        with optimizer.global_weights():
            assert same(weights_of(model), at_shards(f"{job}-{number}", optimizer))
        psworker.shutdown()


def test_a_worker_that_was_lost_comes_back_to_look(shards: Shards) -> None:
    shards.run(look_when_lost, new_job(), num_workers=1)


# With one worker each of them makes the steps of plain SGD, and so does what it is changed to.
PLAIN = {
    "ssgd": "ssp(bound=0)",
    "ssp(bound=0)": "ssd(steps=3, warmup=50)",
    "ssd(steps=3, warmup=50)": "od(warmup=50)",
    "cd(warmup=50)": "ssgd",
    "asgd": "dcasgd",
    "dcasgd(adaptive=True)": "staleness",
    "staleness": "asgd",
}


def draw_by_steps(mode: str, job: str, disturbed: bool) -> Weights:
    """Trains on a batch of each step; returns the weights in the end."""
    psworker.init(job=job)
    model = make_model()
    optimizer = wrap(model, mode, RAW)
    is_lost = False
    while (step := optimizer.steps) < STEPS:
        if disturbed and step == CHANGE:
            look(model, optimizer, at_shards(job, optimizer))
            optimizer.set_mode(PLAIN[mode])
        if disturbed and step == LOST and not is_lost:
            is_lost = True
            lose(optimizer)
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
    psworker.shutdown()
    return weights_of(model)


def disturb(me: Station) -> None:
    for mode in PLAIN:
        me.tell([draw_by_steps(mode, new_job(), disturbed) for disturbed in (False, True)])


@pytest.mark.slow
def test_a_change_of_the_mode_and_a_return_leave_the_bits(patient: Shards) -> None:
    """The step that was lost is drawn again: its number comes twice."""
    with patient.workers(disturb, num_workers=1) as (worker,):
        found = {mode: worker.hear() for mode in PLAIN}
    for mode, (undisturbed, disturbed) in found.items():
        assert same(undisturbed, found["ssgd"][0]), mode
        assert same(disturbed, undisturbed), mode


def take_turns(me: Station, mode: str, looks: bool, job: str) -> tuple[list[Weights], int]:
    """Makes each step when the test says so; returns the weights, residuals, and late pushes."""
    psworker.init(job=job)
    model = make_model()
    optimizer = wrap(model, mode, ("2bit", "2bit"))
    psworker.barrier()  # Both are there, so that both begin with step 0.
    path = []
    for step in range(6):
        me.hear()
        if looks:
            look(model, optimizer, at_shards(job, optimizer))
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
        path.append(weights_of(model))
        settle(optimizer)
        me.tell()
    table_of(optimizer).exchange.flush()
    path.append(table_of(optimizer).exchange.compressor_state())
    num_late = optimizer.traffic.num_too_late
    me.hear()
    psworker.shutdown()
    return path, num_late


def late_ones(me: Station, modes: list[str], job: str) -> list[Any]:
    return [
        [take_turns(me, mode, looks, f"{job}-{number}") for looks in (False, True)]
        for number, mode in enumerate(modes)
    ]


@pytest.mark.slow
def test_a_look_by_a_worker_whose_push_was_too_late_changes_nothing(shards: Shards) -> None:
    """Worker 1 is behind in each step: its pushes return to its residual and stay there."""
    modes = ["ssgd(backup=1)", "local(steps=2, backup=1)"]
    with shards.workers(late_ones, modes, new_job()) as workers:
        for _ in range(2 * len(modes)):
            for _ in range(6):
                for worker in workers:
                    worker.tell()
                    worker.hear()
            for worker in workers:
                worker.tell()
        (_, late) = (worker.result() for worker in workers)
    for (without, num_late), (with_looks, again) in late:
        assert num_late == again > 0
        assert any(residual.any() for residual in without[-1].values())
        assert all(same(*pair) for pair in zip(without, with_looks, strict=True))


def report(me: Station) -> None:
    """Reports values of a training, and stays until the test has seen them."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    optimizer.report(loss=torch.tensor(0.5 + me.rank), tokens=4096, accuracy=float("nan"))
    me.hear()


@pytest.mark.slow
def test_reported_values_travel_with_the_heartbeats(shards: Shards) -> None:
    job = new_job()

    def shown() -> list[dict[str, float]]:
        picture = status.combine(shards.addresses, ask.statuses(shards.addresses, ANYONE))
        found = [one for one in picture["jobs"] if one["name"] == job]
        return [worker["reported"] for one in found for worker in one["workers"]]

    with shards.workers(report, job=job) as workers:
        wait_until(lambda: [*map(bool, shown())] == [True, True])
        for rank, values in enumerate(shown()):
            assert values["loss"] == 0.5 + rank
            assert values["tokens"] == 4096.0
            assert values["pulled_bytes_per_token"] > 0  # The weights at the start.
            assert values["ddp_bytes_per_token"] == 0  # There was no step yet.
        for worker in workers:
            worker.tell()
