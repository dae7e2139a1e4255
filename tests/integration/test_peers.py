"""Decentralised modes with real workers and shards: limits, bits, kills and newcomers."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import psworker
from pscore.pb.ps.v1.control_pb2 import MeetReply, MeetRequest, Peer
from psworker.connection.membership.session import Session
from psworker.peers import long_wait
from tests.attacks.fortress import EVERYTHING, OTHER, Fortress, fortress, secrets_of
from tests.inside import gossip_of, peers_of, table_of, wrapped_by
from tests.integration.cluster import Shards, Station, Worker, new_job, results_of, wait_until
from tests.integration.command import Command, eventually, lasting_ports
from tests.integration.models import backward, batch, make_model, relative_error, weights_of

STEPS = 50
SYNCHRONOUS = (
    "ssgd",
    "allreduce",
    "allreduce(order=ranks)",
    "allreduce(backend=gloo)",
    "dpsgd(graph=complete, order=atc)",
    "sgp(graph=complete)",
)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def train(me: Station, mode: str, job: str, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Returns the global weights after some steps."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), mode=mode, job=job
    )
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    psworker.shutdown()
    return weights_of(model)


def train_in(me: Station, modes: tuple[str, ...], job: str) -> list[dict[str, np.ndarray]]:
    return [train(me, mode, f"{job}-{index}") for index, mode in enumerate(modes)]


@pytest.mark.slow
def test_synchronous_modes_without_a_server_are_synchronous_sgd(shards: Shards) -> None:
    results = shards.run(train_in, SYNCHRONOUS, new_job(), num_workers=3)
    for ours, theirs in itertools.product(results, results):
        for index, mode in enumerate(SYNCHRONOUS):
            for name, weight in theirs[0].items():
                limit = 1e-5 if mode.startswith("sgp") else 1e-6  # A quotient of rounded sums.
                assert relative_error(ours[index][name], weight) <= limit, (mode, name)


@pytest.mark.slow
def test_one_worker_is_the_plain_optimizer_to_the_bit(shards: Shards) -> None:
    pairs = ("adpsgd", "adpsgd(exchange=atomic)")
    modes = ("allreduce", "dpsgd", "dpsgd(order=atc, graph=ring)", *pairs, "sgp", "sgp(late=1)")
    (results,) = shards.run(train_in, modes, new_job(), num_workers=1)
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
    for mode, found in zip(modes, results, strict=True):
        for name, weight in weights_of(model).items():
            assert np.array_equal(found[name], weight), (mode, name)


def train_atomically(me: Station, job: str) -> tuple[int, int, list[float]]:
    """Returns exchanges applied and refused, and the losses, of a worker with atomic exchanges."""
    model, losses = make_model(), []
    optimizer = psworker.DistributedOptimizer(
        *(sgd(model.parameters()), model.named_parameters()),
        mode="adpsgd(exchange=atomic)",
        job=job,
    )
    gossip = gossip_of(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(backward(model, *batch(0, 0)))
        optimizer.step()
    psworker.barrier("trained")
    found = gossip.stats.num_exchanges, gossip.counts["refused"], losses
    psworker.shutdown()
    return found


def test_atomic_exchanges_of_real_workers_block_and_end(shards: Shards) -> None:
    passive, active = shards.run(train_atomically, new_job(), num_workers=2)
    assert active[:2] == (STEPS, 0)  # Each step of the active one has waited for its answer.
    assert passive[:2] == (STEPS, 0)
    for _, _, losses in (passive, active):
        assert losses[-1] < 0.5 * losses[0]


def test_an_odd_number_of_workers_is_refused_for_atomic_exchanges(shards: Shards) -> None:
    with pytest.raises(AssertionError, match="an even number of workers, not 3"):
        shards.run(train_atomically, new_job(), num_workers=3)


NAMES = ("allreduce", "dpsgd", "adpsgd")
MODES = tuple(f"{name}(average_every=10)" for name in NAMES)
GLOO, SGP = "allreduce(backend=gloo, average_every=10)", "sgp(average_every=10)"
ALL = (*MODES[:2], GLOO, "adpsgd(average_every=10, warmup=5)", SGP)
LEASE_S = 4.0
DIES_AT, MORE = 10, 15


def train_until_told(me: Station, mode: str, dies: bool) -> dict[str, Any]:
    """Trains until the test says so; tells when it has trained with the others, or is to die."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), mode=mode
    )
    peers = peers_of(optimizer)
    losses, models, has_told = [], {}, False
    for step in itertools.count():
        if dies and step == DIES_AT:
            me.tell()
            me.hear()
        optimizer.zero_grad()
        losses.append(backward(model, *batch(0, 0)))
        optimizer.step()
        models[gossip_of(optimizer).number] = weights_of(model)
        time.sleep(0.01)  # For exchanges that no step waits for.
        if not has_told and step >= MORE and peers.report().num_exchanges:
            me.tell()
            has_told = True
        if me.is_told():
            break
    psworker.shutdown()
    return {"losses": losses, "models": models, "mean": weights_of(model)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
def test_others_continue_when_a_worker_is_killed_and_another_comes(mode: str) -> None:
    with Shards(1, lease_s=LEASE_S) as shards:
        options: dict[str, Any] = {"num_workers": 3, "job": new_job()}
        work = train_until_told
        with shards.workers(work, mode, False, ranks=[0, 2], **options) as workers:
            with shards.workers(work, mode, True, ranks=[1], **options) as killed:
                killed[0].hear()
                killed[0].kill()
            with shards.workers(work, mode, False, ranks=[1], **options) as others:
                for worker in (*workers, *others):
                    worker.hear()
                for worker in (*workers, *others):
                    worker.tell()
                first, last, new = (worker.result() for worker in (*workers, *others))
    for found in (first, last, new):
        assert np.isfinite(found["losses"]).all()
        assert found["losses"][-1] < 0.5 * first["losses"][0]
    for other in (last, new):  # The new worker trains on the others' progress.
        number = max(first["models"].keys() & other["models"].keys(), default=-1)
        if mode.startswith("allreduce"):
            for name, weight in first["models"][number].items():
                assert np.array_equal(weight, other["models"][number][name]), name
        for name, weight in first["mean"].items():
            if not mode.startswith("adpsgd"):  # Its workers end when they are told, each by itself.
                assert relative_error(other["mean"][name], weight) < 0.2, name


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, GLOO, SGP])
def test_a_worker_that_was_silent_for_longer_than_its_lease_comes_back(mode: str) -> None:
    with Shards(1, lease_s=LEASE_S) as shards:
        job = new_job()
        with shards.workers(until_told, mode, job=job) as workers:
            for worker in workers:
                worker.hear()
                worker.hear()
            os.kill(workers[1].pid, signal.SIGSTOP)
            shards.wait_until_lost(job, 1)
            workers[0].tell("steps")
            assert workers[0].hear() == "steps"  # It does not wait for the one that is silent.
            os.kill(workers[1].pid, signal.SIGCONT)
            workers[1].tell("exchanges")
            assert workers[1].hear() == "exchanges"
            for worker in workers:
                worker.tell()
            found = [worker.result() for worker in workers]
    for _, losses, weights in found:
        assert np.isfinite(losses).all()
        if not mode.startswith("adpsgd"):  # Its workers end when they are told, each by itself.
            for name in weights:
                assert relative_error(weights[name], found[0][2][name]) < 0.5


