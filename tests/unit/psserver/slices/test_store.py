"""The numbers of one slice: the effect of each action, and the guarantees to a reader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from pscore.compressors.fp16 import FP16
from pscore.compressors.none import NoCompression
from pscore.errors import DecodeError
from pscore.optimizers.adam import Adam
from pscore.optimizers.base import Optimizer, SliceStep
from pscore.optimizers.sgd import SGD
from pscore.rules import ASGD, DCASGD, SSGD
from pscore.rules.base import Memory, Rule
from pscore.types import FloatArray, HyperArray, Push, Role, SliceSpec, TensorSegment
from psserver.decisions.orders import Add, Answer, Load, Update
from psserver.slices.base import Payload
from psserver.slices.store import SliceStore
from tests.unit.psserver.ordered import last_of

RAW = NoCompression()
PULLED = Answer(token=0, worker=0, version=0, with_state=False)
NUMEL = 32
# Two segments with a gap between them, as after a tensor of 10 elements.
SPEC = SliceSpec(
    index=0,
    shard=0,
    start=0,
    stop=NUMEL,
    segments=(
        TensorSegment(tensor=0, group=0, start=0, stop=10, tensor_start=0),
        TensorSegment(tensor=1, group=0, start=16, stop=32, tensor_start=0),
    ),
)
MOMENTUM = np.array([[0.5, 0.9, 0.0, 0.0, 0.0, 0.0]])
PLAIN = np.array([[0.5, 0.0, 0.0, 0.0, 0.0, 0.0]])
IN_SEGMENTS = np.r_[0:10, 16:32]


def values(seed: int) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(NUMEL, dtype=np.float32)


def payload(*arrays: FloatArray, counts: tuple[int, ...] = ()) -> Payload:
    data = np.concatenate(arrays).view(np.uint8)
    return Payload(data=data, compressor=RAW, counts=counts)


def half(array: FloatArray) -> Payload:
    compressor = FP16()
    out = np.zeros(compressor.payload_nbytes_max(NUMEL), dtype=np.uint8)
    state = {name: np.zeros(NUMEL, np.float32) for name in compressor.state_names}
    nbytes = compressor.encode(array, state, out)
    return Payload(data=out[:nbytes], compressor=compressor)


EMPTY = Payload(data=np.zeros(0, np.uint8), compressor=RAW)


def store(rule: Rule | None = None, optimizer: Optimizer | None = None) -> SliceStore:
    made = SliceStore(SPEC, rule or ASGD(), optimizer or SGD())
    load(made, values(0))
    return made


def load(target: SliceStore, weights: FloatArray, version: int = 0) -> None:
    target.load(Load(token="t", role=Role.WEIGHTS, version=version), payload(weights))


def add(weight: float = 1.0, *, first: bool = False, worker: int = 0, step: int = 0) -> Add:
    push = Push(worker=worker, step=step, base_version=0)
    return Add(token="t", open_step=step, push=push, weight=weight, is_first=first)


def update(
    version: int, scale: float = 1.0, *, present: int = -1, step: int = 0, hyper: HyperArray = PLAIN
) -> Update:
    return Update(open_step=step, scale=scale, present=present, hyper=hyper, version=version)


# ----- loading


def test_weights_are_taken_as_they_are() -> None:
    made = store()
    assert np.array_equal(made.weights, values(0))
    assert made.counts.tolist() == [0, 0]


def test_restored_state_comes_with_its_counts() -> None:
    made = store()
    role = Load(token="t", role=Role.STATE, version=3)
    made.load(role, payload(values(1), values(2), counts=(5, 7)))
    assert np.array_equal(made.weights, values(1))
    assert np.array_equal(made.state[0], values(2))
    assert made.counts.tolist() == [5, 7]


# ----- adding and updating


def test_an_update_is_a_step_with_the_weighted_mean() -> None:
    made = store()
    made.add(add(2.0, first=True), payload(values(1)))
    made.add(add(6.0), payload(values(2)))
    made.update(update(1, 1 / 8))
    mean = (values(1) * np.float32(2) + values(2) * np.float32(6)) * np.float32(1 / 8)
    expected = values(0)
    expected[IN_SEGMENTS] -= np.float32(0.5) * mean[IN_SEGMENTS]
    assert np.array_equal(made.weights, expected)
    assert made.counts.tolist() == [1, 1]


def test_padding_between_segments_never_changes() -> None:
    made = store()
    made.add(add(first=True), payload(np.full(NUMEL, 7.0, np.float32)))
    made.update(update(1))
    assert np.array_equal(made.weights[10:16], values(0)[10:16])


def test_a_segment_without_a_gradient_is_left_alone() -> None:
    made = store()
    made.add(add(first=True), payload(values(1)))
    made.update(update(1, present=0b10, hyper=MOMENTUM))
    assert np.array_equal(made.weights[:10], values(0)[:10])
    assert not np.array_equal(made.weights[16:], values(0)[16:])
    assert made.counts.tolist() == [0, 1]
    assert not made.state[0][:10].any()


def test_open_steps_of_several_steps_are_apart_and_used_again() -> None:
    made = store()
    made.add(add(first=True, step=4), payload(values(1)))
    made.add(add(first=True, step=5), payload(values(2)))
    made.update(update(1, step=4))
    made.add(add(first=True, step=6), payload(values(3)))  # In the memory of step 4.
    made.update(update(2, step=5))
    made.update(update(3, step=6))
    other = store()
    for version, seed in enumerate((1, 2, 3), start=1):
        other.add(add(first=True), payload(values(seed)))
        other.update(update(version))
    assert np.array_equal(made.weights, other.weights)
    assert made.nbytes == store().nbytes + 2 * 4 * NUMEL


def test_an_empty_payload_is_a_gradient_of_zeros() -> None:
    made = store()
    made.add(add(first=True), payload(values(1)))
    made.update(update(1))
    before = made.weights.copy()
    made.add(add(first=True), EMPTY)  # In a bin that still holds the former sum.
    made.add(add(), EMPTY)
    made.update(update(2))
    assert np.array_equal(made.weights, before)


@pytest.mark.parametrize("optimizer", [SGD(), Adam()], ids=lambda o: o.name)
@pytest.mark.parametrize("make", [payload, half, lambda _: EMPTY], ids=["raw", "fp16", "empty"])
@pytest.mark.parametrize("rule", [ASGD(), DCASGD()], ids=str)
@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_one_pass_gives_the_bits_of_two(
    optimizer: Optimizer, make: object, rule: Rule, weight: float
) -> None:
    hyper = np.full((1, len(optimizer.hyper_names)), 0.1)
    together, apart = store(rule, optimizer), store(rule, optimizer)
    for version in range(1, 4):
        sent = make(values(version))  # type: ignore[operator]
        last = update(version, 1 / weight, hyper=hyper)
        together.add_and_update([(add(weight, first=True), sent)], last)
        apart.add(add(weight, first=True), sent)
        apart.update(last)
    assert np.array_equal(together.weights, apart.weights)
    for mine, yours in zip(together.state, apart.state, strict=True):
        assert np.array_equal(mine, yours)


@pytest.mark.parametrize("kinds", ["rrr", "rhr", "hhh", "erh", "ree", "eee"])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("rule", [SSGD(), DCASGD()], ids=str)
def test_one_pass_may_be_all_of_a_sum_or_its_end(kinds: str, before: int, rule: Rule) -> None:
    """Raw, half and empty payloads in the order of the ranks; some may be in the bin already."""
    make: dict[str, Callable[[FloatArray], Payload]] = {
        "r": payload,
        "h": half,
        "e": lambda _: EMPTY,
    }
    weights = (2.0, 3.0, 1.0)
    terms = [
        (add(weight, first=rank == 0, worker=rank), make[kind](values(rank + 1)))
        for rank, (kind, weight) in enumerate(zip(kinds, weights, strict=True))
    ]
    together, apart = store(rule), store(rule)
    for term in terms[:before]:
        together.add(*term)
    together.add_and_update(terms[before:], update(1, 1 / 6))
    for term in terms:
        apart.add(*term)
    apart.update(update(1, 1 / 6))
    assert np.array_equal(together.weights, apart.weights)


class OneGradient(SGD):
    """An optimizer of another package, which knows of no further gradients."""

    adds = False

    def step(self, step: SliceStep) -> None:
        super().step(step._replace(others=(), shares=(1.0,)))


@pytest.mark.parametrize("weights", [(2.0,), (1.0, 1.0), (3.0, 1.0, 0.5)])
def test_an_optimizer_that_does_not_add_is_given_the_sum(weights: tuple[float, ...]) -> None:
    ours, other = store(SSGD(), OneGradient()), store(SSGD())
    for made in (ours, other):
        terms = [
            (add(weight, first=rank == 0, worker=rank), payload(values(rank)))
            for rank, weight in enumerate(weights)
        ]
        made.add_and_update(terms, update(1, 0.5))
    assert np.array_equal(ours.weights, other.weights)


def test_a_sum_in_one_pass_takes_no_memory_of_the_slice() -> None:
    made, nbytes = store(SSGD()), store(SSGD()).nbytes
    terms = [(add(first=rank == 0, worker=rank), payload(values(rank))) for rank in range(4)]
    made.add_and_update(terms, update(1, 0.25))
    assert made.nbytes == nbytes


def test_a_payload_that_cannot_be_written_is_only_read() -> None:
    made, sent = store(), payload(values(1))
    sent.data.flags.writeable = False
    made.add_and_update([(add(first=True), sent)], update(1))
    made.add(add(first=True), sent)
    made.update(update(2))


# ----- compensation


def test_one_gradient_is_compensated_before_it_is_added() -> None:
    """By hand: w = 1, backup 0, g = 1, lambda = 2: g + 2 * 1 * 1 * (1 - 0) = 3."""
    made = SliceStore(SPEC, DCASGD(variance_control=2.0), SGD())
    load(made, np.zeros(NUMEL, np.float32))
    made.read(PULLED)
    load(made, np.ones(NUMEL, np.float32))
    made.add(add(first=True), payload(np.ones(NUMEL, np.float32)))
    made.update(update(1))
    assert made.weights[0] == 1 - 0.5 * 3


def test_a_look_is_not_remembered() -> None:
    made = SliceStore(SPEC, DCASGD(variance_control=2.0), SGD())
    load(made, np.zeros(NUMEL, np.float32))
    made.read(PULLED)
    load(made, np.ones(NUMEL, np.float32))
    made.read(PULLED._replace(with_state=True, is_look=True))
    made.add(add(first=True), payload(np.ones(NUMEL, np.float32)))
    made.update(update(1))
    assert made.weights[0] == 1 - 0.5 * 3


@dataclass(frozen=True)
class Moves(ASGD):
    """Asynchronous SGD that keeps the sum of its updates, and spoils no gradient with its sums."""

    compensates: ClassVar[bool] = True
    remembers_updates: ClassVar[bool] = True

    def compensate(self, grad: FloatArray, worker: int, memory: Memory) -> None:
        memory.state.setdefault("gradients", np.zeros_like(grad))[:] += grad

    def on_update(self, weights: FloatArray, memory: Memory) -> None:
        memory.state.setdefault("moves", np.zeros_like(weights))[:] += weights - memory.weights


def test_a_rule_sees_each_update_with_the_weights_before_it() -> None:
    made = SliceStore(SPEC, Moves(), SGD())
    load(made, np.ones(NUMEL, np.float32))
    for version in (1, 2):
        made.add(add(first=True), payload(np.full(NUMEL, 3.0, np.float32)))
        made.update(update(version))
    assert made.weights[0] == 1 - 2 * 0.5 * 3
    kept = last_of(made.export())
    assert kept["memory.moves"][0] == -2 * 0.5 * 3
    assert kept["memory.moves"][12] == 0.0  # Between the segments.
    assert kept["memory.gradients"][0] == 2 * 3


# ----- reading


def test_reading_brings_weights_and_on_request_the_state() -> None:
    made = store(optimizer=Adam())
    assert len(made.read(PULLED)) == 1
    arrays: Sequence[FloatArray] = made.read(PULLED._replace(with_state=True))
    assert len(arrays) == 1 + len(Adam.state_names)
    assert np.array_equal(arrays[0], made.weights)


def test_leased_weights_stay_as_they_are_until_they_are_given_back() -> None:
    made = store()
    buffer = made.copies.lease()
    kept = buffer.array.copy()
    for version in range(1, 5):
        made.add(add(first=True), payload(values(version)))
        made.update(update(version))
        assert np.array_equal(buffer.array, kept)
    made.copies.release(buffer)


def test_slow_readers_cost_one_buffer_for_each_version_that_they_hold() -> None:
    made = store()
    empty = made.nbytes
    leases = []
    for version in range(1, 5):
        leases.append(made.copies.lease())
        made.add(add(first=True), payload(values(version)))
        made.update(update(version))
    assert made.nbytes == empty + (4 + 1) * 4 * NUMEL  # Four buffers more, and the bin.
    for buffer in leases:
        made.copies.release(buffer)
    before = made.nbytes
    for version in range(5, 20):
        made.add(add(first=True), payload(values(version)))
        made.update(update(version))
    assert made.nbytes == before


def test_two_readers_of_one_version_share_its_buffer() -> None:
    made = store()
    first, second = made.copies.lease(), made.copies.lease()
    assert first is second
    made.copies.release(first)
    kept = second.array.copy()
    for version in (1, 2, 3):
        made.add(add(first=True), payload(values(version)))
        made.update(update(version))
    assert np.array_equal(second.array, kept)


def test_versions_of_shared_buffers_are_published_and_withdrawn_before_they_are_overwritten() -> (
    None
):
    buffers = [np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)]
    versions = np.full(2, -1, np.int64)
    made = SliceStore(SPEC, ASGD(), SGD(), buffers, versions)
    load(made, values(0))
    seen = [versions.tolist()]
    for version in (1, 2, 3):
        made.add(add(first=True), payload(values(version)))
        made.update(update(version))
        seen.append(versions.tolist())
        newest = buffers[int(np.argmax(versions))]
        assert np.array_equal(newest, made.weights)
        assert made.copies.newest_mapped() == int(np.argmax(versions)) + 1
    assert [max(pair) for pair in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rule", "is_mapped", "in_place"),
    [
        (ASGD(), False, True),
        (ASGD(), True, False),  # A worker may be copying while another's gradient is added.
        (SSGD(), False, True),
        (SSGD(), True, True),  # Each has copied before it pushed.
    ],
)
def test_weights_are_overwritten_only_where_nobody_reads_them(
    rule: Rule, is_mapped: bool, in_place: bool
) -> None:
    buffers = [np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)]
    made = SliceStore(SPEC, rule, SGD(), buffers, np.full(2, -1, np.int64))
    load(made, values(0))
    leased = made.copies.lease()
    before = leased.number
    made.copies.release(leased)
    if is_mapped:
        assert made.copies.newest_mapped() == before
    made.add(add(first=True), payload(values(1)))
    made.update(update(1))
    assert (made.copies.lease().number == before) == in_place


# ----- refusing


@pytest.mark.parametrize(
    ("role", "num_floats", "is_right"),
    [
        (Role.GRADIENT, NUMEL, True),
        (Role.GRADIENT, NUMEL - 1, False),
        (Role.GRADIENT, 2 * NUMEL, False),
        (Role.GRADIENT, 0, True),
        (Role.DELTA, NUMEL, True),
        (Role.DELTA, NUMEL + 1, False),
        (Role.WEIGHTS, NUMEL, True),
        (Role.WEIGHTS, 0, False),
        (Role.WEIGHTS, 2 * NUMEL, False),
        (Role.STATE, 2 * NUMEL, True),
        (Role.STATE, NUMEL, False),
        (Role.STATE, 3 * NUMEL, False),
    ],
)
def test_a_payload_of_another_length_is_refused(
    role: Role, num_floats: int, is_right: bool
) -> None:
    sent = Payload(data=np.zeros(4 * num_floats, np.uint8), compressor=RAW)
    if is_right:
        store().check(sent, Push(worker=0, step=0, base_version=0, role=role))
    else:
        with pytest.raises(DecodeError, match=f"payload of {4 * num_floats} bytes"):
            store().check(sent, Push(worker=0, step=0, base_version=0, role=role))


def test_a_compressed_payload_is_checked_by_its_compressor() -> None:
    sent = Payload(data=np.zeros(2 * NUMEL - 2, np.uint8), compressor=FP16())
    with pytest.raises(DecodeError):
        store().check(sent, Push(worker=0, step=0, base_version=0))


# ----- outliving the process


def test_an_export_makes_another_store_continue_alike() -> None:
    made = store(DCASGD(), Adam())
    hyper = np.full((1, len(Adam.hyper_names)), 0.1)
    made.read(PULLED)
    for version in (1, 2):
        made.add(add(first=True), payload(values(version)))
        made.update(update(version, hyper=hyper))
    again = SliceStore(SPEC, DCASGD(), Adam())
    again.restore(last_of(made.export()), 2)
    for target in (made, again):
        target.add(add(first=True), payload(values(3)))
        target.update(update(3, hyper=hyper))
    assert np.array_equal(made.weights, again.weights)
    assert made.counts.tolist() == again.counts.tolist()
