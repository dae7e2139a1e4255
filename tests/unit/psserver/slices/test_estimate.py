"""The estimate that workers hold, both halves: its equations, its answers, and refusals."""

import numpy as np
import pytest

from pscore.compressors import COMPRESSORS, parse_compressor
from pscore.compressors.base import RESIDUAL, Compressor
from pscore.errors import ConfigError, DecodeError
from pscore.estimate import DELTAS_MAX, fingerprint, require_for_pulls
from pscore.optimizers.sgd import SGD
from pscore.pb.ps.v1 import data_pb2
from pscore.rules import ASGD, DCASGD
from pscore.types import ByteArray, FloatArray, Role, SliceSpec, TensorSegment
from psserver.decisions.orders import Answer, Load
from psserver.slices.base import Asked, Payload
from psserver.slices.pull_estimate import Estimate
from psserver.slices.store import SliceStore
from psworker.compression.pull_estimate import PulledEstimate
from tests.unit.pscore.compressors.cases import NAMES
from tests.unit.psserver.ordered import last_of

NUMEL = 5000  # No multiple of a block or of a code's packing.
FOR_PULLS = [name for name in NAMES if parse_compressor(name).bounds_residual]


def values(seed: int, scale: float = 1.0) -> FloatArray:
    drawn = np.random.default_rng(seed).standard_normal(NUMEL, dtype=np.float32)
    return (drawn * np.float32(scale)).astype(np.float32)


def answer(estimate: Estimate, held: PulledEstimate) -> data_pb2.PullReply:
    """Returns what a shard says, and lays its payload where the worker wants it."""
    reply = data_pb2.PullReply(ready=True)
    data = b"".join(part.tobytes() for part in estimate.answer(held.fingerprint, reply))
    held.room(reply, len(data))[:] = data
    return reply


def pull(estimate: Estimate, held: PulledEstimate) -> data_pb2.PullReply:
    reply = answer(estimate, held)
    assert held.take(reply)
    assert held.values is not None
    assert np.array_equal(held.values, estimate.values)
    return reply


def decoded(compressor: Compressor, payload: ByteArray) -> FloatArray:
    out = np.zeros(NUMEL, dtype=np.float32)
    compressor.decode_add(payload, out, 1.0, assign=True)
    return out


# ----- the equations


@pytest.mark.parametrize("name", FOR_PULLS)
def test_sent_and_residual_add_up_to_the_weights(name: str) -> None:
    """X_0 + sum of D(C(W - X)) + (W - X) = W: the sums in float64, to one rounding of X a step."""
    compressor = parse_compressor(name)
    weights = values(0)
    estimate, held = Estimate(compressor, weights, 0), PulledEstimate(compressor, NUMEL, "slice 0")
    pull(estimate, held)
    sent, largest = weights.astype(np.float64), np.abs(weights)
    for version in range(1, 13):
        weights = weights + values(version, 0.01)
        estimate.follow(weights, version)
        (delta,) = estimate.since(held.fingerprint) or ()
        sent += decoded(compressor, delta)
        assert not pull(estimate, held).whole
        largest = np.maximum(largest, np.abs(estimate.values))
        residual = weights.astype(np.float64) - estimate.values
        assert (np.abs(sent + residual - weights) <= version * np.spacing(largest)).all()


@pytest.mark.parametrize("name", [name for name in FOR_PULLS if "threshold" not in name])
def test_an_estimate_comes_to_weights_that_rest(name: str) -> None:
    """With W at rest the residual shrinks, so that no compressor allowed here can run away."""
    compressor = parse_compressor(name)
    estimate = Estimate(compressor, values(0), 0)
    weights = values(0) + values(1, 0.01)
    before = float(np.abs(weights - estimate.values).sum())
    for version in range(1, 40):
        estimate.follow(weights, version)
    assert float(np.abs(weights - estimate.values).sum()) < 0.5 * before


def test_a_fixed_threshold_leaves_what_is_below_it() -> None:
    estimate = Estimate(parse_compressor("2bit(threshold=0.02)"), values(0), 0)
    weights = values(0) + values(1, 0.01)
    for version in range(1, 10):
        estimate.follow(weights, version)
    assert 0.01 < float(np.abs(weights - estimate.values).max()) <= 0.02


def test_with_fp16_an_estimate_is_soon_the_weights() -> None:
    compressor = parse_compressor("fp16")
    estimate = Estimate(compressor, values(0), 0)
    weights = values(0) + values(1, 0.01)
    for version in range(1, 4):
        estimate.follow(weights, version)
    assert np.allclose(estimate.values, weights, rtol=1e-6, atol=1e-7)


def test_a_version_is_followed_once() -> None:
    estimate = Estimate(parse_compressor("2bit"), values(0), 0)
    estimate.follow(values(1), 1)
    before = estimate.fingerprint
    estimate.follow(values(1), 1)
    assert estimate.fingerprint == before