def wait_for_the_other(me: Station, mode: str) -> None:
    """Trains 3 steps; worker 1 makes the second one when it is told to."""
    long_wait.SAY_AFTER_S = 0.3
    model, optimizer = begin(mode)
    for step in range(3):
        if me.rank == step == 1:
            me.hear()
        go(me, model, optimizer, range(step, step + 1))
    psworker.shutdown()


@pytest.mark.slow
def begin_and_load(me: Station, mode: str) -> list[int]:
    """Loads a state before its first step, and again; returns the steps at which it begins.

    Rank 1 looks again, once it has stopped, only when it is told to. Rank 2 stops when it is told
    to. Rank 0 tells when it changes the job.
    """
    meet = Session.meet
    asked, peers, steps = list[int](), list[Peer](), list[int]()

    def ask(session: Session, request: MeetRequest) -> MeetReply:
        is_again = request.epoch in asked
        asked.append(request.epoch)
        if not steps and ((me.rank == 2 and len(asked) == 2) or (me.rank == 1 and is_again)):
            me.tell(len(peers))
            me.hear()
        reply = meet(session, request)
        peers[:] = reply.peers
        if me.rank == 0 and request.peer.parts:
            me.tell()
        return reply

    model = make_model()
    with mock.patch.object(Session, "meet", ask):
        optimizer = psworker.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), mode=mode
        )
        for _ in range(3):
            steps.append(table_of(optimizer).replica.step)
            optimizer.load_state_dict(optimizer.state_dict())
    psworker.shutdown()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dpsgd(average_every=1)", "sgp(average_every=1)", "allreduce"])
