"""A worker's messages and waits at each step, with a port that only records."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from pscore.errors import GradientError
from pscore.optimizers.base import Optimizer
from pscore.optimizers.sgd import SGD
from pscore.partition import Layout, make_layout
from pscore.rules import parse_mode
from pscore.types import Origin, Push, Role, TensorSpec
from psworker.model.copies import CopyEnd
from psworker.replica.ports import PullBuffer
from psworker.replica.pull_buffers import PullBuffers
from psworker.replica.pulls import Waits
from psworker.replica.replica import Replica

NUMEL = 5000  # Two slices of at least 4,096 elements: 0 holds the back of the model.


@dataclass
class RecordingPort:
    """An push_pull whose pulls land when the test says so, all elements with one value."""

    pushes: list[tuple[int, Push, float]] = field(default_factory=list)
    pulls: list[tuple[int, int, int, bool]] = field(default_factory=list)
    pull_buffers: dict[int, PullBuffer] = field(default_factory=dict)
    waited: list[int] = field(default_factory=list)
    maps: bool = False

    def push(
        self, index: int, push: Push, grad: torch.Tensor, *, compress: bool, flush: bool = False
    ) -> None:
        self.pushes.append((index, push, grad[0].item()))

    def pull(
        self, index: int, clock: int, min_version: int, pull_buffer: PullBuffer, *, with_state: bool
    ) -> None:
        self.pulls.append((index, clock, min_version, with_state))
        self.pull_buffers[index] = pull_buffer

    def maps_weights(self, index: int) -> bool:
        return self.maps

    def land(
        self, index: int, weights: float, version: int, state: float | None = None, clock: int = 0
    ) -> None:
        pull_buffer = self.pull_buffers[index]
        pull_buffer.weights.fill_(weights)
        pull_buffer.counts = None if state is None else np.array([version], np.int64)
        for array in pull_buffer.state:
            array.fill_(state or 0.0)
        pull_buffer.version, pull_buffer.clock = version, clock

    def run(self, waits: Waits, weights: float, version: int, state: float | None = None) -> None:
        """Lands every pull that is waited for."""
        for index in waits:
            self.waited.append(index)
            self.land(index, weights, version, state)

    def taken(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the slices pushed, pulled and waited for since the last time."""
        told = [index for index, _, _ in self.pushes], [pull[0] for pull in self.pulls], self.waited
        self.pushes, self.pulls, self.waited = [], [], []
        return told


def make_layout_of_two() -> Layout:
    layout = make_layout([TensorSpec(name="weight", shape=(NUMEL,), dtype="float32")], 2)
    assert len(layout.slices) == 2
    return layout


def make(mode: str, optimizer: Optimizer | None = None) -> tuple[Replica, RecordingPort]:
    """Returns a replica with weights 1 at version 0, learning rate 0.5 and momentum 0.5."""
    layout, port = make_layout_of_two(), RecordingPort()
    optimizer = optimizer or SGD()
    weights = torch.zeros(layout.numel)
    replica = Replica(layout, parse_mode(mode), optimizer, 1, weights, rank=3)
    row = {"lr": 0.5, "momentum": 0.5}
    hyper = np.array([[row.get(name, 0.0) for name in optimizer.hyper_names]])
    for part in replica.parts:
        part.hyper = hyper
    port.run(replica.fetch(0, port), 1.0, 0, state=0.0)
    port.taken()
    return replica, port


def grads(replica: Replica, value: float) -> list[torch.Tensor]:
    return [torch.full_like(part.weights, value) for part in replica.parts]


def push_all(
    replica: Replica,
    port: RecordingPort,
    values: Sequence[torch.Tensor],
    *,
    in_backward: bool = False,
) -> None:
    for index in replica.front_first():
        replica.push(
            index, values[index], present=-1, samples=2.0, push_pull=port, in_backward=in_backward
        )


def step(replica: Replica, port: RecordingPort, value: float, weights: float, version: int) -> None:
    """Makes one step whose pulls, if waited for, bring `weights` and the state 0."""
    own = grads(replica, value)
    for index in replica.front_first():
        port.run(replica.land(index), weights, version, 0.0)
    push_all(replica, port, own)
    port.run(replica.finish(own, port), weights, version, 0.0)


