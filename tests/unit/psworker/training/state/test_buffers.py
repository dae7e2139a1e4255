"""Which buffers evaluation sees, with tables that are kept in this process."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError
from pscore.rules import parse_mode
from pscore.table_spec import TableSpec
from pscore.types import Push, Role
from psworker.replica.ports import PullBuffer
from psworker.training.state import buffers as module
from psworker.training.state.buffers import Buffers, require_policy

Posts = dict[str, dict[int, np.ndarray]]  # By table, then slice.


class FakeSession:
    """Two workers and two shards; tables are shared by all who have the same `posts`."""

    def __init__(self, rank: int, posts: Posts) -> None:
        self.rank, self.num_workers, self.links = rank, 2, [None, None]
        self.min_workers, self.process_rank, self.num_processes = 0, rank, 2
        self.posts = posts
        self.counted: set[int] = set()  # Steps of this worker's posts, also of former lives.


class FakeTable:
    """A table whose values are in its session's `posts`."""

    def __init__(self, session: FakeSession, spec: TableSpec) -> None:
        self.owner = session
        self.layout = spec.layout()
        self.values = session.posts.setdefault(spec.name, {})
        self.busy = False
        self.steps: list[int] = []
        self.restarts = 0
        self.num_flushes = 0
        self.refills: Any = SimpleNamespace(start=lambda held: None)  # No shard is lost here.

    def load(self, index: int, role: Role, arrays: list[np.ndarray], counts: list[int]) -> None:
        assert role is Role.WEIGHTS
        self.values.setdefault(index, arrays[0].copy())  # Later ones are not taken.

    def push(self, index: int, push: Push, grad: torch.Tensor, *, compress: bool) -> None:
        assert not compress
        self.steps.append(push.step)
        if push.step not in self.owner.counted:
            self.values[index] = grad.numpy().copy()

    def pull(
        self, index: int, clock: int, min_version: int, pull_buffer: PullBuffer, *, with_state: bool
    ) -> None:
        assert pull_buffer.is_look
        pull_buffer.weights.copy_(torch.from_numpy(self.values[index]))
        pull_buffer.clock = len(self.owner.counted)

    def run(self, waits: Iterable[int]) -> None:
        list(waits)

    def flush(self) -> None:
        self.num_flushes += 1

    def is_busy(self) -> bool:
        return self.busy

    def restart(self) -> None:
        self.restarts += 1


@pytest.fixture(autouse=True)
def fake_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Exchange", FakeTable)


def make_model(value: float) -> torch.nn.BatchNorm1d:
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("scale", torch.tensor(value))
    model.register_buffer("none", torch.zeros(0))
    fill(model, value)
    return model


def fill(model: torch.nn.BatchNorm1d, value: float) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(value)


def seen(model: torch.nn.BatchNorm1d) -> float:
    """Returns the value that all float buffers have."""
    assert model.running_mean is not None
    assert model.running_var is not None
    scale = model.get_buffer("scale")
    values = {*model.running_mean.tolist(), *model.running_var.tolist(), scale.item()}
    assert len(values) == 1
    value: float = values.pop()
    return value


def make_two(policy: str) -> list[tuple[torch.nn.BatchNorm1d, Buffers]]:
    """Returns models and buffers of workers 0 and 1, filled with 10 and 20."""
    posts: Posts = {}
    workers = []
    for rank in range(2):
        model = make_model(10.0 * (rank + 1))
        session = FakeSession(rank, posts)
        workers.append((model, Buffers(model, policy, session)))  # type: ignore[arg-type]
    return workers


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("rank0", [11.0, 11.0]), ("mean", [16.0, 16.0]), ("local", [11.0, 21.0])],
)
def test_evaluation_sees_what_the_policy_says_and_training_its_own(
    policy: str, expected: list[float]
) -> None:
    workers = make_two(policy)
    for model, buffers in workers:
        fill(model, seen(model) + 1.0)
        buffers.post(samples=1.0)
    for rank, (model, buffers) in enumerate(workers):
        with buffers.shared():
            assert seen(model) == expected[rank]
        assert seen(model) == 10.0 * (rank + 1) + 1.0


def test_evaluation_at_the_owner_posts_its_newest() -> None:
    (first, of_first), (second, of_second) = make_two("rank0")
    fill(first, 5.0)
    with of_second.shared():
        assert seen(second) == 10.0  # The values at the start.
    with of_first.shared():
        assert seen(first) == 5.0
    with of_second.shared():
        assert seen(second) == 5.0


