"""Error feedback on a worker: nothing is lost, even if a push fails."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pscore.compressors import parse_compressor
from pscore.compressors.base import Compressor
from pscore.partition import make_layout
from pscore.rules import parse_mode
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, Origin, Push, TensorSpec, Verdict
from psworker.compression.error_feedback import Feedback, choose
from psworker.connection.exchange.exchange import Exchange

NUMEL = 2100
WITH_RESIDUAL = ["fp16", "bf16", "int8", "2bit", "1bit", "topk", "randomk", "qsgd(feedback=True)"]


def gradient(step: int) -> FloatArray:
    values: FloatArray = np.random.default_rng(step).standard_normal(NUMEL).astype(np.float32)
    return values


def sent(compressor: Compressor, payload: memoryview) -> FloatArray:
    out = np.zeros(NUMEL, dtype=np.float32)
    data = np.frombuffer(payload, np.uint8)
    compressor.check(data, NUMEL)
    compressor.decode_add(data, out, 1.0, assign=False)
    return out


def push(step: int) -> Push:
    return Push(worker=0, step=step, base_version=0)


@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_nothing_is_lost_through_retries_and_refusals(name: str) -> None:
    compressor = parse_compressor(name)
    feedback = Feedback(compressor, NUMEL, "job/0/0/0")
    counted, total = np.zeros(NUMEL), np.zeros(NUMEL)
    for step in range(12):
        grad = gradient(step)
        total += grad
        payload = feedback.encode(push(step), grad)
        first = bytes(payload)
        # A connection broke: the same payload leaves again, and it is not encoded again.
        assert bytes(feedback.encode(push(step), grad)) == first
        if step % 3 == 1:
            feedback.settle(Verdict.TOO_LATE)
        else:
            counted += sent(compressor, payload)
            feedback.settle(Verdict.DUPLICATE if step % 3 else Verdict.ACCEPTED)
    assert counted + feedback.state["residual"] == pytest.approx(total, abs=1e-4)


def test_a_full_push_includes_the_residual_and_gives_it_back_when_refused() -> None:
    compressor = parse_compressor("2bit(threshold=0.5)")
    feedback = Feedback(compressor, NUMEL, "job/0/0/0")
    counted = sent(compressor, feedback.encode(push(0), gradient(0))).astype(np.float64)
    feedback.settle(Verdict.ACCEPTED)
    feedback.flush(push(1), gradient(1))
    assert not feedback.state["residual"].any()
    feedback.settle(Verdict.TOO_LATE)
    payload = feedback.flush(push(2), gradient(2))
    counted += np.frombuffer(payload, np.float32)
    feedback.settle(Verdict.ACCEPTED)
    total = gradient(0).astype(np.float64) + gradient(1) + gradient(2)
    assert counted == pytest.approx(total, abs=1e-5)
    assert not feedback.state["residual"].any()


def test_a_push_is_settled_once() -> None:
    feedback = Feedback(parse_compressor("topk"), NUMEL, "job/0/0/0")
    feedback.encode(push(0), gradient(0))
    feedback.settle(Verdict.TOO_LATE)
    residual = feedback.state["residual"].copy()
    # The next push of the slice left uncompressed, and it too was late.
    feedback.settle(Verdict.TOO_LATE)
    assert np.array_equal(feedback.state["residual"], residual)
    assert np.array_equal(residual, gradient(0))


def test_random_numbers_differ_between_slices_and_steps() -> None:
    compressor = parse_compressor("randomk")
    payloads = {
        bytes(Feedback(compressor, NUMEL, key).encode(push(step), gradient(0))[:8])
        for key in ("job/0/0/0", "job/0/0/1", "job/0/1/0")
        for step in (0, 1)
    }
    assert len(payloads) == 6


# ----- which tensors, and where their residual lies

MODEL = [
    TensorSpec(name="conv.weight", shape=(64, 32, 3, 3), dtype="float32"),
    TensorSpec(name="conv.bias", shape=(64,), dtype="float32"),
    TensorSpec(name="norm.weight", shape=(40_000,), dtype="float32"),
    TensorSpec(name="fc.weight", shape=(500, 300), dtype="float32"),
    TensorSpec(name="head.weight", shape=(200, 200), dtype="float32"),
    TensorSpec(name="small.weight", shape=(128, 127), dtype="float32"),
]


def chosen(name: str = "dgc", **options: Any) -> list[TensorSpec]:
    arguments = {"min_nbytes": 1 << 16, "exclude": (), **options}
    return choose(MODEL, parse_compressor(name), **arguments)


def names(tensors: list[TensorSpec]) -> list[str]:
    return [spec.name.split(".")[0] for spec in tensors if spec.compress]


def test_small_and_one_dimensional_and_named_tensors_stay_as_they_are() -> None:
    assert names(chosen()) == ["conv", "fc", "head"]
    assert names(chosen(exclude=["head.*", "fc.weight"])) == ["conv"]
    assert names(chosen(min_nbytes=4 * 128 * 127)) == ["conv", "fc", "head", "small"]
    assert names(chosen("none")) == []


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_no_slice_holds_both_kinds(num_shards: int) -> None:
    tensors = chosen()
    layout = make_layout(tensors, num_shards)
    for spec in layout.slices:
        assert {tensors[segment.tensor].compress for segment in spec.segments} == {spec.compress}
    assert layout.fingerprint != make_layout(chosen("none"), num_shards).fingerprint
    assert layout.offsets == make_layout(tensors, 3).offsets
    covered = [(spec.start, spec.stop) for spec in layout.slices]
    assert [stop for _, stop in covered[:-1]] == [start for start, _ in covered[1:]]
    assert covered[-1][1] == layout.numel


def exchange_of(num_shards: int) -> Exchange:
    session: Any = SimpleNamespace(
        job="job",
        rank=0,
        incarnation=1,
        links=[],
        define=lambda *_: (0, Origin()),
        timeline=None,
        residual_senders={},
        pushes=set(),
    )
    spec = TableSpec(
        name="model",
        tensors=tuple(chosen()),
        num_shards=num_shards,
        rule=parse_mode("ssgd"),
        compressor=parse_compressor("dgc"),
        optimizer="sgd",
        num_groups=1,
    )
    return Exchange(session, spec)


def test_the_state_survives_a_change_of_the_number_of_shards() -> None:
    first, second = exchange_of(1), exchange_of(3)
    assert not first.compressor_state()
    numel = first.layout.numel
    kept = {
        name: np.random.default_rng(seed).standard_normal(numel).astype(np.float32)
        for seed, name in enumerate(("residual", "momentum"))
    }
    first.load_compressor_state(kept)
    second.load_compressor_state(first.compressor_state())
    moved = second.compressor_state()
    assert set(moved) == {"residual", "momentum"}
    compressed = np.zeros(numel, dtype=bool)
    for spec in second.layout.slices:
        compressed[spec.start : spec.stop] = spec.compress
    assert compressed.any()
    assert not compressed.all()
    for name, flat in moved.items():
        assert np.array_equal(flat, np.where(compressed, kept[name], 0.0))
