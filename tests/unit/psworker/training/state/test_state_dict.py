"""The table's state in torch's format, from shards whose arrays the test makes up."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pscore.errors import ConfigError
from pscore.optimizers import from_torch
from pscore.partition import make_layout
from pscore.rules.ssgd import SSGD
from pscore.types import Role
from psworker.connection.membership.taking_part import PROCESSES_MAX
from psworker.group.worker_group import WorkerGroup
from psworker.model.flat import FlatModel, describe
from psworker.replica.ports import PullBuffer
from psworker.training.local_steps.local_step import LocalStep
from psworker.training.parts import Parts
from psworker.training.state.state_dict import read_state, restore, torch_state
from psworker.training.table import GlobalState, TrainingTable


class FakeShards:
    """Stands in for exchange, replica and session: state array n holds 10 n + its position."""

    def __init__(self, layout: Any, num_state: int, counts: Sequence[int]) -> None:
        self.layout, self.num_state, self.counts = layout, num_state, counts
        self.step, self.own, self.num_workers = 4, range(len(layout.slices)), 1
        self.process_rank, self.lowest = 0, 0
        self.passed = SimpleNamespace(at_start=False)
        self.rule, self.spec = SSGD(), SimpleNamespace(compressor="none")
        self.session, self.clocks = self, SimpleNamespace(num_fragments=1)
        self.log: list[str] = []
        self.loads: list[tuple[Role, list[np.ndarray], list[int], int]] = []

    def flush(self) -> None:
        self.log.append("flush")

    def run(self, waits: Iterable[int]) -> None:
        list(waits)

    def settle(self) -> Iterator[int]:
        self.log.append("settle")
        return iter(())

    def fetch(self, min_version: int, push_pull: Any) -> Iterator[int]:
        self.log.append("fetch")
        return iter(())

    def barrier(self, name: str, *, holds: bool = False) -> None:
        self.log.append("barrier")

    def agree(self, name: str, value: float, *, holds: bool = False) -> float:
        """Returns the largest value of all processes."""
        self.log.append("agree")
        return max(value, PROCESSES_MAX - self.lowest)

    def meet_or_pass(
        self, name: str, value: float, *, holds: bool = False
    ) -> tuple[list[str], float]:
        """Returns the largest value; or where the others wait for this worker, which comes late."""
        self.log.append("meet")
        if self.passed.at_start:
            return ["model"], 0.0
        return [], max(value, PROCESSES_MAX - self.lowest)

    def peek(
        self, pull_buffers: Mapping[int, PullBuffer], push_pull: Any, *, with_state: bool
    ) -> Iterator[int]:
        assert with_state
        for spec, pull_buffer in zip(self.layout.slices, pull_buffers.values(), strict=True):
            for number, array in enumerate(pull_buffer.state):
                values = torch.arange(float(spec.start), float(spec.stop)) / 1000
                array.copy_(10 * number + values)
            pull_buffer.counts = np.array([self.counts[s.tensor] for s in spec.segments], np.int64)
        return iter(())

    def load(
        self, index: int, role: Role, arrays: list[np.ndarray], counts: list[int], step: int
    ) -> None:
        assert index == len(self.loads)
        self.loads.append((role, arrays, counts, step))
        if index == 0:
            self.log.append("load")

    def ask_origin(self) -> None:
        self.log.append("origin")

    def compressor_state(self) -> dict[str, np.ndarray]:
        return {"residual": np.full(self.layout.numel, 0.25, np.float32)}

    def load_compressor_state(self, state: dict[str, np.ndarray]) -> None:
        self.log += [f"{name} {flat[0]}" for name, flat in state.items()]


class Alone:
    """The session of the only worker."""

    group, rank, process_rank = WorkerGroup(), 0, 0


class FakeTable(TrainingTable):
    """A table without shards; the parameter groups are not in the model's order."""

    def __init__(self, make: Any, counts: Sequence[int]) -> None:
        self.model = torch.nn.ParameterDict(
            {"a": torch.zeros(2, 3), "b": torch.zeros(()), "frozen": torch.zeros(2)}
        )
        self.model["frozen"].requires_grad_(False)
        groups = [
            {"params": [self.model["frozen"], self.model["b"]]},
            {"params": [self.model["a"]]},
        ]
        self.inner = make(groups)
        self.optimizer = from_torch(self.inner)[0]
        trained = [self.model["a"], self.model["b"]]
        specs = describe(list(zip("ab", trained, strict=True)), [1, 0])
        self.layout = layout = make_layout(specs, 2)
        self.flat = FlatModel(trained, layout)
        self.shards = FakeShards(layout, len(self.optimizer.state_names), counts)
        self.exchange = self.replica = cast(Any, self.shards)
        self.parts = Parts(layout, self.flat, self.replica, cast(Any, Alone))
        self.progress = cast(Any, self)
        self.local_step = LocalStep()
        self.make_step = lambda _: LocalStep()
        self.samples, self.seen = 2.0, 8.0

    def behind(self, *, at_round: bool) -> tuple[int, float]:
        assert not at_round
        return self.replica.step, self.seen

    def locate(self, former: int, seen: float) -> None:
        assert self.shards.log[-2:] == ["origin", "fetch"]
        self.shards.step, self.seen = former, seen

    @property
    def loaded(self) -> list[tuple[Role, list[np.ndarray], list[int]]]:
        """Returns what was uploaded, its slices put together again."""
        if not self.shards.loads:
            return []
        layout = self.flat.layout
        arrays = [np.zeros(layout.numel, np.float32) for _ in self.optimizer.state_names]
        counts = [0] * len(layout.tensors)
        for index, (_, (_, *state), steps, step) in enumerate(self.shards.loads):
            assert step == 4
            spec = layout.slices[index]
            for array, part in zip(arrays, state, strict=True):
                array[spec.start : spec.stop] = part
            for segment, count in zip(spec.segments, steps, strict=True):
                counts[segment.tensor] = count
        return [(self.shards.loads[0][0], arrays, counts)]

    def show_weights(self) -> None:
        self.shards.log.append("show")


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def plain(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.1)