def test_the_first_fetch_brings_the_weights_of_all_slices() -> None:
    replica, _ = make("ssgd")
    assert torch.equal(replica.weights[:NUMEL], torch.ones(NUMEL))
    assert [part.version for part in replica.parts] == [0, 0]


def test_a_push_names_worker_step_version_and_weight() -> None:
    replica, port = make("ssgd")
    push_all(replica, port, grads(replica, 7.0))
    assert [(index, value) for index, _, value in port.pushes] == [(1, 7.0), (0, 7.0)]
    push = port.pushes[0][1]
    assert (push.worker, push.step, push.base_version, push.samples) == (3, 0, 0, 2.0)
    assert push.role is Role.GRADIENT
    assert push.hyper is replica.parts[1].hyper


def test_ssgd_waits_for_the_version_of_its_step_front_first() -> None:
    replica, port = make("ssgd")
    for number in range(3):
        step(replica, port, 1.0, weights=10.0 + number, version=number + 1)
        assert [pull[:3] for pull in port.pulls] == [
            (1, number + 1, number + 1),
            (0, number + 1, number + 1),
        ]
        assert [push.step for _, push, _ in port.pushes] == [number, number]
        assert [push.base_version for _, push, _ in port.pushes] == [number, number]
        assert port.taken() == ([1, 0], [1, 0], [1, 0])
        assert replica.weights[0].item() == 10.0 + number
    assert replica.step == 3
    assert replica.clocks.counts == [3, 3]


@pytest.mark.parametrize("maps", [False, True], ids=["beside", "late"])
def test_ssgd_asks_with_its_pushes_and_backward_keeps_its_weights(maps: bool) -> None:
    """Over a network the answer lands beside the weights; in shared memory it lands later."""
    replica, port = make("ssgd")
    port.maps = maps
    own = grads(replica, 1.0)
    push_all(replica, port, own, in_backward=True)
    assert [pull[:3] for pull in port.pulls] == [(1, 1, 1), (0, 1, 1)]
    for index, pull_buffer in port.pull_buffers.items():
        is_direct = pull_buffer.weights.data_ptr() == replica.parts[index].weights.data_ptr()
        assert (pull_buffer.copy_on_wait, is_direct) == (maps, maps)
    if not maps:
        port.land(0, 5.0, version=1)
        assert replica.weights[:NUMEL].tolist() == [1.0] * NUMEL
    port.run(replica.finish(own, port), 6.0, 1)
    assert sorted(port.waited) == ([0, 1] if maps else [1])
    assert len(port.pulls) == 2
    assert replica.weights[0].item() == (6.0 if maps else 5.0)
    assert replica.weights[NUMEL - 1].item() == 6.0


def test_an_asynchronous_mode_asks_when_backward_is_over_for_weights_that_are_new() -> None:
    replica, port = make("asgd")
    own = grads(replica, 1.0)
    push_all(replica, port, own, in_backward=True)
    assert port.pulls == []
    port.run(replica.finish(own, port), 4.0, 9)
    assert [pull[:3] for pull in port.pulls] == [(1, 1, 0), (0, 1, 0)]


def test_a_pull_is_not_asked_for_before_the_one_before_it_was_used() -> None:
    """A delay of one step: the pull that has landed is the base of this step's local update."""
    replica, port = make("od(warmup=0, local=sgd)")
    own = grads(replica, 1.0)
    push_all(replica, port, own, in_backward=True)
    assert [pull[2] for pull in port.pulls] == [1, 1]
    port.run(replica.finish(own, port), 0.0, 0)
    assert port.waited == []
    port.run(replica.land(1), 8.0, 1)
    port.run(replica.land(0), 8.0, 1)
    port.taken()
    push_all(replica, port, own, in_backward=True)
    assert port.pulls == []
    port.run(replica.finish(own, port), 0.0, 0)
    assert [pull[2] for pull in port.pulls] == [2, 2]
    assert replica.weights[0].item() == 7.5