def test_weights_beyond_float32_are_shown_as_they_are() -> None:
    compressor = parse_compressor("2bit")
    estimate, held = (
        Estimate(compressor, values(0), 0),
        PulledEstimate(compressor, NUMEL, "slice 0"),
    )
    pull(estimate, held)
    bad = values(1)
    bad[7] = np.inf
    estimate.follow(bad, 1)
    assert pull(estimate, held).whole
    assert held.values is not None
    assert held.values[7] == np.inf


# ----- who holds what


def test_a_worker_that_is_behind_gets_the_deltas_that_it_lacks() -> None:
    compressor = parse_compressor("2bit")
    estimate = Estimate(compressor, values(0), 0)
    often, seldom = PulledEstimate(compressor, NUMEL, "a"), PulledEstimate(compressor, NUMEL, "b")
    assert pull(estimate, often).whole
    assert pull(estimate, seldom).whole
    for version in range(1, 4):
        estimate.follow(values(version), version)
        assert len(pull(estimate, often).deltas) == 1
    reply = pull(estimate, seldom)
    assert not reply.whole
    assert list(reply.deltas) == 3 * [compressor.payload_nbytes_max(NUMEL)]
    assert pull(estimate, seldom).deltas == []  # Nothing is new.


def test_deltas_are_kept_while_they_are_smaller_than_the_whole() -> None:
    compressor = parse_compressor("int8")
    estimate, held = (
        Estimate(compressor, values(0), 0),
        PulledEstimate(compressor, NUMEL, "slice 0"),
    )
    pull(estimate, held)
    version = 0
    while estimate.since(held.fingerprint) is not None:
        version += 1
        estimate.follow(values(version), version)
    assert version == 4  # Three of them are 3.006 bytes an element, four would be 4.008.
    assert estimate.nbytes < 4 * 4 * NUMEL
    assert pull(estimate, held).whole


def test_the_number_of_deltas_is_bounded() -> None:
    compressor = parse_compressor("topk(ratio=0.0002)")
    estimate, held = (
        Estimate(compressor, values(0), 0),
        PulledEstimate(compressor, NUMEL, "slice 0"),
    )
    pull(estimate, held)
    for version in range(1, DELTAS_MAX + 1):
        estimate.follow(values(version), version)
    assert len(estimate.since(held.fingerprint) or ()) == DELTAS_MAX
    estimate.follow(values(0), DELTAS_MAX + 1)
    assert estimate.since(held.fingerprint) is None


def test_an_estimate_of_another_life_is_sent_whole() -> None:
    compressor = parse_compressor("2bit")
    held = PulledEstimate(compressor, NUMEL, "slice 0")
    pull(Estimate(compressor, values(0), 5), held)
    assert pull(Estimate(compressor, values(1), 5), held).whole


# ----- what a worker does not believe


def test_a_bit_that_differs_makes_the_worker_ask_for_the_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compressor = parse_compressor("2bit")
    estimate, held = (
        Estimate(compressor, values(0), 0),
        PulledEstimate(compressor, NUMEL, "slice 3"),
    )
    pull(estimate, held)
    assert held.values is not None
    held.values.view(np.uint32)[17] ^= 1
    estimate.follow(values(1), 1)
    assert not held.take(answer(estimate, held))
    assert (held.fingerprint, held.num_resyncs) == (0, 1)
    assert "slice 3: the estimate of version 0 is not the shard's after 1 deltas" in caplog.text
    assert pull(estimate, held).whole


