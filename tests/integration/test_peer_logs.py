"""Real workers of modes without weights on a server, replayed from their logs in float64."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

import psworker
from pscore.graphs import graph_of
from psworker.gossip import GOSSIPS
from psworker.gossip.base import Waits
from psworker.gossip.mixing import Mixing
from psworker.gossip.pairs import Pairs
from tests.inside import gossip_of
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.command import eventually

Array = npt.NDArray[Any]
NUM, NUMEL, STEPS = 3, 1000, 40
LR, MOMENTUM, DECAY = 0.05, 0.9, 1e-3
RNG = np.random.default_rng(11)
CURVATURE = RNG.uniform(0.2, 1.0, (NUM, NUMEL))
TARGET = RNG.normal(size=(NUM, NUMEL))
START = RNG.normal(size=NUMEL).astype(np.float32)


class Event(NamedTuple):
    """A change of one worker's model, or a read of it, in the order in which they happened."""

    what: str  # `read`, `write`, `half` (moved to another's snapshot) or `answer`.
    other: int  # The rank whose snapshot was offered, of a half.
    number: int  # Of the exchange, by the worker that offered it.
    after: Array  # The model, float32.


class Offer(NamedTuple):
    """A snapshot that a worker has offered."""

    to: int
    number: int
    values: Array


class Log(NamedTuple):
    """All of one worker."""

    events: list[Event]
    offers: list[Offer]


class RecordedPairs(Pairs):
    """AD-PSGD's worker with a log; events are noted under the model's lock."""

    events: list[Event]

    def has_answer(self) -> bool:
        return not self._open

    def start(self) -> Waits:
        self.events, self._about = [], threading.local()
        yield from super().start()

    @contextmanager
    def _as(self, what: str, other: int = -1, number: int = -1) -> Iterator[None]:
        self._about.now = what, other, number
        yield
        self._about.now = "write", -1, -1

    def begin(self) -> None:
        with self._as("read"):
            super().begin()

    def end(self) -> None:
        with self._as("read"):
            super().end()

    def on_offer(self, source: int, incarnation: int, number: int, part: int, values: Any) -> Any:
        with self._as("half", source, number):
            return super().on_offer(source, incarnation, number, part, values)

    def on_answer(self, number: int, part: int, values: Any) -> None:
        with self._as("answer", -1, number):
            super().on_answer(number, part, values)

    def _note(self, part: int) -> None:
        super()._note(part)
        self._record()

    def _load(self) -> None:
        super()._load()
        self._record()

    def _record(self) -> None:
        what, other, number = getattr(self._about, "now", ("write", -1, -1))
        self.events.append(
            Event(what, other, number, self.shared[:NUMEL].copy())
        )  # Without the padding.


class RecordedMixing(Mixing):
    """D-PSGD's worker with the model after each step."""

    models: list[Array]

    def start(self) -> Waits:
        self.models = []
        yield from super().start()

    def step(self) -> Waits:
        yield from super().step()
        self.models.append(self.model.weights.numpy()[:NUMEL].copy())


