"""Torch's flushing schedules over messages: an update is that of one process on the joined batch.

The workers are threads here, each with its own replica, and meet in queues and barriers.
"""

import copy
import queue
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from pscore.errors import ConfigError
from psworker.pipeline.run.flush import Flush, FlushReplica, schedule_named, torch_schedules
from psworker.pipeline.run.schedule import Place
from psworker.pipeline.run.stage import ACTIVATION, GRADIENT, OptimizerWait, Receive
from tests.paper.test_pipeline import LR, OPTIMIZERS, data, loss_of, make_stages

WAIT_S = 60.0  # Against a hang only.


class Threads:
    """All replicas of all stages, a thread each."""

    def __init__(self, replicas: tuple[int, ...], schedule: str, minibatches: int) -> None:
        self.minibatches = minibatches
        stages = make_stages(len(replicas))
        found = schedule_named(schedule)
        assert found is not None
        self.places = [Place.of_rank(rank, replicas) for rank in range(sum(replicas))]
        self.modules = [copy.deepcopy(stages[place.stage]) for place in self.places]
        self._queues: dict[Any, queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()
        self.optimizers = [
            OPTIMIZERS["sgd"](list(module.parameters()), LR) for module in self.modules
        ]
        self.replicas = [
            FlushReplica(
                self.modules[place.rank],
                Flush(place, found, minibatches),
                loss_of,
                self._send_from(place.rank),
                self._take_at(place.rank),
            )
            for place in self.places
        ]
        self.grads: dict[tuple[int, int], list[list[torch.Tensor]]] = defaultdict(list)
        self.problems: list[BaseException] = []
        # Activations sent and gradients not received yet: of each rank but those of the last stage.
        self._flying = [0] * len(self.places)
        self.most_flying = [0] * len(self.places)

    def _send_from(self, rank: int) -> Any:
        def send(to: int, kind: int, minibatch: int, values: torch.Tensor) -> None:
            with self._lock:
                box = self._queues[to, rank, kind, minibatch]
                self._flying[rank] += kind == ACTIVATION
                self.most_flying[rank] = max(self.most_flying[rank], self._flying[rank])
            box.put(values.clone())

        return send

    def _take_at(self, rank: int) -> Any:
        def take(wait: Receive) -> torch.Tensor:
            with self._lock:
                box = self._queues[rank, wait.source, wait.kind, wait.minibatch]
            found = box.get(timeout=WAIT_S)
            self._flying[rank] -= wait.kind == GRADIENT
            return found

        return take

    def _work(self, rank: int, total: int) -> None:
        replica, place = self.replicas[rank], self.places[rank]
        try:
            for number, (x, y) in enumerate(data(total)):
                for update in replica.step(number, x, y):
                    self._update(place, update, place.num_replicas)
            left = total % self.minibatches
            for update in replica.finish():
                self._update(place, update, min(left, place.num_replicas))
        except BaseException as problem:  # noqa: BLE001
            self.problems.append(problem)

    def _update(self, place: Place, update: Receive | OptimizerWait, there: int) -> None:
        """Waits for the replicas of the stage, and steps with their mean, as shards give it."""
        assert isinstance(update, OptimizerWait)
        own = [p.grad.clone() for p in self.modules[place.rank].parameters() if p.grad is not None]
        key = place.stage, update.number
        with self._lock:
            self.grads[key].append(own)
        deadline = threading.Event()
        while len(self.grads[key]) < there and not self.problems:
            deadline.wait(0.001)
        means = [torch.stack(each).mean(0) for each in zip(*self.grads[key], strict=True)]
        for parameter, mean in zip(self.modules[place.rank].parameters(), means, strict=True):
            parameter.grad = mean.clone()
        self.optimizers[place.rank].step()

    def run(self, total: int) -> None:
        workers = [
            threading.Thread(target=self._work, args=(place.rank, total)) for place in self.places
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not self.problems, self.problems


def one_process(stages: int, minibatches: int, total: int) -> tuple[nn.Sequential, list[float]]:
    """Returns the whole model, trained on the joined minibatches of each update, and losses."""
    model = nn.Sequential(*make_stages(stages))
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()), LR)
    losses: list[float] = []
    batches = data(total)
    for begin in range(0, total, minibatches):
        part = batches[begin : begin + minibatches]
        with torch.no_grad():
            losses += [float(loss_of(model(x), y)) for x, y in part]
        optimizer.zero_grad()
        x, y = (torch.cat(each) for each in zip(*part, strict=True))
        torch.autograd.backward(loss_of(model(x), y))
        optimizer.step()
    return model, losses


@pytest.mark.parametrize("schedule", torch_schedules())
@pytest.mark.parametrize(
    ("replicas", "minibatches", "total"),
    [
        ((1,), 2, 6),
        ((1, 1, 1), 4, 12),
        ((2, 2), 4, 10),  # The last update has two minibatches.
        ((3, 1), 6, 16),  # The last update has four: two on one replica, one on each other.
        ((2, 2, 1), 6, 13),  # The last update has one: a replica has none.
    ],
    ids=str,
)
def test_an_update_is_that_of_one_process_on_the_joined_batch(
    schedule: str, replicas: tuple[int, ...], minibatches: int, total: int
) -> None:
    pipe = Threads(replicas, schedule, minibatches)
    pipe.run(total)
    expected, losses = one_process(len(replicas), minibatches, total)
    for place, module in zip(pipe.places, pipe.modules, strict=True):
        if place.replica:
            continue  # The last update may be without it.
        for found, wanted in zip(
            module.parameters(), expected[place.stage].parameters(), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    seen = {m: loss for replica in pipe.replicas for m, loss in replica.losses.items()}
    assert [seen[m] for m in range(total)] == pytest.approx(losses)


@pytest.mark.parametrize(
    ("schedule", "most"), [("Schedule1F1B", [3, 2]), ("ScheduleGPipe", [6, 6])]
)
def test_the_order_is_that_of_torch(schedule: str, most: list[int]) -> None:
    """1F1B holds as many minibatches as there are stages behind, GPipe all of an update."""
    pipe = Threads((1, 1, 1), schedule, 6)
    pipe.run(12)
    assert pipe.most_flying[:2] == most


def test_names_of_schedules() -> None:
    assert schedule_named("Schedule1F1B") is schedules.Schedule1F1B
    assert {"Schedule1F1B", "ScheduleGPipe"} <= {*torch_schedules()}
    assert schedule_named("1f1b") is None
    assert schedule_named("ScheduleNone") is None
    with pytest.raises(ConfigError, match="runs several stages on a worker"):
        schedule_named("ScheduleInterleaved1F1B")


@pytest.mark.parametrize(
    ("replicas", "minibatches", "message"),
    [
        ((2, 1), 3, "has 3 minibatches in an update, must be a multiple of 2"),
        ((1, 2), 4, "have 1-2 replicas; .* no stage can have more than the one before it"),
        ((1, 1, 1), 2, "Schedule1F1B refuses 2 minibatches of a replica in an update: Number of"),
    ],
)
def test_plans_and_minibatches_that_do_not_fit_are_refused(
    replicas: tuple[int, ...], minibatches: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Threads(replicas, "Schedule1F1B", minibatches)


def test_without_a_number_each_replica_has_a_minibatch_for_each_stage() -> None:
    flush = Flush(Place(0, 0, (2, 1)), schedules.Schedule1F1B, None)
    assert (flush.minibatches, flush.updates_every, flush.whole, flush.rate) == (4, 2, 4, 1)
    assert [flush.version(m) for m in (0, 3, 4, 8)] == [0, 0, 1, 2]