@pytest.mark.parametrize(
    ("reply", "nbytes"),
    [
        (data_pb2.PullReply(whole=True), 4 * NUMEL - 4),
        (data_pb2.PullReply(deltas=[100]), 99),
        (data_pb2.PullReply(deltas=[4 * NUMEL, 4]), 4 * NUMEL + 4),
        (data_pb2.PullReply(deltas=[0] * (DELTAS_MAX + 1)), 0),
        (data_pb2.PullReply(), 4),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(reply: data_pb2.PullReply, nbytes: int) -> None:
    held = PulledEstimate(parse_compressor("2bit"), NUMEL, "slice 3 of worker 1")
    with pytest.raises(DecodeError, match="slice 3 of worker 1"):
        held.room(reply, nbytes)


def test_a_delta_that_is_none_is_refused_and_nothing_is_built_upon_it() -> None:
    compressor = parse_compressor("2bit")
    estimate, held = (
        Estimate(compressor, values(0), 0),
        PulledEstimate(compressor, NUMEL, "slice 3"),
    )
    pull(estimate, held)
    reply = data_pb2.PullReply(deltas=[8], fingerprint=1)
    held.room(reply, 8)[:] = bytes(8)
    with pytest.raises(DecodeError, match="8 bytes"):
        held.take(reply)
    assert pull(estimate, held).whole


def test_deltas_without_an_estimate_are_refused() -> None:
    held = PulledEstimate(parse_compressor("2bit"), NUMEL, "slice 3")
    reply = data_pb2.PullReply(fingerprint=1)
    held.room(reply, 0)
    with pytest.raises(DecodeError, match="no estimate to add them to"):
        held.take(reply)


def test_a_whole_that_is_not_its_fingerprint_is_refused() -> None:
    held = PulledEstimate(parse_compressor("2bit"), NUMEL, "slice 3")
    reply = data_pb2.PullReply(whole=True, fingerprint=1)
    held.room(reply, 4 * NUMEL)[:] = bytes(4 * NUMEL)
    with pytest.raises(DecodeError, match="fingerprint"):
        held.take(reply)


# ----- which compressors


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_a_compressor_without_an_error_bound_is_refused(name: str) -> None:
    compressor = COMPRESSORS[name]()
    if name == "none" or (compressor.state_names == (RESIDUAL,) and name != "sparseloco"):
        require_for_pulls(compressor)
    else:
        with pytest.raises(ConfigError, match=f"pull_compression is .{name}"):
            require_for_pulls(compressor)


@pytest.mark.parametrize(
    "text", ["natural(feedback=True)", "qsgd(feedback=True)", "sparseloco(decay=1.0)"]
)
def test_with_feedback_what_rounds_at_random_may_compress_pulls(text: str) -> None:
    require_for_pulls(parse_compressor(text))


def residual_after(compressor: Compressor, grad: FloatArray) -> float:
    """Returns the mean square norm of the residual after `grad`, over several draws."""
    out, squares = np.zeros(compressor.payload_nbytes_max(len(grad)), np.uint8), []
    for seed in range(20):
        residual = np.zeros_like(grad)
        compressor.encode(grad, {RESIDUAL: residual}, out, seed=seed)
        squares.append(float(np.square(residual).sum()))
    return float(np.mean(squares))


@pytest.mark.parametrize("text", ["terngrad(feedback=True)", "qsgd(levels=3, feedback=True)"])
def test_more_noise_than_is_made_up_for_is_refused(text: str) -> None:
    """The residual of some numbers is larger after sending them than before."""
    compressor = parse_compressor(text)
    with pytest.raises(ConfigError, match=r"with a bounded residual: .* with 17 levels or more"):
        require_for_pulls(compressor)
    grad = np.full(2048, 1 / 12, np.float32)
    grad[0] = 1.0
    assert residual_after(compressor, grad) > 1.4 * float(np.square(grad).sum())
    grad[1:] = 1 / 68
    allowed = parse_compressor("qsgd(levels=17, feedback=True)")
    assert residual_after(allowed, grad) < float(np.square(grad).sum())


# ----- as part of a slice


def store(rule: ASGD | DCASGD) -> SliceStore:
    segment = TensorSegment(tensor=0, group=0, start=0, stop=NUMEL, tensor_start=0)
    spec = SliceSpec(index=0, shard=0, start=0, stop=NUMEL, segments=(segment,), compress=True)
    made = SliceStore(spec, rule, SGD())
    load(made, values(0))
    return made


def load(made: SliceStore, weights: FloatArray) -> None:
    payload = Payload(data=weights.view(np.uint8), compressor=parse_compressor("none"))
    made.load(Load(token=0, role=Role.WEIGHTS, version=0), payload)


def pulled(made: SliceStore, compressor: Compressor, held: PulledEstimate, version: int) -> bool:
    """Pulls the estimate as worker 0 does; returns whether it came whole."""
    order = Answer(token=0, worker=0, version=version, with_state=False)
    reply = data_pb2.PullReply(ready=True)
    asked = Asked(held=held.fingerprint, compressor=compressor)
    data = b"".join(part.tobytes() for part in made.answer(order, asked, reply).arrays)
    held.room(reply, len(data))[:] = data
    assert held.take(reply)
    return reply.whole


def test_a_loaded_state_is_sent_whole() -> None:
    compressor = parse_compressor("2bit")
    made, held = store(ASGD()), PulledEstimate(compressor, NUMEL, "slice 0")
    without = made.nbytes
    pulled(made, compressor, held, 0)
    assert made.nbytes > without + 2 * 4 * NUMEL
    load(made, values(9))
    assert pulled(made, compressor, held, 0)
    assert held.values is not None
    assert np.array_equal(held.values, values(9))


def test_a_rule_remembers_what_the_worker_was_given() -> None:
    """DC-ASGD corrects by how far the weights have moved from those of the worker's gradient."""
    compressor = parse_compressor("2bit")
    made, held = store(DCASGD()), PulledEstimate(compressor, NUMEL, "slice 0")
    pulled(made, compressor, held, 0)
    made.weights[:] = values(5)
    pulled(made, compressor, held, 1)
    backup = last_of(made.export())["memory.weights_backup.0"]
    assert held.values is not None
    assert np.array_equal(backup, held.values)
    assert not np.array_equal(backup, made.weights)


def test_a_fingerprint_is_of_all_bits_and_never_none() -> None:
    one, other = values(0), values(0)
    assert fingerprint(one) == fingerprint(other) != 0
    other.view(np.uint8)[-1] ^= 1
    assert fingerprint(one) != fingerprint(other)