def test_all_begin_at_one_step_though_one_changes_the_job_at_once(
    shards: Shards, mode: str
) -> None:
    """A worker that had not read of the first meeting came late, and they waited for each other."""
    with shards.workers(begin_and_load, mode, num_workers=3) as (first, late, last):
        last.hear()  # It is there, and has to stop.
        while late.hear() < 3:
            late.tell()
        last.tell()
        first.hear()
        late.tell()
        assert results_of([first, late, last]) == 3 * [[0, 0, 0]]


def test_a_worker_names_the_one_for_which_it_waits(shards: Shards) -> None:
    said = re.compile(r"worker 0 has waited \d+ s for step [12] of worker 1")

    def has_said(worker: Worker) -> bool:
        return said.search(worker.written()) is not None

    for mode in ("dpsgd", "allreduce", "sgp"):
        with shards.workers(wait_for_the_other, mode) as workers:
            wait_until(partial(has_said, workers[0]))
            workers[1].tell()
            for worker in workers:
                worker.result()


EVERY = 5


def begin(mode: str, seed: int = 0) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = make_model()
    if seed:
        for weight in model.parameters():
            torch.nn.init.normal_(weight)
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), mode=mode
    )
    return model, optimizer


def go(me: Station, model: torch.nn.Module, optimizer: Any, span: range) -> list[float]:
    losses = []
    for step in span:
        optimizer.zero_grad()
        losses.append(backward(model, *batch(psworker.rank(), step)))
        optimizer.step()
    return losses


def copy_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in weights_of(model).items()}


CHAIN = ("dpsgd(order=atc, graph=complete)", "adpsgd", "allreduce", "sgp")


def change_modes(me: Station) -> dict[str, Any]:
    """Trains under one mode after the other; loads its own state once."""
    model, optimizer = begin("allreduce")
    step, starts, losses = 0, [], []
    for mode in CHAIN:
        losses += go(me, model, optimizer, range(step, step + 4))
        step += 4
        optimizer.set_mode(mode)
        starts.append(copy_of(model))
    losses += go(me, model, optimizer, range(step, step + 2))
    optimizer.load_state_dict(optimizer.state_dict())
    starts.append(copy_of(model))
    losses += go(me, model, optimizer, range(step + 2, step + 4))
    step = gossip_of(optimizer).number
    psworker.shutdown()
    return {"starts": starts, "losses": losses, "step": step, "end": copy_of(model)}


def reference(num_workers: int, steps: int) -> dict[str, np.ndarray]:
    """Returns the weights of synchronous SGD."""
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(num_workers):
            backward(model, *batch(rank, step))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_workers
        optimizer.step()
    return weights_of(model)


@pytest.mark.slow
def test_modes_change_into_each_other_through_one_average(shards: Shards) -> None:
    found = shards.run(change_modes, num_workers=3)
    for one in found:
        assert np.isfinite(one["losses"]).all()
        assert one["step"] == 4 * (len(CHAIN) + 1)
        for ours, theirs in zip(one["starts"], found[0]["starts"], strict=True):
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    expected = reference(3, 8)  # All-reduce, then its equal: momenta stay.
    for name, weight in expected.items():
        assert relative_error(found[0]["starts"][1][name], weight) <= 1e-6, name


def change_kinds(me: Station, modes: tuple[str, ...]) -> list[dict[str, np.ndarray]]:
    """Trains 4 steps under each mode; returns the weights with which each begins, and the end."""
    model, optimizer = begin(modes[0])
    starts = []
    for index, mode in enumerate(modes):
        if index:
            optimizer.set_mode(mode)
        starts.append(copy_of(model))
        go(me, model, optimizer, range(4 * index, 4 * index + 4))
    psworker.shutdown()
    return [*starts, copy_of(model)]


