"""The versions of one slice that a reader can get."""

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.publish import codec
from psserver.process.shard_plan import parse_every
from psserver.publish.ring import VersionRing

NUMEL = 40_000


def published(ring: VersionRing, number: int, weights: np.ndarray, lineage: int = 7) -> None:
    ring.publish(lineage, number, 2 * number, weights)


def test_deltas_lead_from_a_held_version_to_the_target() -> None:
    rng, ring = np.random.default_rng(0), VersionRing()
    weights = rng.standard_normal(NUMEL).astype(np.float32)
    kept = {}
    for number in range(12):
        weights[rng.integers(0, NUMEL, 50)] += 1.0
        published(ring, number, weights)
        kept[number] = codec.round_to_bf16(weights)
    for held, target in ((0, 11), (3, 9), (11, 11)):
        bits = kept[held].copy()
        found = ring.find(7, target, held, codec.fingerprint(bits))
        assert found is not None
        assert found.whole is None
        for delta in found.deltas:
            codec.apply(delta, bits)
        np.testing.assert_array_equal(bits, kept[target])
        assert found.version.fingerprint == codec.fingerprint(bits)
        assert found.version.step == 2 * target


def test_a_version_without_deltas_to_it_is_sent_whole_and_does_not_change() -> None:
    ring = VersionRing()
    weights = np.ones(NUMEL, dtype=np.float32)
    published(ring, 4, weights)
    found = ring.find(7, 4, -1, 0)
    assert found is not None
    assert found.whole is not None
    before = found.whole.copy()
    published(ring, 5, weights * 2)
    np.testing.assert_array_equal(found.whole, before)
    false = ring.find(7, 5, 4, 12345)  # Another fingerprint than that of version 4.
    assert false is not None
    assert false.whole is not None
    assert ring.find(7, 6, 5, 0) is None  # Not reached yet.
    assert ring.find(8, 5, 5, 0) is None  # Another lineage.
    published(ring, 0, weights, lineage=8)
    assert ring.find(7, 5, 4, 0) is None


def test_the_deltas_of_a_ring_are_bounded_in_bytes() -> None:
    rng, ring = np.random.default_rng(1), VersionRing()
    for number in range(200):
        published(ring, number, rng.standard_normal(NUMEL).astype(np.float32))
    assert ring.nbytes <= 2 * 2 * NUMEL + 1


def test_a_ring_adopts_versions_of_another_byte_for_byte() -> None:
    """Also several at once: their deltas then lead from the first to the last."""
    rng, first, second = np.random.default_rng(2), VersionRing(), VersionRing()
    weights = rng.standard_normal(NUMEL).astype(np.float32)
    kept: dict[int, np.ndarray] = {}
    held = known = -1
    for number in range(10):
        weights[rng.integers(0, NUMEL, 50)] += 1.0
        published(first, number, weights)
        kept[number] = codec.round_to_bf16(weights)
        if number in (0, 3, 4, 9):  # The others are passed over.
            found = first.find(7, number, held, known)
            assert found is not None
            second.adopt(7, found.version, kept[number], found.deltas if number else None)
            held, known = number, found.version.fingerprint
    for held, target in ((0, 9), (3, 9), (4, 9), (0, 3)):
        known = codec.fingerprint(kept[held])
        theirs, ours = first.find(7, target, held, known), second.find(7, target, held, known)
        assert theirs is not None
        assert ours is not None
        assert ours.version == theirs.version
        assert [(one.form, one.payload.tobytes()) for one in ours.deltas] == [
            (one.form, one.payload.tobytes()) for one in theirs.deltas
        ]
    passed_over = second.find(7, 9, 5, codec.fingerprint(kept[5]))
    assert passed_over is not None
    assert passed_over.whole is not None
    np.testing.assert_array_equal(passed_over.whole, kept[9])
    assert second.find(7, 4, 5, 0) is not None  # A target that is no version here: the newest.
    second.adopt(8, passed_over.version, kept[9], None)
    assert second.find(7, 9, 4, 0) is None


@pytest.mark.parametrize(
    "text", ["night", "night:every=x", ":every=1", "night:every=0", "night:every=1,", ","]
)
def test_publications_are_named_in_one_form(text: str) -> None:
    assert parse_every("night:every=4,*:every=1") == {"night": 4, "*": 1}
    assert parse_every("") == {}
    with pytest.raises(ConfigError, match="every"):
        parse_every(text)