def nadam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups, lr=0.1)


def adagrad(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=0.1)


def rmsprop(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=0.1, centered=True, momentum=0.5)


def amsgrad(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1, amsgrad=True)


def state_of(table: FakeTable) -> dict[str, Any]:
    plain = dict(table.inner.state_dict())
    recovery = cast(Any, SimpleNamespace(peek=table.peek))
    return torch_state(table, recovery, table.inner.param_groups, plain, None)


def test_state_stands_under_torchs_numbers_and_names() -> None:
    """torch counts through the groups: frozen is 0, b is 1, a is 2."""
    table = FakeTable(adam, counts=[7, 3])
    state = state_of(table)["state"]
    assert sorted(state) == [1, 2]
    assert sorted(state[2]) == ["exp_avg", "exp_avg_sq", "step"]
    assert (state[2]["step"].item(), state[1]["step"].item()) == (7.0, 3.0)
    start = table.flat.layout.offsets[0]
    expected = (torch.arange(6.0) + start).view(2, 3) / 1000
    torch.testing.assert_close(state[2]["exp_avg"], expected)
    torch.testing.assert_close(state[2]["exp_avg_sq"], expected + 10)
    assert state[1]["exp_avg"].shape == ()
    table.inner.load_state_dict({key: state_of(table)[key] for key in ("state", "param_groups")})


def test_a_parameter_without_a_step_has_no_state() -> None:
    assert sorted(state_of(FakeTable(sgd, counts=[5, 0]))["state"]) == [2]


def test_entries_of_paceline_are_kept_apart() -> None:
    own = state_of(FakeTable(sgd, counts=[5, 0]))["paceline"]
    assert (own["step"], own["samples_seen"], own["compression"]) == (4, 8.0, "none")
    assert own["mode"].startswith("ssgd")
    assert own["counts"].tolist() == [5, 0]
    assert own["compressor_state"]["residual"].unique().tolist() == [0.25]


def load(table: FakeTable, state: dict[str, Any]) -> bool:
    loaded = read_state(table, table.inner.param_groups, state)
    table.inner.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    return restore(table, loaded, [])


@pytest.mark.parametrize("make", [sgd, adam])
def test_rank_0_loads_a_saved_state_between_barriers(make: Any) -> None:
    saved = state_of(FakeTable(make, counts=[7, 3]))
    table = FakeTable(make, counts=[0, 0])
    table.shards.step = 0
    load(table, saved)
    ((role, arrays, counts),) = table.loaded
    assert role is Role.STATE
    assert counts == [7, 3]
    for number, array in enumerate(arrays):
        for index in range(2):
            values = table.flat.state_view(array, index).flatten()
            start = table.flat.layout.offsets[index]
            torch.testing.assert_close(
                values, 10.0 * number + (torch.arange(float(len(values))) + start) / 1000
            )
    assert table.replica.step == 4
    log = [entry for entry in table.shards.log if not entry.startswith("flush")]
    assert log[:5] == ["settle", "meet", "load", "agree", "barrier"]
    assert log[5:] == ["origin", "fetch", "show", "residual 0.25"]