def train(me: Station, mode: str, job: str) -> Any:
    """Trains on an ellipsoid of each worker's own; returns the recording gossip's log."""
    GOSSIPS.update(pairs=RecordedPairs, mixing=RecordedMixing)
    weights = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer: Any = torch.optim.SGD([weights], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    named = [("weights", weights)]
    optimizer = psworker.DistributedOptimizer(optimizer, named_parameters=named, mode=mode, job=job)
    gossip = gossip_of(optimizer)
    offers: list[Offer] = []
    offer = gossip.post.offer

    def record_offer(to: int, number: int, part: int, values: Array) -> None:
        offers.append(Offer(to, number, values[:NUMEL].copy()))
        offer(to, number, part, values)

    gossip.post.offer = record_offer
    curvature, target = (torch.from_numpy(part[me.rank]).float() for part in (CURVATURE, TARGET))
    for step in range(STEPS):
        time.sleep(0.002 * (1 + me.rank))  # Workers of three speeds; answers come in between.
        if step % 4 in (0, 3) and isinstance(gossip, RecordedPairs):
            eventually(gossip.has_answer)  # On a busy machine all steps may be over before one.
        weights.grad = curvature * (weights.detach() - target)
        optimizer.step()
    psworker.barrier()  # One that has ended refuses the offers of others.
    psworker.shutdown()
    if isinstance(gossip, RecordedMixing):
        return gossip.models
    return Log(gossip.events, offers)


@pytest.fixture(scope="module")
def logs(shards: Shards) -> list[Log]:
    found: list[Log] = shards.run(train, "adpsgd", new_job(), num_workers=NUM)
    return found


def in_causal_order(logs: list[Log]) -> list[tuple[int, Event]]:
    """Merges the logs: an answer stands behind its half, a half behind its offer's snapshot."""
    places = [0] * NUM
    order: list[tuple[int, Event]] = []
    halves: set[tuple[int, int]] = set()
    snapshots = {
        (rank, offer.number): place_of(log, offer)
        for rank, log in enumerate(logs)
        for offer in log.offers
    }

    def is_ready(rank: int, event: Event) -> bool:
        if event.what == "half":
            return places[event.other] > snapshots[event.other, event.number]
        return event.what != "answer" or (rank, event.number) in halves

    while any(places[rank] < len(log.events) for rank, log in enumerate(logs)):
        before = len(order)
        for rank, log in enumerate(logs):
            while places[rank] < len(log.events) and is_ready(rank, log.events[places[rank]]):
                event = log.events[places[rank]]
                places[rank] += 1
                order.append((rank, event))
                if event.what == "half":
                    halves.add((event.other, event.number))
        assert len(order) > before, "the logs contradict each other"
    return order


def place_of(log: Log, offer: Offer) -> int:
    """Returns the index of the event behind which a snapshot was taken: it has these bits."""
    same = [i for i, event in enumerate(log.events) if np.array_equal(event.after, offer.values)]
    assert same, f"offer {offer.number} is no state of the model"
    return same[0]


@pytest.mark.slow
def test_mixes_of_real_workers_are_exact_to_the_bit(logs: list[Log]) -> None:
    states = {rank: START for rank in range(NUM)}
    offers = {(rank, o.number): o for rank, log in enumerate(logs) for o in log.offers}
    answers: dict[tuple[int, int], tuple[Array, Array]] = {}
    counts = {"half": 0, "same": 0, "late": 0}
    for rank, event in in_causal_order(logs):
        before = states[rank]
        if event.what == "half":
            key = event.other, event.number
            assert key not in answers, "an offer was applied twice"
            assert offers[key].to == rank
            assert np.array_equal(event.after, (offers[key].values + before) * np.float32(0.5))
            answers[key] = before, event.after
            counts["half"] += 1
        elif event.what == "answer":
            offered, (theirs, mixed) = (
                offers[rank, event.number].values,
                answers[rank, event.number],
            )
            moved = before + (theirs - offered) * np.float32(0.5)
            is_same = np.array_equal(before, offered)
            assert np.array_equal(event.after, mixed if is_same else moved)
            counts["same" if is_same else "late"] += 1
        elif event.what == "read":
            assert np.array_equal(event.after, before), "a read has changed the model"
        states[rank] = event.after
    assert counts["half"] >= NUM * STEPS // 4
    assert counts["same"] > 0
    assert len(answers) == counts["same"] + counts["late"], "an answer was lost"


def test_real_workers_follow_the_replay_of_their_events(logs: list[Log]) -> None:
    x = {rank: START.astype(np.float64) for rank in range(NUM)}
    read, momentum = dict(x), {rank: np.zeros(NUMEL) for rank in range(NUM)}
    places = {
        (rank, place_of(log, o)): o.number for rank, log in enumerate(logs) for o in log.offers
    }
    offered: dict[tuple[int, int], Array] = {}
    answers: dict[tuple[int, int], Array] = {}
    done = [0] * NUM
    for rank, event in in_causal_order(logs):
        if event.what == "write":
            grad = CURVATURE[rank] * (read[rank] - TARGET[rank]) + DECAY * read[rank]
            momentum[rank] = MOMENTUM * momentum[rank] + grad
            x[rank] = x[rank] - LR * momentum[rank]
        elif event.what == "half":
            asked = event.other, event.number
            answers[asked] = x[rank]
            x[rank] = (x[rank] + offered[asked]) / 2
        elif event.what == "answer":
            asked = rank, event.number
            x[rank] = x[rank] + (answers[asked] - offered[asked]) / 2
        if event.what in ("read", "write"):  # After a write the model is read at once.
            read[rank] = x[rank]
        number = places.get((rank, done[rank]))
        if number is not None:
            offered[rank, number] = x[rank]
        done[rank] += 1
        limit = 1e-6 * np.abs(x[rank]).max()
        assert np.abs(event.after - x[rank]).max() <= limit, (rank, event.what, event.number)
    assert all(sum(event.what == "write" for event in log.events) == STEPS for log in logs)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "order"), [("exp", "awc"), ("ring", "atc")])
def test_every_step_of_real_workers_is_that_of_the_formula(
    shards: Shards, graph: str, order: str
) -> None:
    mode = f"dpsgd(graph={graph}, order={order})"
    found = shards.run(train, mode, new_job(), num_workers=NUM)
    x = np.tile(START.astype(np.float64), (NUM, 1))
    momentum = np.zeros_like(x)
    for step, models in zip(range(STEPS), zip(*found, strict=True), strict=True):
        momentum = MOMENTUM * momentum + CURVATURE * (x - TARGET) + DECAY * x
        mixing = np.zeros((NUM, NUM))
        for taker, giver, weight in graph_of(graph)(list(range(NUM)), step):
            mixing[taker, giver] += weight
        mixing += np.diag(1 - mixing.sum(axis=1))
        moved = x - LR * momentum
        x = mixing @ moved if order == "atc" else mixing @ x - LR * momentum
        for rank, model in enumerate(models):
            limit = 1e-6 * np.abs(x[rank]).max()
            assert np.abs(model - x[rank]).max() <= limit, (step, rank)
    assert all(not np.array_equal(*pair) for pair in itertools.pairwise(found[0]))
