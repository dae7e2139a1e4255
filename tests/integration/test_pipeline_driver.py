"""`psworker.Pipeline` on real shards and workers: its weights are those of the formulas."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import psworker
from psworker.pipeline.plan.plan_file import PlanFile, PlanStage
from psworker.pipeline.run.checkpoint import StageCheckpoint
from tests.integration.cluster import Shards, Station, WorkerError, new_job
from tests.paper import test_pipeline as model
from tests.paper.test_pipeline_flush import one_process

TOTALS = (13, 15)  # Not a multiple of two: the last round of two replicas holds one minibatch.
CASES = [((2, 2), "1f1b", "weights"), ((1, 1), "1f1b", "vertical"), ((2, 1), "2bw", "weights")]
CASES += [((2, 1), "Schedule1F1B", "weights"), ((2, 2), "ScheduleGPipe", "weights")]


def whole_model(number: int) -> nn.Sequential:
    return nn.Sequential(*model.make_stages(number)).float()


def train(
    me: Station, job: str, cases: list[tuple[tuple[int, ...], str, str]], total: int
) -> list[object]:
    """Trains each case in turn; those with fewer workers leave the last ones out."""
    results: list[object] = []
    for number, (replicas, schedule, stash) in enumerate(cases):
        if me.rank >= sum(replicas):
            results.append(None)
            continue
        run = psworker.Pipeline(
            whole_model(len(replicas)),
            torch.zeros(1, model.WIDTH),
            model.loss_of,
            lambda parameters: torch.optim.SGD(parameters, lr=model.LR, momentum=0.9),
            [(f"{stage}.2", count) for stage, count in enumerate(replicas)],
            schedule=schedule,
            stash=stash,
            minibatches=None if schedule == "1f1b" else 4,
            job=f"{job}-{number}",
            num_workers=sum(replicas),
        )
        assert (psworker.rank(), psworker.size()) == (me.rank, sum(replicas))
        assert psworker.live_ranks() == list(range(sum(replicas)))
        losses = [run.step(x.float(), y.float()) for x, y in model.data(total)]
        run.finish()
        assert psworker.rank() == me.rank  # It divides the work behind the training too.
        state = {name: value.double().numpy() for name, value in run.state_dict().items()}
        results.append((run.place.stage, run.place.replica, state, run.losses, losses))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("total", TOTALS)
def test_real_workers_train_as_the_formulas_say(shards: Shards, total: int) -> None:
    """The last update of four minibatches has one, or two on one replica and one on another."""
    with shards.workers(train, new_job(), CASES, total, num_workers=4) as workers:
        by_rank = [worker.result() for worker in workers]
    for number, (replicas, schedule, stash) in enumerate(CASES):
        kind = "2bw" if schedule == "2bw" else {"weights": "stash"}.get(stash, stash)
        is_flushed = schedule.startswith("Schedule")
        if is_flushed:
            alone, _ = one_process(len(replicas), 4, total)
            expected = [[{**stage.state_dict()}] for stage in alone.children()]
        else:
            expected = model.oracle(kind, replicas, "sgd", total)
        seen: set[int] = set()
        for rank in range(sum(replicas)):
            stage, replica, state, losses, returned = by_rank[rank][number]
            if replica == 0:
                for name, value in expected[stage][-1].items():
                    found = torch.from_numpy(state[f"{stage}.{name}"])
                    torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)
            if stage == len(replicas) - 1:
                assert not seen & losses.keys()
                seen |= losses.keys()
                if not is_flushed:  # There a loss is known behind the last one of its update.
                    assert [m for m, loss in enumerate(returned) if loss is not None] == [*losses]
        assert seen == set(range(total))


def make_wide(*sizes: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def find_and_train(me: Station, job: str) -> tuple[Any, ...]:
    """Trains with plans that are found: data parallelism, a pipeline, and none."""
    found: list[Any] = []
    # 1 MB in each layer: data parallelism needs 6 MB.
    for number, memory in enumerate((None, "3300k", "1k")):
        size = 500 if memory else 5
        try:
            run = psworker.Pipeline(
                make_wide(size, size, size),
                torch.zeros(4, size),
                model.loss_of,
                lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                bandwidth="1mbit",
                memory=memory,
                job=f"{job}-{number}",
            )
        except psworker.PacelineError as problem:
            found.append(str(problem))
            continue
        generator = torch.Generator().manual_seed(1)
        for x in torch.randn(4, 2, size, generator=generator):
            run.step(x, x)
        run.finish()
        found.append((run.plan, {name: v.numpy() for name, v in run.state_dict().items()}))
    return tuple(found)


@pytest.mark.slow
def test_workers_find_their_plan(shards: Shards) -> None:
    with shards.workers(find_and_train, new_job(), num_workers=2) as workers:
        results = [worker.result() for worker in workers]
        written = [worker.written() for worker in workers]
    assert [result[0][0] for result in results] == [[("1", 2)]] * 2
    assert [result[1][0] for result in results] == [[("0", 1), ("1", 1)]] * 2
    assert "there is no plan for 2 workers: nothing fits into 1 kB" in results[0][2]
    assert "rank 0 has found no plan for the pipeline" in results[1][2]
    assert "pipeline plan 2: do not pipeline: " in written[0]
    assert "do not pipeline" not in written[1]
    # One stage on two workers takes the mean of two minibatches.
    alone = make_wide(5, 5, 5)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    batches = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(1))
    for both in batches.reshape(2, 4, 5):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss_of(alone(both), both))
        optimizer.step()
    for name, value in alone.state_dict().items():
        for result in results:
            torch.testing.assert_close(torch.from_numpy(result[0][1][name]), value)


def take_the_plan_of_the_launcher(me: Station) -> Any:
    run = psworker.Pipeline(
        whole_model(2),
        torch.zeros(1, model.WIDTH),
        model.loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    run.finish()
    return run.plan, run.place.stage


def test_workers_take_the_plan_that_they_are_handed(shards: Shards, tmp_path: Path) -> None:
    stages = (PlanStage(last="0.2", replicas=1), PlanStage(last="1.2", replicas=1))
    path = tmp_path / "plan.json"
    PlanFile(model="m", stages=stages, predicted_ms=1, verdict="pipeline", reason="").write(path)
    env = {"PACELINE_PIPELINE": str(path)}
    with shards.workers(take_the_plan_of_the_launcher, num_workers=2, env=env) as workers:
        found = [worker.result() for worker in workers]
    assert found == [([("0.2", 1), ("1.2", 1)], stage) for stage in (0, 1)]


AT, END = 6, 12  # Minibatches behind the checkpoint, and of the whole run.


def make_run(job: str, replicas: tuple[int, ...], **options: Any) -> psworker.Pipeline:
    return psworker.Pipeline(
        whole_model(len(replicas)),
        torch.zeros(1, model.WIDTH),
        model.loss_of,
        lambda parameters: torch.optim.Adam(parameters, lr=model.LR / 10),
        [(f"{stage}.2", count) for stage, count in enumerate(replicas)],
        job=job,
        num_workers=sum(replicas),
        **options,
    )


def train_on(run: psworker.Pipeline, end: int) -> None:
    for x, y in model.data(END)[run.minibatches : end]:
        run.step(x.float(), y.float())


def finished(run: psworker.Pipeline) -> Any:
    run.finish()
    return {name: value.numpy() for name, value in run.state_dict().items()}


def save_and_resume(me: Station, job: str, folder: str) -> tuple[Any, ...]:
    """Saves in the middle of a run, and goes on from there in a new job; returns both ends."""
    run = make_run(job, (2, 1))
    train_on(run, 1)
    with pytest.raises(psworker.ConfigError, match="save behind a multiple of 2"):
        run.save(folder)
    train_on(run, AT)
    path = run.save(folder)
    train_on(run, END)
    ends = [finished(run)]
    for replicas in ((2, 1), (1, 2)):
        again = make_run(f"{job}-{replicas[0]}", replicas, resume=folder)
        assert again.minibatches == AT
        if replicas == (1, 2):
            again.save(f"{folder}/of-another-plan")
        else:
            train_on(again, END)
        ends.append(finished(again))
    return str(path), *ends


@pytest.mark.slow
def test_a_checkpoint_is_the_whole_model_at_one_minibatch(shards: Shards, tmp_path: Path) -> None:
    with shards.workers(save_and_resume, new_job(), str(tmp_path), num_workers=3) as workers:
        results = [worker.result() for worker in workers]
    path = Path(results[0][0])
    assert path.name == f"minibatch-{AT:08d}"
    unsplit = whole_model(2)
    unsplit.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))
    expected = model.oracle("stash", (2, 1), "adam", AT)
    for stage, part in enumerate(unsplit.children()):
        for name, value in part.named_parameters():
            torch.testing.assert_close(
                value.detach().double(), expected[stage][-1][name], rtol=1e-5, atol=1e-6
            )
    for _, end, resumed, _ in results:
        assert end.keys() == resumed.keys()
        assert all((end[name] == resumed[name]).all() for name in end)
    other = StageCheckpoint.read(tmp_path / "of-another-plan" / path.name)
    same = StageCheckpoint.read(path)
    assert other.minibatches == same.minibatches
    for first, second in ((other.weights, same.weights), (other.optimizer, same.optimizer)):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def refuse(me: Station, plan: list[tuple[str, int]] | str, options: dict[str, Any]) -> None:
    psworker.Pipeline(
        whole_model(2),
        torch.zeros(1, model.WIDTH),
        options.pop("loss", model.loss_of),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan,
        **options,
    )


def wait_for_the_lost(me: Station) -> None:
    """Rank 0 ends in the middle; rank 1 learns it."""
    run = psworker.Pipeline(
        whole_model(2),
        torch.zeros(1, model.WIDTH),
        model.loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        [("0.2", 1), ("1.2", 1)],
    )
    for number, (x, y) in enumerate(model.data(4)):
        if number == 2 and me.rank == 0:
            me.tell("here")
            me.hear()
        run.step(x.float(), y.float())


@pytest.mark.slow
def test_a_lost_worker_is_named() -> None:
    with Shards(1) as shards, shards.workers(wait_for_the_lost, num_workers=2) as workers:
        assert workers[0].hear() == "here"
        workers[0].kill()
        with pytest.raises(WorkerError, match=r"replica 0 of stage 0; start all again"):
            workers[1].result()


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ([("0.2", 1), ("1.2", 1)], {"schedule": "gpipe"}, "schedule is 'gpipe', must be one of"),
        (
            [("0.2", 1), ("1.2", 1)],
            {"schedule": "ScheduleInterleaved1F1B"},
            "runs several stages on a worker",
        ),
        (
            [("0.2", 1), ("1.2", 1)],
            {"schedule": "Schedule1F1B", "stash": "vertical"},
            "stash='vertical' has no effect but with schedule='1f1b'",
        ),
        ([("0.2", 1), ("1.2", 1)], {"minibatches": 2}, "has no effect with schedule='1f1b'"),
        ([("0.2", 1), ("1.2", 1)], {"stash": "none"}, "stash is 'none', must be one of weights, "),
        ([("0.2", 2), ("1.2", 1)], {}, "the plan has 3 workers, the job 2"),
        ([("1.2", 1), ("0.2", 1)], {}, "they must be in order, and the last one is 1.2"),
        ([("0.9", 1), ("1.2", 1)], {}, "the plan cuts after '0.9'; the blocks are 0.0, 0.1, 0.2"),
        (
            [("0.0", 1), ("0.1", 1), ("1.2", 1)],
            {"num_workers": 3},
            "stage 1 (0.1 to 0.1) has no parameters to train: join it with the stage",
        ),
        ([], {}, "must name each stage's last block and replicas"),
        (
            [("0.2", 1), ("1.2", 1)],
            {"loss": nn.Bilinear(3, 3, 1)},
            "the loss (Bilinear) has parameters to train: make it the model's last layers",
        ),
        ("fast.json", {}, "the plan cannot be read: [Errno 2] No such file or directory: 'fast"),
        ("auto", {}, "plan='auto' needs bandwidth"),
        ([("0.2", 1), ("1.2", 1)], {"memory": "1g"}, "memory='1g' has no effect but with plan="),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    plan: list[tuple[str, int]] | str,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(psworker.ConfigError) as refused:
        refuse(Station(0, 2, None), plan, options)  # type: ignore[arg-type]
    assert message in str(refused.value)