def test_a_slice_is_pulled_again_while_others_still_wait_for_earlier_pulls() -> None:
    replica, port = make("od(warmup=0, local=sgd)")
    own = grads(replica, 1.0)
    push_all(replica, port, own)
    port.run(replica.finish(own, port), 0.0, 0)
    port.taken()
    port.run(replica.land(1), 8.0, 1)
    replica.push(1, own[1], -1, 1.0, port)
    replica.end_slice(1, own[1], port)
    assert replica.is_ending
    assert [pull[:3] for pull in port.pulls] == [(1, 2, 2)]
    assert (replica.weights[NUMEL - 1].item(), replica.weights[0].item()) == (7.5, 0.5)
    port.run(replica.land(0), 8.0, 1)
    replica.push(0, own[0], -1, 1.0, port)
    assert [push.step for _, push, _ in port.pushes] == [1, 1]
    port.run(replica.finish(own, port), 0.0, 0)
    assert [pull[:3] for pull in port.pulls] == [(1, 2, 2), (0, 2, 2)]
    assert (replica.step, replica.clocks.counts, replica.is_ending) == (2, [2, 2], False)
    assert replica.weights[:NUMEL].tolist() == [7.5] * NUMEL


def test_pushes_of_one_step_have_one_number_though_steps_have_closed_without_this_worker() -> None:
    replica, port = make("od(warmup=0, local=sgd)")
    own = grads(replica, 1.0)
    step(replica, port, 1.0, 0.0, 0)
    port.taken()
    for index, version in ((1, 5), (0, 4)):
        port.run(replica.land(index), 8.0, version)
        replica.push(index, own[index], -1, 1.0, port)
        replica.end_slice(index, own[index], port)
    assert [push.step for _, push, _ in port.pushes] == [1, 1]
    port.run(replica.finish(own, port), 0.0, 0)
    assert replica.next_push == 4


@pytest.mark.parametrize("mode", ["ssgd", "asgd"])
def test_a_mode_that_waits_for_its_own_pulls_ends_no_slice_before_the_others(mode: str) -> None:
    replica, port = make(mode)
    own = grads(replica, 1.0)
    push_all(replica, port, own, in_backward=True)
    before = len(port.pulls)
    replica.end_slice(1, own[1], port)
    assert len(port.pulls) == before
    assert not replica.is_ending


@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=1, warmup=0, local=sgd)"])
def test_a_pull_that_is_given_up_changes_nothing_when_it_lands(mode: str) -> None:
    replica, port = make(mode)
    own = grads(replica, 1.0)
    push_all(replica, port, own, in_backward=True)
    given_up = port.pull_buffers[1]
    replica.abandon()
    port.taken()
    waits = replica.finish(own, port)
    if mode == "ssgd":
        assert next(waits) == 1
        port.land(1, 3.0, version=1)
        given_up.weights.fill_(9.0)
    port.run(waits, 3.0, version=1)
    assert [pull[2] for pull in port.pulls] == [1, 1]
    port.run(replica.settle(), 3.0, version=1)
    given_up.weights.fill_(9.0)
    assert replica.weights.tolist() == [3.0] * len(replica.weights)


def test_a_fetch_in_the_middle_of_a_step_does_not_wait_for_the_step() -> None:
    """Others may wait for the slices of it that were not pushed."""
    replica, port = make("ssgd")
    replica.push(1, grads(replica, 1.0)[1], -1, 1.0, port, in_backward=True)
    port.taken()
    for index in replica.fetch(None, port):
        assert port.pulls, f"slice {index} is waited for, and was not asked for again"
        port.land(index, 2.0, version=0)
    assert [pull[1:3] for pull in port.pulls] == [(0, 0), (0, 0)]


def test_asgd_waits_for_its_own_push_in_any_version() -> None:
    replica, port = make("asgd")
    step(replica, port, 1.0, weights=4.0, version=9)
    assert [pull[1:3] for pull in port.pulls] == [(1, 0), (1, 0)]
    assert port.taken()[2] == [1, 0]
    assert replica.parts[0].version == 9


