"""Rule 7: messages for users name the thing that is wrong."""

import contextlib
import copy
import functools
import pickle
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch

import psworker
from pscore.errors import ProtocolVersionError, ShardMapError
from pscore.net import wire
from psworker.connection.exchange.exchange import Exchange
from psworker.job import context
from psworker.training.progress import TrainingProgress
from tests.inside import table_of
from tests.integration.cluster import DEADLINE_S, Shards, Station, Worker, new_job
from tests.integration.models import backward, batch, make_model, same, sgd, weights_of


def wrap(model: torch.nn.Module, **options: Any) -> psworker.DistributedOptimizer:
    return psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), **options
    )


# ----- refused before anything is started


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sgd2"}, r"no mode 'sgd2'; there are .*\basgd\b.*\bssd\b.*\bssgd\b"),
        (
            {"mode": "ssd(stesp=3)"},
            r"mode 'ssd' has no argument 'stesp'; it has steps, warmup, local",
        ),
        ({"mode": "ssd(steps=many)"}, r"ssd.steps is 'many', must be of type int"),
        ({"mode": "ssd(steps=0)"}, r"ssd.steps is 0, must be in 1..1024"),
        ({"mode": "ssd(local=glue)"}, r"ssd.local is 'glue', must be one of .*glu, mirror, .*sgd"),
        ({"mode": "ssd steps=3"}, r"mode is 'ssd steps=3', must look like name"),
        ({"compression": "zip"}, r"no compression 'zip'; there are .*fp16.*none"),
        ({"servers": "localhost"}, r"server address 'localhost' must look like host:port"),
        ({"servers": "a:1,a:1"}, r"a server address is given twice in a:1, a:1"),
        ({"timeout_s": -1.0}, r"timeout_s \(PACELINE_TIMEOUT_S\) is -1.0, must be in 0..86400"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_right_ones(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(psworker.ConfigError, match=message):
        wrap(torch.nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            torch.optim.Adadelta,
            r"optimizer is torch.optim.adadelta.Adadelta, must be one of .*torch.optim.Adam, .*SGD",
        ),
        (
            lambda weights: torch.optim.Adam(weights, differentiable=True),
            r"Adam has differentiable=True, which the shards do not implement",
        ),
        (
            lambda weights: torch.optim.SGD([{"params": weights, "differentiable": True}], lr=1.0),
            r"SGD has differentiable=True, which the shards do not implement",
        ),
    ],
)
def test_an_unsupported_optimizer_is_refused_by_name(
    make: Callable[[Any], torch.optim.Optimizer], message: str
) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(psworker.UnsupportedOptimizerError, match=message):
        psworker.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), optimizer_on="shards"
        )


def test_named_parameters_must_be_those_of_the_optimizer() -> None:
    model = make_model()
    named = [item for item in model.named_parameters() if item[0] != "2.weight"]
    message = r"parameter 2 of group 0 \[64, 128\] is in the optimizer but not in named_parameters"
    with pytest.raises(psworker.ConfigError, match=message):
        psworker.DistributedOptimizer(sgd(model.parameters()), named)


# ----- shards


@contextmanager
def taken_port() -> Iterator[tuple[socket.socket, int]]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken, taken.getsockname()[1]


def test_no_server_says_where_how_long_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken_port() as (_, port):
        message = (
            rf"no shard answers at 127.0.0.1:{port} after \d+\.\d s \(.*\); start one with "
            rf"`psserver start --port {port}`; its address comes from PACELINE_SERVERS"
        )
        with pytest.raises(psworker.ServerUnavailableError, match=message):
            wrap(torch.nn.Linear(2, 2), servers=f"127.0.0.1:{port}", timeout_s=0.3)
        monkeypatch.setenv("PACELINE_TIMEOUT_S", "0.3")
        with pytest.raises(psworker.ServerUnavailableError, match=message):
            psworker.init(servers=f"127.0.0.1:{port}")


def test_a_listener_that_never_answers_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TIMEOUT_S", "3600")  # Not the limit of this call.
    with taken_port() as (taken, port):
        taken.listen()
        with pytest.raises(psworker.ServerUnavailableError, match=rf"127.0.0.1:{port} after \d"):
            psworker.init(servers=f"127.0.0.1:{port}", timeout_s=1.0)


