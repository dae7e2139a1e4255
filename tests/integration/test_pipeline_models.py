"""Models and data that scripts have: numbers as inputs, layers in place, dropout, other shapes."""

from typing import Any

import pytest
import torch
from torch import nn

import psworker
from pscore.pb.ps.v1 import control_pb2
from psworker.connection.membership.session import Session
from tests.integration.cluster import Shards, Station, WorkerError, new_job, wait_until

TOTAL, CLASSES = 6, 4
SCHEDULES = ["1f1b", "ScheduleGPipe"]


class First(nn.Module):
    """Returns the first of several values."""

    def forward(self, values: Any) -> torch.Tensor:
        found: torch.Tensor = values[0]
        return found


def make_model() -> nn.Sequential:
    """Returns a model that can be cut before a layer that works in place."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Embedding(10, 6),
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.0, inplace=True),
        nn.Flatten(0, 1),
        nn.BatchNorm1d(6),
        nn.Linear(6, CLASSES),
    )


def minibatches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns minibatches of different sizes."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2 + number % 3, 3 + number % 2) for number in range(TOTAL)]
    return [
        (
            torch.randint(10, shape, generator=generator),
            torch.randint(CLASSES, (shape[0] * shape[1],), generator=generator),
        )
        for shape in shapes
    ]


def train(me: Station, job: str) -> list[Any]:
    """Trains with each schedule, at a rate at which delays do not matter; clips each gradient."""
    found = []
    for schedule in SCHEDULES:
        run = psworker.Pipeline(
            make_model(),
            torch.zeros(2, 3, dtype=torch.int64),
            nn.CrossEntropyLoss(label_smoothing=0.1),
            lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
            [("1", 1), ("6", 1)],
            schedule=schedule,
            job=f"{job}-{schedule}",
        )
        norms: list[float] = []

        def clip(*_: Any, module: nn.Module = run.module, norms: list[float] = norms) -> None:
            nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            squares = [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
            norms.append(float(torch.stack(squares).sum().sqrt()))

        run.optimizer.register_step_pre_hook(clip)
        for inputs, targets in minibatches():
            run.step(inputs, targets)
        run.finish()
        state = {name: value.numpy() for name, value in run.state_dict().items()}
        found.append((run.losses, state, norms))
    return found


def test_usual_scripts_train(shards: Shards) -> None:
    with shards.workers(train, new_job(), num_workers=2) as workers:
        results = [worker.result() for worker in workers]
    model, loss = make_model(), nn.CrossEntropyLoss(label_smoothing=0.1)
    with torch.no_grad():
        expected = [float(loss(model(inputs), targets)) for inputs, targets in minibatches()]
    for number, _ in enumerate(SCHEDULES):
        losses, state, _ = results[1][number]
        assert [losses[m] for m in range(TOTAL)] == pytest.approx(expected, abs=1e-5)
        for name, value in model.named_buffers():  # The statistics of every minibatch, in order.
            torch.testing.assert_close(torch.as_tensor(state[name]), value, rtol=1e-5, atol=1e-6)
        for _, _, norms in (result[number] for result in results):
            assert norms
            assert max(norms) == pytest.approx(1e-3, rel=1e-3)


def cut_at_a_tuple(me: Station) -> None:
    run = psworker.Pipeline(
        nn.Sequential(nn.LSTM(3, 3, batch_first=True), First(), nn.Linear(3, 2)),
        torch.zeros(2, 5, 3),
        lambda output, _: output.sum(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        [("0", 1), ("2", 1)],
    )
    run.step(torch.zeros(2, 5, 3), None)
    run.finish()


def test_a_cut_where_a_tuple_is_passed_on_is_refused(shards: Shards) -> None:
    with shards.workers(cut_at_a_tuple, num_workers=2) as workers:
        with pytest.raises(WorkerError, match="stage 0 returns a tuple, must return one tensor"):
            workers[0].result()
        with pytest.raises(WorkerError, match="replica 0 of stage 0; start all again"):
            workers[1].result()


def end_at_once(me: Station) -> None:
    """Ends worker 0 when all have met; worker 1 asks who takes part when it is gone."""
    ask = Session.meet

    def last(self: Session, request: control_pb2.MeetRequest) -> control_pb2.MeetReply:
        """Stops for the meeting when worker 1 has stopped; a question of no epoch is no stop."""
        look = control_pb2.MeetRequest()
        look.CopyFrom(request)
        look.epoch = 0

        def others_have_stopped() -> bool:
            reply = ask(self, look)
            return len(reply.peers) == 2 and "worker 1" not in reply.waiting_for

        wait_until(others_have_stopped)
        return ask(self, request)

    def first(self: Session, request: control_pb2.MeetRequest) -> control_pb2.MeetReply:
        """Returns the answer to this worker's stop when worker 0 has met it and ended."""
        reply = ask(self, request)
        if reply.waiting_for and len(reply.peers) == 2 and request.epoch == reply.epoch:
            wait_until(lambda: 0 not in self.live())
        return reply

    Session.meet = first if me.rank else last  # type: ignore[method-assign]
    cut_at_a_tuple(me)


def test_a_worker_that_ends_when_all_have_met_ends_the_others(shards: Shards) -> None:
    with shards.workers(end_at_once, num_workers=2) as workers:
        with pytest.raises(WorkerError, match="stage 0 returns a tuple"):
            workers[0].result()
        with pytest.raises(WorkerError, match="by the loss of replica 0 of stage 0; start all"):
            workers[1].result()