def test_ssd_pulls_at_each_kth_step_and_takes_it_one_step_later() -> None:
    """k = 2, plain local steps w -= 0.5 g: the pull of step 1 lands before the push of step 2."""
    replica, port = make("ssd(steps=2, warmup=0, local=sgd)")
    step(replica, port, 1.0, 0.0, 0)
    assert port.taken() == ([1, 0], [], [])
    assert replica.weights[0].item() == 0.5
    step(replica, port, 1.0, 0.0, 0)
    assert [pull[1:3] for pull in port.pulls] == [(2, 2), (2, 2)]
    pushed, pulled, waited = port.taken()
    assert (sorted(pushed), sorted(pulled), waited) == ([0, 1], [0, 1], [])
    assert replica.weights[0].item() == 0.0  # 0.5 - 0.5: the pull is still under way.
    step(replica, port, 1.0, weights=8.0, version=2)
    pushed, pulled, waited = port.taken()
    assert (sorted(pushed), pulled, sorted(waited)) == ([0, 1], [], [0, 1])
    assert replica.weights[0].item() == 7.5


@pytest.mark.parametrize("maps", [False, True], ids=["beside", "late"])
def test_the_secant_takes_a_pull_where_its_own_direction_lay_with_the_same_bits(maps: bool) -> None:
    """k = 2: in shared memory the pull of step 1 lands on G_sync once that step's update is made.

    W = 1, 8: G_sync = (1 - 8) / (2 * 0.5) = -7; w = 8 - 0.5 * (2 * 1 + 0.5 * -7).
    """
    replica, port = make("ssd(steps=2, warmup=0, local=secant)")
    port.maps = maps
    sync = [part.state["grad_sync"] for part in replica.parts]
    step(replica, port, 1.0, 0.0, 0)
    push_all(replica, port, grads(replica, 1.0), in_backward=True)
    for index, pull_buffer in port.pull_buffers.items():
        is_sync = pull_buffer.weights.data_ptr() == sync[index].data_ptr()
        assert (pull_buffer.copy_on_wait, is_sync) == (maps, maps)
    port.run(replica.finish(grads(replica, 1.0), port), 0.0, 0)
    assert (port.waited, replica.weights[0].item()) == ([], -1.0)
    step(replica, port, 1.0, weights=8.0, version=2)
    assert sync[0][0].item() == -7.0
    assert replica.weights[0].item() == 8.75


def test_a_pull_that_may_bring_the_same_version_leaves_the_direction_of_the_last_one() -> None:
    replica, port = make("ssd(steps=1, warmup=0, local=secant)")
    step(replica, port, 1.0, 0.0, 0)
    step(replica, port, 1.0, 0.5, 1)
    port.run(replica.settle(), 0.25, 2)
    sync = replica.parts[0].state["grad_sync"]
    kept = sync.clone()
    port.run(replica.fetch(0, port), 0.25, 2)
    assert torch.equal(sync, kept)
    assert kept[0].item() == 0.5


def test_a_slice_is_not_pushed_while_its_pull_is_under_way() -> None:
    replica, port = make("ssd(steps=1, warmup=0, local=sgd)")
    step(replica, port, 1.0, 0.0, 0)
    own = grads(replica, 1.0)
    with pytest.raises(AssertionError):
        replica.push(1, own[1], present=-1, samples=1.0, push_pull=port)
    port.land(1, 5.0, version=1)
    assert list(replica.land(1)) == []
    replica.push(1, own[1], present=-1, samples=1.0, push_pull=port)
    assert port.pushes[-1][1].base_version == 0  # The gradient is of the weights before.


@pytest.mark.parametrize(("form", "asked"), [("exact", [True, True]), ("kept", [True, False])])
def test_mirror_asks_for_the_state_at_the_end_of_the_warm_up_and_then_as_its_form_says(
    form: str, asked: list[bool]
) -> None:
    replica, port = make(f"ssd(steps=1, warmup=2, local=mirror, mirror={form})")
    with_state = []
    for number in range(4):
        step(replica, port, 0.0, weights=1.0, version=number + 1)
        with_state.append({pull[3] for pull in port.pulls})
        port.taken()
    assert with_state == [{False}, {asked[0]}, {asked[1]}, {asked[1]}]


def test_mirror_continues_with_the_momentum_that_was_pulled() -> None:
    """w = 8 and V = 4 pulled; V <- 0.5 * 4 + 1 = 3, w <- 8 - 0.5 * 3 = 6.5."""
    replica, port = make("ssd(steps=1, warmup=1, local=mirror)")
    push_all(replica, port, grads(replica, 1.0))
    port.run(replica.finish(grads(replica, 1.0), port), 8.0, 1, state=4.0)
    push_all(replica, port, grads(replica, 1.0))
    port.run(replica.finish(grads(replica, 1.0), port), 0.0, 0, state=0.0)
    assert replica.weights[:NUMEL].tolist() == [6.5] * NUMEL