def test_the_shards_must_be_all_of_one_cluster_in_order(shards: Shards) -> None:
    first, second = shards.addresses
    with pytest.raises(ShardMapError, match="not in the order of their shards: ") as problem:
        psworker.init(servers=[second, first])
    assert f"{second} is shard 1 of 2, {first} is shard 0 of 2; sort the addresses" in str(
        problem.value
    )
    with pytest.raises(ShardMapError, match=f"1 server for 2 shards: {first} is shard 0"):
        psworker.init(servers=[first])
    with Shards(2) as others:
        mixed = [first, others.addresses[1]]
        message = f"the servers were not started together: {first} is shard 0 of 2, {mixed[1]} is"
        with pytest.raises(ShardMapError, match=message):
            psworker.init(servers=mixed)


def test_another_version_of_the_protocol_is_refused(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PROTOCOL", 99)
    message = (
        rf"{shards.addresses[0]} speaks protocol \d+ \(paceline [\d.]+\), this worker speaks 99"
    )
    with pytest.raises(ProtocolVersionError, match=message):
        psworker.init(servers=shards.addresses)


# ----- a job of another kind


def differ(what: str) -> None:
    """Joins otherwise than `wrap(make_model())` does."""
    model: torch.nn.Module = make_model()
    if what == "number of workers":
        psworker.init(num_workers=3)
    elif what == "rank":
        psworker.init(rank=0)
    elif what == "tensor":
        model.register_module("2", torch.nn.Linear(128, 32))
        wrap(model)
    elif what == "names":
        wrap(torch.nn.ModuleDict({"inner": model}))
    elif what == "number of tensors":
        wrap(torch.nn.Sequential(*list(model.children())[:3]))
    elif what == "type":
        wrap(model.bfloat16())
    elif what == "groups":
        groups = [{"params": [weight]} for weight in model.parameters()]
        psworker.DistributedOptimizer(sgd(groups), model.named_parameters())
    elif what == "optimizer":
        adam = torch.optim.Adam(model.parameters())
        psworker.DistributedOptimizer(adam, model.named_parameters())
    else:
        wrap(model, **{what: {"mode": "ssd(steps=3)"}.get(what, "fp16")})


def join_after(me: Station, what: str) -> tuple[str, str]:
    """Worker 0 makes the job, and worker 1 then joins otherwise; returns its error."""
    if me.rank == 0:
        wrap(make_model())
        me.tell()
        me.hear()
        return "", ""
    me.hear()
    try:
        differ(what)
    except psworker.PacelineError as problem:
        return type(problem).__name__, str(problem)
    return "", "joined"


MISMATCHES = {
    "number of workers": r"job 'test-.*' has 2 workers, this worker was started for 3; start all",
    "rank": r"rank 0 is held by process \d+ on .*, last heard \d+\.\d s ago; give each worker",
    "tensor": (
        r"tensor 2 is '2.weight' \[32, 128\] float32 in parameter group 0 here and "
        r"'2.weight' \[64, 128\] float32 in parameter group 0 in the job"
    ),
    "names": r"tensor 0 is 'inner.0.weight' .* here and '0.weight' .* in the job",
    "number of tensors": (
        r"4 tensors here and 6 in the job; the first one only in the job is '4.weight' \[10, 64\]"
    ),
    "type": r"tensor 0 is '0.weight' \[128, 20\] bfloat16 .* here and '0.weight' .* float32",
    "groups": r"number of parameter groups is 6 here and 1 in the job",
    "optimizer": r"optimizer is adam here and sgd in the job",
    "mode": r"mode is ssd\(steps=3, .*\) here and ssgd.* in the job",
    "compression": r": compression is fp16.* here and none in the job",
    "pull_compression": r"pull compression is fp16.* here and none in the job",
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_a_worker_that_differs_from_its_job_is_told_in_what(shards: Shards, what: str) -> None:
    job = new_job()
    with (
        shards.workers(join_after, what, ranks=[0], job=job) as (first,),
        shards.workers(join_after, what, ranks=[1], job=job) as (second,),
    ):
        first.hear()
        second.tell()
        kind, message = second.result()
        assert kind == ("RankTakenError" if what == "rank" else "JobMismatchError")
        assert re.search(MISMATCHES[what], message), message
        first.tell()
        first.result()


# ----- gradients and weights


def problem_of(function: Callable[[], object]) -> tuple[str, str]:
    """Returns the type and the message of the error that a function raises."""
    try:
        function()
    except psworker.PacelineError as problem:
        return type(problem).__name__, str(problem)
    return "", "nothing was raised"


def break_gradient(me: Station, value: float, overlap: bool) -> tuple[tuple[str, str], int]:
    """Returns the error of a step whose gradient holds `value`, and the pushes of that step."""
    model = make_model()
    optimizer = wrap(model, overlap=overlap)

    def step(scale: float) -> None:
        optimizer.zero_grad()
        inputs, classes = batch(0, 0)
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        torch.autograd.backward(loss + scale * model.get_parameter("4.bias").sum())
        optimizer.step()

    step(0.0)
    psworker.barrier()
    pushes = optimizer.traffic.num_pushes
    problem = problem_of(lambda: step(value))
    return problem, optimizer.traffic.num_pushes - pushes


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_or_inf_is_refused_by_tensor_and_step(
    shards: Shards, value: float, overlap: bool
) -> None:
    """The bias of the last layer is the first gradient of backward, so nothing has left."""
    for (kind, message), pushes in shards.run(break_gradient, value, overlap):
        assert kind == "GradientError"
        assert message == (
            "gradient of '4.bias' holds 10 NaN or Inf of 10 elements at step 1; nothing of it "
            "was pushed"
        )
        assert pushes == 0


def leave_out(me: Station, overlap: bool) -> dict[str, np.ndarray]:
    """Trains six steps; at step 3 the gradients are NaN, and the script continues."""
    model = make_model()
    optimizer = wrap(model, overlap=overlap)
    for step in range(6):
        optimizer.zero_grad()
        inputs, classes = batch(0, step)
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        weight = model.get_parameter("2.weight" if overlap is False else "4.bias")
        spoilt = float("nan") if step == 3 else 0.0
        try:
            torch.autograd.backward(loss + spoilt * weight.sum())
            optimizer.step()
        except psworker.GradientError:
            assert step == 3
    return weights_of(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_with_a_nan_can_be_left_out(shards: Shards, overlap: bool) -> None:
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in (0, 1, 2, 4, 5):
        optimizer.zero_grad()
        backward(model, *batch(0, step))
        optimizer.step()
    first, second = shards.run(leave_out, overlap)
    assert same(first, second)
    for name, weight in weights_of(model).items():
        np.testing.assert_allclose(first[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)


def misuse(me: Station, job: str) -> dict[str, tuple[str, str]]:
    """Returns the error of each thing that a step refuses."""

    def begin(model: torch.nn.Module, **options: Any) -> psworker.DistributedOptimizer:
        psworker.shutdown()
        psworker.init(job=f"{job}-{len(problems)}")
        return wrap(model, **options)

    def early(model: torch.nn.Module, between: Callable[[], object]) -> None:
        optimizer.zero_grad()
        backward(model, *batch(0, 0))
        between()
        optimizer.step()

    problems: dict[str, tuple[str, str]] = {}
    for kind in ("meta", "two"):
        model = make_model()
        model.get_submodule("2").to("meta")
        if kind == "meta":
            model.to("meta")
        problems[kind] = problem_of(lambda: begin(model))  # noqa: B023 - called at once
    problems["double"] = problem_of(lambda: begin(torch.nn.Linear(2, 2).double()))
    model = make_model()
    optimizer = begin(model)
    model.get_parameter("2.weight").data = torch.zeros(64, 128)
    problems["moved"] = problem_of(optimizer.step)
    model = make_model()
    model.get_submodule("2").requires_grad_(False)
    optimizer = begin(model, overlap=True)
    problems["unfrozen"] = problem_of(lambda: early(model, lambda: model.requires_grad_(True)))
    model = make_model()
    optimizer = begin(model, overlap=True)
    problems["clipped"] = problem_of(
        lambda: early(model, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    )
    model = make_model()
    optimizer = begin(model, overlap=True)
    backward(model, *batch(0, 0))
    problems["accumulated"] = problem_of(lambda: backward(model, *batch(0, 1)))
    model = make_model()
    optimizer = begin(model, overlap=True)
    problems["samples"] = problem_of(
        lambda: early(model, lambda: setattr(optimizer, "samples", 7.0))
    )
    model = make_model()
    optimizer = begin(model, overlap=True)
    problems["lr"] = problem_of(
        lambda: early(model, lambda: optimizer.param_groups[0].update(lr=0.5))
    )
    backward(model, *batch(0, 0))
    problems["group"] = problem_of(lambda: optimizer.add_param_group({"params": []}))
    assert len(optimizer.param_groups) == 1
    problems["wrapped"] = problem_of(
        lambda: psworker.DistributedOptimizer(optimizer, model.named_parameters())
    )
    optimizer = begin(make_model())
    stranger = torch.nn.Parameter(torch.zeros(3))
    problems["stranger"] = problem_of(lambda: optimizer.add_param_group({"params": [stranger]}))
    assert len(optimizer.param_groups) == 1
    early(make_model(), lambda: None)
    problems["overlap"] = problem_of(lambda: begin(make_model(), overlap="maybe"))
    problems["buffers"] = problem_of(lambda: begin(make_model(), buffers="rank1"))
    problems["another job"] = problem_of(lambda: psworker.init(job="another"))
    psworker.shutdown()
    problems["no job"] = problem_of(psworker.rank)
    return problems


EARLY = "pass overlap=False to DistributedOptimizer"
MISUSES = {
    "meta": ("ConfigError", "the parameters are on meta, must be on one device with memory"),
    "two": ("ConfigError", "the parameters are on cpu, meta, must be on one device with memory"),
    "double": ("ConfigError", "'weight' is float64, must be float32, bfloat16, float16"),
    "moved": ("ConfigError", "parameter '2.weight' was given other memory .* move the model"),
    "unfrozen": (
        "GradientError",
        "parameters were unfrozen or added after gradients had been pushed during backward; do it",
    ),
    "clipped": ("GradientError", f"gradient of '.*' was changed after it had been .*{EARLY}"),
    "accumulated": ("GradientError", f"gradient of '4.*' got a second gradient after .*{EARLY}"),
    "samples": ("GradientError", r"samples \(1, now 7\) was changed after gradients had been"),
    "lr": ("GradientError", "a learning rate or other hyper-parameter was changed after gradients"),
    "group": ("GradientError", "parameters were unfrozen or added after gradients had been pushed"),
    "wrapped": (
        "ConfigError",
        "the optimizer is a DistributedOptimizer already: wrap the optimizer of torch.optim, once",
    ),
    "stranger": ("ConfigError", r"parameter 0 of group 1 \[3\] is in the optimizer but not"),
    "overlap": ("ConfigError", "overlap is 'maybe', must be True .* or False"),
    "buffers": ("ConfigError", "buffers is 'rank1', must be one of rank0, mean, local"),
    "another job": ("ConfigError", "this process has joined with job='test-.*; call .*shutdown"),
    "no job": ("ConfigError", "call psworker.init.. or make a DistributedOptimizer first"),
}


@pytest.mark.slow
def test_features_that_a_step_lacks_are_refused_by_name(shards: Shards) -> None:
    (problems,) = shards.run(misuse, new_job(), num_workers=1)
    assert problems.keys() == MISUSES.keys()
    for what, (kind, message) in MISUSES.items():
        assert problems[what][0] == kind, (what, problems[what])
        assert re.search(message, problems[what][1]), (what, problems[what])


# ----- waiting is never silent


def wait_for_a_step(me: Station) -> None:
    optimizer = wrap(make_model())
    me.tell()
    if me.rank == 1:
        me.hear()
    optimizer.step()


def wait_for_weights(me: Station) -> None:
    me.tell()
    wrap(make_model())


def wait_at_a_barrier(me: Station) -> None:
    psworker.init()
    me.tell()
    if me.rank == 1:
        me.hear()
    psworker.barrier("epoch")


def wait_until_said(worker: Worker, pattern: str) -> None:
    """Waits until a worker has written that it waits.

    Tests of `Exchange` with a clock ask for ten seconds.
    """
    end_s = time.monotonic() + DEADLINE_S
    while not re.search(pattern, worker.written()):
        assert time.monotonic() < end_s, worker.written()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_worker_names_its_reason_to_wait(shards: Shards) -> None:
    """A step that a peer does not make, weights that nobody uploads, an empty barrier."""
    with (
        shards.workers(wait_for_a_step) as (stepping, absent),
        shards.workers(wait_for_weights, ranks=[1]) as (loading,),
        shards.workers(wait_at_a_barrier) as (arrived, late),
    ):
        for worker in (stepping, absent, loading, arrived, late):
            worker.hear()
        waits = {
            stepping: rf"worker 0 has waited (\d+) s for step 0 of worker 1 \(process {absent.pid} "
            r"on [^ ]+\), at slice \d of 'model' on shard \d",
            loading: r"worker 1 has waited (\d+) s for the initial weights of slice \d of 'model' "
            r"on shard \d, from worker 0 \(has not joined yet\)",
            arrived: rf"worker 0 has waited (\d+) s for worker 1 \(process {late.pid} on [^ ]+\) "
            r"at barrier 'epoch'",
        }
        for worker, pattern in waits.items():
            wait_until_said(worker, pattern)
        for worker in (absent, late):
            worker.tell()
        for worker in (stepping, absent, arrived, late):
            worker.result()


def test_a_shard_that_hangs_is_named() -> None:
    with Shards(2) as hanging:
        _, second = sorted(
            psutil.Process(hanging.pid).children(), key=lambda process: process.create_time()
        )
        second.suspend()
        with hanging.workers(wait_at_a_barrier, num_workers=1) as (worker,):
            wait_until_said(worker, r"127.0.0.1:\d+ has not answered for \d+ s")
            assert f"{hanging.addresses[1]} has not answered" in worker.written()
            second.resume()
            worker.result()


# ----- calls that a wrapper refuses


def wrong_calls(me: Station) -> None:
    """Makes calls with wrong arguments; training continues as if there had been none."""
    model: Any = make_model()
    inner = sgd(model.parameters())
    optimizer = psworker.DistributedOptimizer(inner, model.named_parameters())
    saved = optimizer.state_dict()
    started = saved | {"state": {0: {"momentum_buffer": torch.zeros(128, 20)}}}
    for damaged in (None, {"step": "x"}, {"compressor_state": [1]}):
        with pytest.raises(psworker.ConfigError, match="the state does not fit: "):
            optimizer.load_state_dict(saved | {"paceline": damaged})
    for wrong in ({"step": -3}, {"step": 1 << 70}, {"counts": torch.full((6,), -1)}):
        with pytest.raises(psworker.ConfigError, match=r"of the state is|steps in the state is"):
            optimizer.load_state_dict(started | {"paceline": wrong})
    backward(model, *batch(me.rank, 0))
    for norm in (-1.0, float("nan"), "1"):
        with pytest.raises(psworker.ConfigError, match=r"max_norm is .*, must be a number from 0"):
            psworker.clip_grad_norm_(optimizer, norm)  # type: ignore[arg-type]
    for state in (None, {}, model.state_dict(), {"optimizer": optimizer.state_dict()}):
        with pytest.raises(psworker.ConfigError, match="takes what its state_dict"):
            optimizer.load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(psworker.ConfigError, match=r"the state does not fit: .*parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(psworker.ConfigError, match=r"the state does not fit: momentum .* missing"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(psworker.ConfigError, match="samples is 'all', must be in"):
        optimizer.samples = "all"  # type: ignore[assignment]
    with pytest.raises(psworker.ConfigError, match=r"goes to DistributedOptimizer\(\); here, name"):
        optimizer.set_mode("auto")
    for call in (
        optimizer.step,
        optimizer.skip_step,
        lambda: optimizer.set_mode("ssd"),
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.add_param_group({"params": []}),
    ):
        inside = pytest.raises(psworker.ConfigError, match=r"inside global_weights\(\)")
        with inside, optimizer.global_weights():
            call()
    for twin in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(psworker.ConfigError, match="cannot be copied or pickled"):
            twin(optimizer)
    again = functools.partial(psworker.DistributedOptimizer, inner, [*model.named_parameters()])
    with pytest.raises(psworker.ConfigError, match="buffers is 'all', must be one of"):
        again(mode="asgd", buffers="all")
    with pytest.raises(psworker.ConfigError, match="no placeholder of a row table"):
        again(rows=sgd(model[:1].parameters()))
    optimizer.param_groups[0]["lr"] = "0,1"
    with pytest.raises(psworker.ConfigError, match="lr of a parameter group is '0,1'"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1

    located = table_of(optimizer).progress.locate

    def step_meanwhile(_: object, number: int) -> None:
        located(number)
        refused = pytest.raises(psworker.ConfigError, match=r"another thread is inside step\(\)")
        with ThreadPoolExecutor(1) as threads, refused:
            threads.submit(optimizer.step).result()

    with patch.object(type(table_of(optimizer).progress), "locate", step_meanwhile):
        optimizer.step()
    backward(model, *batch(me.rank, 1))
    optimizer.step()
    assert optimizer.steps == 2


def test_a_wrong_call_is_one_sentence_and_changes_nothing(shards: Shards) -> None:
    shards.run(wrong_calls, num_workers=1)


def changed_groups(me: Station) -> None:
    """Changes parameter groups, and the wrapped optimizer, in ways that would change nothing."""
    model = make_model()
    inner = sgd([*model.parameters()][:-1])
    optimizer = psworker.DistributedOptimizer(inner, model.named_parameters())
    backward(model, *batch(me.rank, 0))
    with pytest.raises(psworker.ConfigError, match=r"step\(\) was given a Tensor; it takes no arg"):
        optimizer.step(torch.ones(()))  # type: ignore[arg-type]
    with pytest.raises(psworker.ConfigError, match="would change this worker's model alone"):
        inner.step()
    given = optimizer.param_groups[0]["params"]
    for changed in ([*given, [*model.parameters()][-1]], given[:-1], given[::-1]):
        optimizer.param_groups[0]["params"] = changed
        with pytest.raises(psworker.ConfigError, match=r"group 0 has \d+ parameters, and training"):
            optimizer.step()
    optimizer.param_groups[0]["params"] = given
    optimizer.step()
    former = inner.param_groups
    inner.load_state_dict(inner.state_dict())
    with pytest.raises(psworker.ConfigError, match="gave it other parameter groups: call that of"):
        optimizer.step()
    inner.param_groups = former
    inner.add_param_group({"params": [[*model.parameters()][-1]]})
    with pytest.raises(psworker.ConfigError, match="has 2 parameter groups, and training began"):
        optimizer.step()
    with pytest.raises(psworker.ConfigError, match=r"root_rank is '0', must be in 0\.\.0"):
        psworker.broadcast_parameters(model.state_dict(), "0")  # type: ignore[arg-type]
    with pytest.raises(psworker.ConfigError, match="a tensor is on meta, and has no values"):
        psworker.push_pull(torch.ones(1, device="meta"), "meta")
    psworker.shutdown()
    inner.step()


def test_groups_that_were_changed_in_place_are_refused(shards: Shards) -> None:
    shards.run(changed_groups, num_workers=1)


def made_by_threads(me: Station) -> list[str]:
    """Makes wrappers in two threads, the second in the middle of the first."""
    told: list[str] = []
    joined = context.join

    def join_meanwhile(**given: Any) -> context.Context:
        with pytest.raises(psworker.ConfigError) as caught, ThreadPoolExecutor(1) as threads:
            threads.submit(wrap, make_model()).result()
        told.append(str(caught.value))
        return joined(**given)

    with patch.object(context, "join", join_meanwhile):
        wrap(make_model())
    wrap(make_model())
    return told


def test_wrappers_are_made_one_after_the_other(shards: Shards) -> None:
    told = shards.run(made_by_threads, num_workers=1)[0]
    assert len(told) == 1
    assert "another thread is making a DistributedOptimizer: make them one after the" in told[0]


def interrupted_steps(me: Station, mode: str) -> tuple[int, int]:
    """Interrupts steps in the middle of a request, and at the end of one; goes on to train."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = make_model()
    optimizer = wrap(model, mode=mode)
    sends: Any = Exchange._send

    def send(*given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        sends(*given)

    located = table_of(optimizer).progress.locate

    def locate(_: object, number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        located(number)

    num_interrupted = 0
    for step in range(20):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        broken = {4: (Exchange, "_send", send), 10: (TrainingProgress, "locate", locate)}.get(step)
        try:
            with contextlib.nullcontext() if broken is None else patch.object(*broken):
                optimizer.step()
        except KeyboardInterrupt:
            num_interrupted += 1
    return num_interrupted, optimizer.steps


@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=3)"])
def test_a_step_that_ctrl_c_interrupts_leaves_no_request_half_made(
    shards: Shards, mode: str
) -> None:
    num_interrupted, steps = shards.run(interrupted_steps, mode, num_workers=1)[0]
    assert num_interrupted == 2
    assert steps >= 18
