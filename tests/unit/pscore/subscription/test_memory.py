"""The memory of a reader's versions: a shown one stays, and one that nobody has is used again."""

import itertools
import random

import numpy as np
import pytest

from pscore.errors import DecodeError
from pscore.publish.codec import BitArray, Delta, Form, fingerprint, move, round_to_bf16
from pscore.subscription.memory import VersionMemory

NUMEL = 4000
PLACES = (slice(0, 1000), slice(1000, NUMEL))


class Writer:
    """Weights of which some change, and a memory that follows them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.weights = self.random.standard_normal(NUMEL).astype(np.float32)
        self.bits = round_to_bf16(self.weights)
        self.memory = VersionMemory(NUMEL)
        for place in PLACES:
            self.write_whole(place)

    def write_whole(self, place: slice) -> None:
        dense = Delta(form=Form.DENSE, payload=self.bits[place].view(np.uint8).copy())
        assert self.memory.write(place, [dense]) == fingerprint(self.bits[place])

    def change(self, num_changed: int) -> None:
        self.weights[self.random.integers(0, NUMEL, num_changed)] *= np.float32(1.5)

    def show_next(self, num_changed: int = 20, *, prepares: bool = True) -> BitArray:
        if prepares:
            self.memory.prepare()
        for place in PLACES:
            self.change(num_changed)
            delta = move(self.bits[place], self.weights[place])
            assert self.memory.write(place, [delta]) == fingerprint(self.bits[place])
        return self.memory.show()


def place_of(bits: BitArray) -> int:
    return int(bits.__array_interface__["data"][0])


def test_few_changes_are_made_in_the_memory_of_the_version_before_last() -> None:
    writer = Writer(0)
    shown = writer.memory.show()
    places = [place_of(shown)]
    for _ in range(6):
        shown = writer.show_next()
        np.testing.assert_array_equal(shown, writer.bits)
        places.append(place_of(shown))
    assert len(set(places[1:])) == 2, "each version is in memory of its own"
    assert all(earlier != later for earlier, later in itertools.pairwise(places))


@pytest.mark.parametrize("seed", range(20))
def test_a_version_that_somebody_has_is_never_changed(seed: int) -> None:
    writer, draw = Writer(seed), random.Random(seed)
    kept: list[tuple[object, bytes]] = []
    for _ in range(30):
        shown = writer.show_next(draw.choice((0, 3, 200)), prepares=draw.random() < 0.5)
        np.testing.assert_array_equal(shown, writer.bits)
        part = draw.choice((shown[5:50], memoryview(shown)[5:50], shown.reshape(40, 100)[3].T))
        if draw.random() < 0.5:
            kept.append((part, bytes(part)))
        for held, content in kept:
            assert bytes(held) == content  # type: ignore[call-overload]
        if draw.random() < 0.3:
            kept.clear()
        del shown, part


def test_a_damaged_delta_is_not_applied_again() -> None:
    writer = Writer(3)
    for _ in range(3):
        writer.memory.show()
        writer.change(10)
        writer.bits = round_to_bf16(writer.weights)
        with pytest.raises(DecodeError):
            writer.memory.write(
                PLACES[0], [Delta(form=Form.SPARSE, payload=np.ones(3, dtype=np.uint8))]
            )
        for place in PLACES:
            writer.write_whole(place)
        np.testing.assert_array_equal(writer.memory.show(), writer.bits)
        for _ in range(3):
            np.testing.assert_array_equal(writer.show_next(), writer.bits)