@pytest.mark.parametrize("maps", [False, True], ids=["beside", "in place"])
def test_in_shared_memory_pulled_momentum_takes_the_place_of_the_own_one(maps: bool) -> None:
    """It is asked for after the local update, which still needs the own one; bits are the same."""
    replica, port = make("ssd(steps=1, warmup=0)")
    port.maps = maps
    own = grads(replica, 1.0)
    push_all(replica, port, own, in_backward=True)
    assert len(port.pulls) == (0 if maps else 2)
    port.run(replica.finish(own, port), 0.0, 0)
    assert sorted(pull[:3] for pull in port.pulls) == [(0, 1, 1), (1, 1, 1)]
    kept = [part.state["momentum_buffer"] for part in replica.parts]
    for index, pull_buffer in port.pull_buffers.items():
        assert (pull_buffer.state[0].data_ptr() == kept[index].data_ptr()) == maps
    step(replica, port, 1.0, weights=5.0, version=1)
    assert kept[0][0].item() == (0.5 * 0.0 + 1.0)  # The pulled one was 0.
    assert replica.weights[0].item() == 4.5


def peek(replica: Replica, port: RecordingPort, weights: float, version: int) -> list[PullBuffer]:
    """Returns what a look has seen."""
    seen = [
        PullBuffer(weights=torch.zeros_like(part.weights), state=[], is_look=True)
        for part in replica.parts
    ]
    port.run(replica.peek(dict(enumerate(seen)), port, with_state=False), weights, version)
    return seen