def test_a_post_does_not_wait_for_the_former_one_and_posts_are_numbered() -> None:
    model, buffers = make_two("rank0")[0]
    table = buffers._tables[0]
    assert isinstance(table, FakeTable)
    flushes = table.num_flushes
    buffers.post(samples=1.0)
    table.busy = True
    buffers.post(samples=1.0)
    table.busy = False
    buffers.post(samples=0.0)  # A step without data.
    buffers.post(samples=1.0)
    assert table.steps == [0, 1]
    assert table.num_flushes == flushes
    assert seen(model) == 10.0


def test_own_buffers_come_back_when_evaluation_fails() -> None:
    _, (model, buffers) = make_two("rank0")

    def evaluate() -> None:
        with buffers.shared():
            assert seen(model) == 10.0
            raise RuntimeError("in evaluation")

    with pytest.raises(RuntimeError, match="in evaluation"):
        evaluate()
    assert seen(model) == 20.0


def test_integer_buffers_are_ones_own() -> None:
    (first, _), (second, of_second) = make_two("rank0")
    assert first.num_batches_tracked is not None
    assert second.num_batches_tracked is not None
    first.num_batches_tracked.fill_(5)
    second.num_batches_tracked.fill_(7)
    with of_second.shared():
        assert second.num_batches_tracked.item() == 7


@pytest.mark.parametrize(("model", "policy"), [(None, "rank0"), (torch.nn.Linear(2, 2), "mean")])
def test_without_buffers_there_is_no_table(model: torch.nn.Module | None, policy: str) -> None:
    posts: Posts = {}
    buffers = Buffers(model, policy, FakeSession(0, posts))  # type: ignore[arg-type]
    buffers.post(samples=1.0)
    with buffers.shared():
        pass
    assert posts == {}


@pytest.mark.parametrize("policy", ["mean", "local"])
def test_a_policy_without_a_model_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"buffers='{policy}' has no effect without model="):
        require_policy(None, policy)


def test_only_the_owner_of_a_table_declares_values() -> None:
    posts: Posts = {}
    Buffers(make_model(1.0), "rank0", FakeSession(1, posts))  # type: ignore[arg-type]
    assert posts == {"buffers.0": {}}


def test_a_worker_that_comes_back_declares_its_tables_again() -> None:
    _, buffers = make_two("mean")[0]
    buffers.restart()
    tables = [table for table in buffers._tables.values() if isinstance(table, FakeTable)]
    assert [table.restarts for table in tables] == [1, 1]


def test_another_policy_is_refused_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match="buffers is 'all', must be one of rank0, mean, local"):
        require_policy(None, "all")


def test_a_mean_over_workers_that_come_and_go_is_refused() -> None:
    session = FakeSession(0, {})
    session.min_workers = 1
    with pytest.raises(
        ConfigError, match="buffers is 'mean', but workers of this job may join and leave"
    ):
        Buffers(torch.nn.BatchNorm1d(3), "mean", session)  # type: ignore[arg-type]


def test_a_worker_that_is_started_again_posts_behind_its_former_self() -> None:
    """Its first posts would be duplicates, and evaluation would see what is old."""
    posts: Posts = {}
    for life, model in enumerate((make_model(10.0), make_model(20.0))):
        session = FakeSession(0, posts)
        session.counted = set(range(5 * life))
        buffers = Buffers(model, "rank0", session)  # type: ignore[arg-type]
        fill(model, 11.0 + life)
        buffers.post(1.0)
    assert {value[0] for table in posts.values() for value in table.values()} == {12.0}


@pytest.mark.parametrize(
    ("mode", "policy", "warns"),
    [
        ("dpsgd", "rank0", True),
        ("adpsgd", "rank0", True),
        ("adpsgd", "mean", False),
        ("allreduce", "rank0", False),  # All models are alike.
        ("ssgd", "rank0", False),
    ],
)
def test_statistics_of_rank_0_do_not_describe_the_mean_of_unlike_models(
    monkeypatch: pytest.MonkeyPatch, mode: str, policy: str, warns: bool
) -> None:
    monkeypatch.setattr(module, "Exchange", FakeTable)
    session: Any = FakeSession(0, {})
    found = Buffers(torch.nn.BatchNorm1d(2), policy, session).caution(parse_mode(mode))
    assert ("the BatchNorm statistics of rank 0: pass buffers='mean'" in found) is warns
    assert Buffers(torch.nn.Linear(2, 1), "rank0", session).caution(parse_mode(mode)) == ""