def test_other_workers_only_wait_and_fetch() -> None:
    saved = state_of(FakeTable(sgd, counts=[7, 3]))
    table = FakeTable(sgd, counts=[0, 0])
    table.shards.process_rank = 1
    load(table, saved)
    assert table.loaded == []
    assert [table.shards.log.count(wait) for wait in ("meet", "agree", "barrier")] == [1, 1, 1]


def test_a_worker_that_comes_late_loads_nothing_where_the_others_wait_for_it() -> None:
    saved = state_of(FakeTable(sgd, counts=[7, 3]))
    table = FakeTable(sgd, counts=[0, 0])
    table.shards.passed.at_start = True
    assert not load(table, saved)
    assert (table.loaded, table.shards.log) == ([], ["meet"])


def test_the_lowest_rank_loads_where_rank_0_has_left() -> None:
    saved = state_of(FakeTable(sgd, counts=[7, 3]))
    table = FakeTable(sgd, counts=[0, 0])
    table.shards.process_rank = table.shards.lowest = 2
    load(table, saved)
    assert [counts for _, _, counts in table.loaded] == [[7, 3]]


def test_a_plain_optimizers_state_counts_its_own_steps() -> None:
    table = FakeTable(adam, counts=[0, 0])
    other = FakeTable(adam, counts=[0, 0])
    for name in "ab":
        other.model[name].grad = torch.ones_like(other.model[name])
    other.inner.step()
    other.model["a"].grad = None
    other.inner.step()
    load(table, other.inner.state_dict())
    ((_, arrays, counts),) = table.loaded
    assert counts == [1, 2]
    torch.testing.assert_close(
        table.flat.state_view(arrays[0], 0), torch.full((2, 3), 0.1), rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize("make", [adam, nadam, adagrad, rmsprop, amsgrad])
def test_torchs_state_is_the_same_after_a_way_through_the_shards(make: Any) -> None:
    """With numbers that torch keeps once for each parameter, as NAdam's product."""
    table, other = (FakeTable(make, counts=[2, 2]) for _ in range(2))
    for _ in range(2):
        for name in "ab":
            other.model[name].grad = torch.randn_like(other.model[name])
        other.inner.step()
    saved = other.inner.state_dict()
    load(table, saved)
    ((_, arrays, _),) = table.loaded

    def peek(num_state: int) -> GlobalState:
        counts = [np.array([2] * len(spec.segments), np.int64) for spec in table.flat.layout.slices]
        state = [torch.from_numpy(array) for array in arrays]
        return GlobalState(weights=table.flat.weights, state=state, counts=counts)

    recovery = cast(Any, SimpleNamespace(peek=peek))
    plain = dict(table.inner.state_dict())
    found = torch_state(table, recovery, table.inner.param_groups, plain, None)["state"]
    assert sorted(found) == [1, 2]
    for number in found:
        entry = saved["state"][number]
        assert found[number].keys() == entry.keys()
        for name, value in entry.items():
            torch.testing.assert_close(found[number][name], value, rtol=0.0, atol=0.0)


def test_a_momentum_that_is_absent_is_zero() -> None:
    table = FakeTable(sgd, counts=[0, 0])
    state = state_of(FakeTable(sgd, counts=[7, 3]))
    state["state"][2]["momentum_buffer"] = None
    load(table, state)
    assert not table.flat.state_view(table.loaded[0][1][0], 0).any()


def test_the_hyper_parameters_are_restored() -> None:
    saved = state_of(FakeTable(sgd, counts=[7, 3]))
    saved["param_groups"][1]["lr"] = 0.025
    table = FakeTable(sgd, counts=[0, 0])
    load(table, saved)
    assert [group["lr"] for group in table.inner.param_groups] == [0.1, 0.025]


def test_the_state_of_another_model_is_refused_by_tensor() -> None:
    state = state_of(FakeTable(sgd, counts=[7, 3]))
    state["state"][2]["momentum_buffer"] = torch.zeros(3, 2)
    message = r"momentum_buffer of 'a' has shape \[3, 2\] in the state, \[2, 3\] in the model"
    with pytest.raises(ConfigError, match=message):
        load(FakeTable(sgd, counts=[0, 0]), state)
    state = state_of(FakeTable(sgd, counts=[7, 3]))
    state["paceline"]["compressor_state"]["residual"] = torch.zeros(5)
    with pytest.raises(ConfigError, match=r"residual of the compressor has shape \[5\] in the"):
        load(FakeTable(sgd, counts=[0, 0]), state)


def test_an_optimizer_without_state_has_none() -> None:
    assert set(state_of(FakeTable(plain, counts=[7, 3]))) == {"state", "param_groups", "paceline"}