def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes replicas treat their weights as those of a GPU."""
    for module in ("local_weights", "pull_buffers"):
        monkeypatch.setattr(f"psworker.replica.{module}.is_on_device", lambda _: True)


def test_the_weights_of_a_gpu_are_those_that_had_landed_before_the_next_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_a_device(monkeypatch)
    replica, port = make("od(warmup=0, local=sgd)")
    step(replica, port, 1.0, 2.0, 1)  # Its pulls land in the next step.
    for index in replica.front_first():
        port.run(replica.land(index), 3.0, 1)
    for buffer in port.pull_buffers.values():
        buffer.weights.fill_(9.0)  # As if the next answer took the place of this one.
    own = grads(replica, 1.0)
    push_all(replica, port, own)
    port.run(replica.finish(own, port), 9.0, 2)
    assert torch.equal(replica.weights[:NUMEL], torch.full((NUMEL,), 2.5))


def test_the_next_pull_of_a_gpu_lands_beside_memory_that_a_copy_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_a_device(monkeypatch)
    replica, _ = make("ssgd")
    buffers, copy = PullBuffers(replica.parts, num_state=1), UnderWay()
    options = {"exact": False, "copy_on_wait": False, "begins": False}
    first = buffers.prepare(0, None, [], with_state=True, **options)
    taken = {first.weights.data_ptr(), first.state[0].data_ptr()}
    buffers.release(0, copy)
    second = buffers.prepare(0, None, [], with_state=True, **options)
    assert taken.isdisjoint({second.weights.data_ptr(), second.state[0].data_ptr()})
    copy.ends = True
    buffers.release(0, UnderWay())
    third = buffers.prepare(0, None, [], with_state=True, **options)
    assert taken == {third.weights.data_ptr(), third.state[0].data_ptr()}


class UnderWay(CopyEnd):
    """Copies that are over when the test says so."""

    ends = False

    def is_over(self) -> bool:
        return self.ends


def test_a_peek_brings_the_newest_and_leaves_all_else() -> None:
    replica, port = make("ssd(steps=2, warmup=0, local=sgd)")
    step(replica, port, 1.0, 0.0, 0)
    port.taken()
    seen = peek(replica, port, 6.0, 1)
    assert [pull[1:] for pull in port.pulls] == [(1, 1, False)] * 2
    assert [pull_buffer.weights[0].item() for pull_buffer in seen] == [6.0, 6.0]
    assert replica.weights[0].item() == 0.5
    assert replica.parts[0].version == 0
    step(replica, port, 1.0, 0.0, 0)
    assert replica.weights[0].item() == 0.0


def test_a_peek_at_a_pull_under_way_leaves_it_for_the_next_step() -> None:
    """A pull under way may be an estimate: it lands, and the look is a pull of its own."""
    replica, port = make("ssd(steps=1, warmup=0, local=sgd)")
    step(replica, port, 1.0, 0.0, 0)
    under_way = dict(port.pull_buffers)
    port.taken()
    for index in range(2):
        under_way[index].weights.fill_(6.0)
        under_way[index].version = 1
    seen = peek(replica, port, 7.0, 1)
    assert [pull[0] for pull in port.pulls] == [0, 1]
    assert [pull_buffer.weights[0].item() for pull_buffer in seen] == [7.0, 7.0]
    assert replica.weights[0].item() == 0.5
    step(replica, port, 1.0, 99.0, 99)  # Has nothing to wait for.
    assert replica.weights[0].item() == 5.5


def test_a_peek_waits_for_a_pull_under_way_before_it_asks() -> None:
    replica, port = make("ssd(steps=1, warmup=0, local=sgd)")
    step(replica, port, 1.0, 0.0, 0)
    port.taken()
    peek(replica, port, 6.0, 1)
    assert port.waited == [0, 1, 0, 1]
    step(replica, port, 1.0, 99.0, 99)
    assert replica.weights[0].item() == 5.5


def test_a_fetch_takes_what_is_under_way_and_then_the_newest() -> None:
    replica, port = make("ssd(steps=1, warmup=0, local=sgd)")
    step(replica, port, 1.0, 0.0, 0)
    port.taken()
    port.run(replica.fetch(None, port), 3.0, 1, state=0.0)
    assert {pull[1:] for pull in port.pulls} == {(1, 1, True)}
    assert sorted(port.waited) == [0, 0, 1, 1]
    assert replica.weights[0].item() == 3.0


def test_a_worker_that_was_late_continues_with_the_step_its_weights_are_for() -> None:
    replica, port = make("ssgd")
    step(replica, port, 1.0, weights=1.0, version=5)
    port.taken()
    push_all(replica, port, grads(replica, 1.0))
    assert {push.step for _, push, _ in port.pushes} == {5}


@pytest.mark.parametrize(
    ("mode", "clock", "step"), [("ssgd", 9, 35), ("asgd", 9, 35), ("local(steps=4)", 9, 48)]
)
def test_a_replica_is_at_the_step_that_its_pushes_stand_for(
    mode: str, clock: int, step: int
) -> None:
    """Counted from 4 pushes at step 30; a round that is open there ends at step 32."""
    replica, port = make(mode)
    replica.restart()
    for index in replica.fetch(0, port):
        port.land(index, 2.0, version=9, clock=clock)
    while replica.plan().inner and replica.num_inner < 2:
        list(replica.finish(grads(replica, 0.0), port))
    replica.locate(Origin(4, 30))
    assert replica.step == step + replica.num_inner


def test_a_worker_that_left_out_steps_is_where_the_others_are() -> None:
    replica, port = make("ssgd(backup=1)")
    step(replica, port, 1.0, weights=1.0, version=5)
    replica.locate(Origin())
    assert replica.step == 5


def test_after_a_restart_the_shards_clock_counts() -> None:
    replica, port = make("asgd")
    step(replica, port, 1.0, weights=1.0, version=5)
    replica.restart()
    for index in replica.fetch(0, port):
        port.land(index, 2.0, version=8, clock=4)
    port.taken()
    push_all(replica, port, grads(replica, 1.0))
    assert {push.step for _, push, _ in port.pushes} == {4}
    assert replica.weights[0].item() == 2.0


def test_in_rounds_the_way_of_the_weights_is_pushed_with_the_mean_of_the_samples() -> None:
    """Two steps of the user's own optimizer a round: from 1 to 0.25, with 2 and 4 samples."""
    replica, port = make("local(steps=2)")
    moves = grads(replica, 0.0)
    for weight, samples in ((0.5, 2.0), (0.25, 4.0)):
        assert replica.plan().inner
        replica.weights.fill_(weight)
        port.run(replica.finish(moves, port, samples), 9.0, 1)
    assert {(push.role, push.step, push.samples) for _, push, _ in port.pushes} == {
        (Role.DELTA, 0, 3.0)
    }
    assert {value for _, _, value in port.pushes} == {0.75}
    assert replica.weights[0].item() == 9.0
    assert replica.drifts
    replica.weights.fill_(float("nan"))
    assert list(replica.finish(moves, port)) == []
    with pytest.raises(GradientError, match="weights of slice 0 hold NaN or Inf at step 3"):
        list(replica.finish(moves, port))
    # The round is given up: one step of the next one is left, and it begins where this one did.
    assert (replica.weights[0].item(), replica.num_inner, replica.is_ending) == (9.0, 0, False)
    replica.weights.fill_(8.0)
    port.run(replica.finish(moves, port, 5.0), 7.0, 2)
    assert {(push.step, push.samples, value) for _, push, value in port.pushes[2:]} == {
        (1, 5.0, 1.0)
    }