@pytest.mark.slow
def test_a_job_changes_to_modes_without_a_server_and_back(shards: Shards) -> None:
    modes = ("ssgd", "allreduce", "ssgd", "adpsgd", "ssgd")
    found = shards.run(change_kinds, modes, num_workers=2)
    for ours, theirs in itertools.product(found, found):
        for one, other in zip(ours, theirs, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)
    for steps in (1, 2, 3):  # Momenta move from the shards to the workers and back.
        for name, weight in reference(2, 4 * steps).items():
            assert relative_error(found[0][steps][name], weight) <= 1e-5, (steps, name)
    assert all(np.isfinite(weight).all() for weight in found[0][-1].values())


def refuse(me: Station, job: str) -> list[dict[str, np.ndarray]]:
    """Trains with compressed pushes, and asks for modes in which whole models travel."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        *(sgd(model.parameters()), model.named_parameters()), compression="2bit", job=job
    )
    starts = []
    for step, mode in enumerate(("allreduce", "adpsgd", "allreduce(backend=nccl)")):
        go(me, model, optimizer, range(step, step + 1))
        starts.append(copy_of(model))
        with pytest.raises(psworker.PacelineError, match="workers exchange whole models: compr"):
            optimizer.set_mode(mode)
    go(me, model, optimizer, range(3, 4))
    psworker.shutdown()
    model, optimizer = begin("allreduce")
    go(me, model, optimizer, range(1))
    with pytest.raises(psworker.PacelineError, match="adds on GPUs, and this worker's model is on"):
        optimizer.set_mode("allreduce(backend=nccl)")
    go(me, model, optimizer, range(1, 2))
    psworker.shutdown()
    return [*starts, copy_of(model)]


def test_a_mode_that_does_not_fit_is_refused_before_anything_changes(shards: Shards) -> None:
    first, second = shards.run(refuse, new_job(), num_workers=2)
    for ours, theirs in zip(first, second, strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert all(not np.array_equal(first[0][name], first[2][name]) for name in first[0])


def adopt(me: Station, momenta: str) -> list[dict[str, np.ndarray]]:
    """Trains with a global average in every fourth step; returns the models after those."""
    model, optimizer = begin(f"dpsgd(graph=ring, global_every=4, momenta={momenta})")
    seen = []
    for step in range(9 + me.rank):
        go(me, model, optimizer, range(step, step + 1))
        has_state = bool(wrapped_by(optimizer).state)
        assert has_state is (momenta == "keep" or step % 4 != 3), step
        if step % 4 == 3:
            seen.append(copy_of(model))
    psworker.shutdown()
    return seen


@pytest.mark.parametrize("momenta", ["keep", "drop"])
def test_all_continue_from_the_global_average(shards: Shards, momenta: str) -> None:
    found = shards.run(adopt, momenta, num_workers=3)
    for seen in found:
        for ours, theirs in zip(seen[:2], found[0][:2], strict=True):
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def end_unevenly(me: Station, modes: tuple[str, ...]) -> list[list[float]]:
    losses = []
    for mode in modes:
        model, optimizer = begin(mode)
        losses.append(go(me, model, optimizer, range(12 + 7 * me.rank)))
        psworker.shutdown()
    return losses


@pytest.fixture(scope="module")
def rarely() -> Iterator[Shards]:
    """Shards whose workers send a heartbeat every 1,000 s, unless they need one earlier."""
    with Shards(2, lease_s=3000) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_workers_may_end_at_different_steps(rarely: Shards, mode: str) -> None:
    for losses in rarely.run(end_unevenly, (mode,), num_workers=3):
        assert np.isfinite(losses).all()


def offer_to_one_that_ended(me: Station) -> int:
    """Trains 2 steps, rank 0 again 2 when the other has ended; returns its offers refused then."""
    model, optimizer = begin("adpsgd(max_behind=1)")
    go(me, model, optimizer, range(2))
    gossip, before = gossip_of(optimizer), 0
    if me.rank == 0:
        me.hear()
        before = int(gossip.counts["refused"])  # One that came while the other made its steps.
        go(me, model, optimizer, range(2, 4))
    psworker.shutdown()
    return int(gossip.counts["refused"]) - before


def test_an_offer_to_a_worker_that_has_ended_is_given_up_at_once(rarely: Shards) -> None:
    with rarely.workers(offer_to_one_that_ended) as workers:
        workers[1].result()
        workers[0].tell()
        assert workers[0].result() == 1


def end_with_last_models(me: Station, mode: str) -> dict[str, Any]:
    """Trains 7 steps; returns the last model as one vector, and the weights after the end."""
    model, optimizer = begin(mode)
    go(me, model, optimizer, range(7 if me.rank else 6 + mode.startswith("adpsgd")))
    table = table_of(optimizer)
    gossip, flat, layout = gossip_of(optimizer), table.flat.weights, table.layout
    last = flat.numpy().copy()
    psworker.shutdown()
    if mode.startswith("adpsgd"):  # Others may have offered theirs meanwhile.
        last = gossip.shared.copy()
    names = [
        (t.name, start, t.numel) for t, start in zip(layout.tensors, layout.offsets, strict=True)
    ]
    return {"last": last, "names": names, "end": copy_of(model)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", NAMES)
def test_shards_keep_the_average_of_the_last_models(
    shards: Shards, tmp_path: Path, mode: str
) -> None:
    job, file = new_job(), tmp_path / "model.safetensors"
    given = f"{mode}(average_every={EVERY})"
    with shards.workers(
        end_with_last_models,
        given,
        num_workers=3,
        job=job,
        env={"PACELINE_TIMELINE": str(tmp_path / "trace.json")},
    ) as workers:
        found = [worker.result() for worker in workers]
    spans = "".join(path.read_text() for path in tmp_path.glob("trace*"))
    assert f'"{"offer" if mode == "adpsgd" else "give"}"' in spans
    for name in ("exchange", "partner", "age_s", "staleness", "distance"):
        assert f'"{name}"' in spans
    Command(tmp_path).run("export", file, "--job", job, "--servers", shards.servers)
    mean = np.mean([one["last"].astype(np.float64) for one in found], axis=0)
    exported = {name: tensor.numpy() for name, tensor in load_file(file).items()}
    for name, start, numel in found[0]["names"]:
        expected = mean[start : start + numel]
        assert relative_error(exported[name].ravel(), expected) < 1e-6, name
        if mode != "adpsgd":  # Modes whose workers do not wait for each other at their end.
            assert all(np.array_equal(one["end"][name], exported[name]) for one in found)


def save_half(me: Station, mode: str) -> Any:
    """Returns the average half way, the saved state, and the weights in the end."""
    model, optimizer = begin(mode)
    go(me, model, optimizer, range(EVERY * 2))
    with optimizer.global_weights():
        psworker.barrier("all models are with the shards")
    with optimizer.global_weights():
        half = copy_of(model)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        file = io.BytesIO()
        torch.save(state, file)
    me.tell()
    me.hear()
    go(me, model, optimizer, range(EVERY * 2, EVERY * 4))
    psworker.shutdown()
    return half, file.getvalue(), copy_of(model)


def resume(me: Station, mode: str, states: list[bytes]) -> Any:
    """Continues in a new job, as the refusal of load_state_dict says."""
    state = torch.load(io.BytesIO(states[me.rank]), weights_only=True)
    model = make_model()
    model.load_state_dict(state["model"])
    inner = sgd(model.parameters())
    inner.load_state_dict({name: state["optimizer"][name] for name in ("state", "param_groups")})
    optimizer = psworker.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), mode=mode
    )
    first = copy_of(model)
    go(me, model, optimizer, range(EVERY * 2, EVERY * 4))
    psworker.shutdown()
    return first, copy_of(model)


def restored(me: Station, mode: str) -> Any:
    """Continues in a job that was restored, with a model that had begun elsewhere."""
    model, optimizer = begin(mode, 1)
    first = copy_of(model)
    go(me, model, optimizer, range(EVERY * 2, EVERY * 4))
    psworker.shutdown()
    return first, copy_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*NAMES, "sgp"])
def test_a_job_goes_on_from_a_checkpoint_and_from_saved_state(
    shards: Shards, tmp_path: Path, mode: str
) -> None:
    full = f"{mode}(average_every={EVERY})"
    command, job, folder = Command(tmp_path), new_job(), tmp_path / "checkpoints"
    file = tmp_path / "model.safetensors"
    with shards.workers(save_half, full, job=job, num_workers=2) as workers:
        for worker in workers:
            worker.hear()
        command.run("checkpoint", folder, "--job", job, "--servers", shards.servers)
        for worker in workers:
            worker.tell()
        ended = [worker.result() for worker in workers]
    half = ended[0][0]
    states = [state for _, state, _ in ended]
    command.run("export", file, "--from", folder, "--job", job)
    exported = {name: tensor.numpy() for name, tensor in load_file(file).items()}
    again = shards.run(resume, full, states, num_workers=2)
    with Shards(2) as others:
        command.run("restore", folder, "--job", job, "--servers", others.servers)
        back = others.run(restored, full, num_workers=2, job=job)
    for found in (exported, *(first for first, _ in (*again, *back))):
        assert all(np.array_equal(found[name], half[name]) for name in half)
    for _, last in (*again, *back):
        assert all(np.isfinite(weight).all() for weight in last.values())
    if mode == "allreduce":  # Its saved state holds all there is; a checkpoint has no momentum.
        assert all(np.array_equal(again[0][1][name], ended[0][2][name]) for name in half)


def until_told(me: Station, mode: str) -> Any:
    """Trains until told without a word, then ends with the mean of all models.

    It tells its rank, and when it has made 15 steps and exchanged in one; then, after the word
    "steps" or "exchanges", when it has made so many of them more.
    """
    model, optimizer = begin(mode)
    losses: list[float] = []
    wanted = {"begun": (15, 1)}  # Words to tell, with the steps and exchanges before each.
    me.tell(psworker.rank())
    while True:
        gossip = gossip_of(optimizer)
        losses += go(me, model, optimizer, range(len(losses), len(losses) + 1))
        time.sleep(0.01)  # For exchanges that no step waits for.
        if gossip_of(optimizer) is not gossip:  # It has joined anew, and counts exchanges from 0.
            wanted = {word: (steps, min(more, MORE)) for word, (steps, more) in wanted.items()}
        made = len(losses), gossip_of(optimizer).stats.num_exchanges
        for word, (steps, exchanges) in list(wanted.items()):
            if made[0] >= steps and made[1] >= exchanges:
                me.tell(word)
                del wanted[word]
        if me.is_told():
            if (word := me.hear()) is None:
                break
            wanted[word] = (made[0] + MORE, 0) if word == "steps" else (0, made[1] + MORE)
    rank = psworker.rank()
    psworker.shutdown()
    return rank, losses, copy_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, "dpsgd(global_every=5)", SGP])
def test_a_worker_joins_an_elastic_job(shards: Shards, mode: str) -> None:
    env = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": "3", "PACELINE_RANK": "-1"}
    job = new_job()
    with shards.workers(until_told, mode, num_workers=2, job=job, env=env) as first:
        for one in first:
            one.hear()
            one.hear()
        with shards.workers(until_told, mode, num_workers=1, job=job, env=env) as more:
            more[0].hear()
            more[0].hear()
            for one in (*first, *more):
                one.tell()
            found = [one.result() for one in (*first, *more)]
    assert sorted(one[0] for one in found) == [0, 1, 2]
    for _, losses, weights in found:
        assert np.isfinite(losses).all()
        if not mode.startswith("adpsgd"):  # Its workers end when they are told, each by itself.
            for name in weights:
                assert relative_error(weights[name], found[0][2][name]) < 0.5


def comes_to_a_barrier(me: Station, place: str) -> None:
    """Reports that it is about to wait at a barrier, and waits there when told."""
    method = "agree_at" if place == "begin" else "meet_or_pass"
    wait = getattr(Session, method)

    def told(*given: Any, **options: Any) -> Any:
        me.tell()
        me.hear()
        return wait(*given, **options)

    with mock.patch.object(Session, method, told):
        begin("adpsgd")
        psworker.barrier()
    psworker.shutdown()


def comes_in_two_parts(me: Station) -> None:
    """Joins the job, and begins to train when told."""
    psworker.init()
    me.tell()
    me.hear()
    begin("adpsgd")
    psworker.barrier()
    psworker.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["begin", "barrier"])
def test_a_worker_that_waits_at_a_barrier_meets_one_that_comes(shards: Shards, place: str) -> None:
    env = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": "2", "PACELINE_RANK": "-1"}
    how: dict[str, Any] = {"num_workers": 1, "job": new_job(), "env": env}
    with shards.workers(comes_to_a_barrier, place, **how) as (first,):
        first.hear()
        with shards.workers(comes_in_two_parts, **how) as (second,):
            second.hear()
            first.tell()
            second.tell()
            for worker in (first, second):
                worker.result()


def tell_steps(me: Station, mode: str) -> int:
    """Trains until told, and tells each step."""
    long_wait.SAY_AFTER_S = 0.3
    model, optimizer = begin(mode)
    for step in itertools.count():
        go(me, model, optimizer, range(step, step + 1))
        time.sleep(0.01)
        if me.is_told():
            break
        me.tell(step)
    psworker.shutdown()
    return step


def stops(worker: Worker) -> bool:
    """Hears what a worker has told; returns whether it says that it waits for another one."""
    while wait([worker.fileno()], 0.0):
        worker.hear()
    return "for 1 more worker (1 of at least 2) to know who takes part" in worker.written()


@pytest.mark.slow
def test_a_worker_of_adpsgd_stops_while_its_elastic_job_has_fewer_workers_than_its_least() -> None:
    env = {"PACELINE_MIN_WORKERS": "2", "PACELINE_MAX_WORKERS": "3", "PACELINE_RANK": "-1"}
    how: dict[str, Any] = {"num_workers": 1, "job": new_job(), "env": env}
    with Shards(1, lease_s=LEASE_S) as shards, ExitStack() as stack:
        one, other = (
            stack.enter_context(shards.workers(tell_steps, "adpsgd", **how))[0] for _ in range(2)
        )
        one.hear()
        other.kill()
        wait_until(partial(stops, one))
        new = stack.enter_context(shards.workers(tell_steps, "adpsgd", **how))[0]
        for worker in (new, one):
            worker.hear()
            worker.tell()
        assert min(one.result(), new.result()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_training_continues_when_shard_0_is_killed(tmp_path: Path, mode: str) -> None:
    command = Command(tmp_path)
    with command.detached("--shards", 2, *lasting_ports()) as run:
        job = new_job()
        where = {"PACELINE_SERVERS": ",".join(run["addresses"])}
        workers = []
        try:
            for rank in range(2):
                env = where | {"RANK": str(rank), "WORLD_SIZE": "2", "PACELINE_JOB": job}
                workers.append(Worker(until_told, rank, (mode,), env))
            for one in workers:
                one.hear()
                one.hear()
            pid = run["shards"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: command.run_file()["shards"][0]["pid"] != pid)
            for one in workers:  # An average finds the job gone, and the worker joins again.
                one.tell("steps")
            for one in workers:
                assert one.hear() == "steps"
            for one in workers:
                one.tell()
            found = [one.result() for one in workers]
        finally:
            for one in workers:
                one.close()
    for _, losses, _ in found:
        assert np.isfinite(losses).all()


def test_torch_distributed_is_refused_where_it_cannot_add(
    shards: Shards, strong: Fortress, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="adds on GPUs, and this worker's model is on cpu"):
        shards.run(train, "allreduce(backend=nccl)", new_job(), num_workers=1)
    env = strong.environment(secrets_of(tmp_path, f"* {EVERYTHING}\n"))
    job = new_job()
    env |= {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_JOB": job}
    worker = Worker(train, 0, ("allreduce(backend=gloo)", job, 1), env)
    try:
        with pytest.raises(AssertionError, match="without encryption, and this job uses TLS"):
            worker.result()
    finally:
        worker.close()


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    with fortress(tmp_path_factory.mktemp("fortress")) as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
def test_workers_with_tls_and_unlike_tokens_exchange_models(
    strong: Fortress, tmp_path: Path, mode: str
) -> None:
    workers, job = [], "other"
    try:
        for rank, token in enumerate((f"* {EVERYTHING}", f"{job} {OTHER}")):
            folder = tmp_path / str(rank)
            folder.mkdir()
            env = strong.environment(secrets_of(folder, f"{token}\n")) | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "PACELINE_JOB": job,
            }
            workers.append(Worker(until_told, rank, (mode,), env))
        for one in workers:
            one.hear()
            assert one.hear() == "begun"  # It has exchanged.
        for one in workers:
            one.tell()
        (_, _, first), (_, _, last) = results_of(workers)
    finally:
        for one in workers:
            one.close()
    if not mode.startswith("adpsgd"):  # Its workers do not wait at their end.
        for name in first:
            assert np.array_equal(first[name], last[name]), name