def test_a_round_that_is_not_over_is_pushed_at_the_end() -> None:
    replica, port = make("local(steps=3)")
    moves = grads(replica, 0.0)
    replica.end_round(moves, port)
    assert port.pushes == []
    replica.weights.fill_(0.5)
    assert list(replica.finish(moves, port)) == []
    replica.end_round(moves, port)
    assert {(push.role, value) for _, push, value in port.pushes} == {(Role.DELTA, 0.5)}
    assert replica.clocks.counts == [1, 1]


def test_local_updates_are_counted_over_pulls_and_again_after_a_restart() -> None:
    replica, port = make("ssd(steps=2, warmup=1, local=sgd)")
    for number in range(5):
        step(replica, port, 1.0, 1.0, version=number + 1)
    assert [part.num_made for part in replica.parts] == [4, 4]
    replica.restart()
    assert [part.num_made for part in replica.parts] == [0, 0]


def test_a_step_has_one_number_in_all_slices() -> None:
    """Slice 0 was at version 5, slice 1 at 7 already: step 5 is the oldest that is still open."""
    replica, port = make("ssgd(backup=1)")
    replica.restart()
    for index in replica.fetch(0, port):
        port.land(index, 1.0, version=5 + 2 * index)
    push_all(replica, port, grads(replica, 1.0))
    assert {push.step for _, push, _ in port.pushes} == {5}
    assert [push.base_version for _, push, _ in port.pushes] == [7, 5]


def test_a_worker_begins_with_the_newest_step_of_all_slices() -> None:
    """Slice 1 has step 5 from a former life of this worker; slice 0 is told not to wait for it."""
    replica, port = make("ssgd")
    replica.restart()
    asked = []
    for index in replica.begin(port):
        is_told = port.pull_buffers[index].begins
        asked.append((index, port.pulls[-1][1:3], is_told))
        if is_told:
            port.land(index, 3.0, version=6, clock=6)
        else:
            port.land(index, 1.0, version=5, clock=5 + index)
    assert asked[-2:] == [(1, (6, 6), True), (0, (6, 6), True)]
    assert bool((replica.weights == 3.0).all())
    push_all(replica, port, grads(replica, 1.0))
    assert [(i, push.step, push.base_version) for i, push, _ in port.pushes] == [
        (1, 6, 6),
        (0, 6, 6),
    ]


def test_slices_that_are_all_at_one_step_are_asked_once() -> None:
    replica, port = make("ssgd")
    replica.restart()
    for index in replica.begin(port):
        port.land(index, 1.0, version=7, clock=7)
    assert [pull[0] for pull in port.pulls] == [1, 0]
    assert (replica.next_push, replica.clocks.counts) == (7, [7, 7])


def test_in_an_asynchronous_mode_too_all_slices_begin_with_the_newest_step() -> None:
    """Slice 1 has a step that the script would else make, and push there, once more."""
    replica, port = make("asgd")
    replica.restart()
    asked = []
    for index in replica.begin(port):
        is_told = port.pull_buffers[index].begins
        asked.append((index, port.pulls[-1][1:3], is_told))
        port.land(index, 1.0, version=9 + index, clock=4 if is_told else 3 + index)
    assert asked[-1] == (0, (4, 0), True)
    assert len(port.pulls) == 3
    push_all(replica, port, grads(replica, 1.0))
    assert sorted((index, push.step) for index, push, _ in port.pushes) == [(0, 4), (1, 4)]
