"""One version as arrays: steps of any length, and names that a reader gives."""

from typing import Any

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.partition import make_layout
from pscore.publish.codec import round_to_bf16
from pscore.subscription.weights import STEP, STEP_DIGITS, named, step_digits, step_of
from pscore.types import TensorSpec


@pytest.mark.parametrize("step", [0, 255, 256, 10**12, (1 << 64) - 1])
def test_a_step_comes_back_from_its_digits(step: int) -> None:
    layout = make_layout([TensorSpec(name=STEP, shape=(STEP_DIGITS,), dtype="float32")], 1)
    bits = np.zeros(layout.numel, np.uint16)
    bits[:STEP_DIGITS] = round_to_bf16(step_digits(step)).view(np.uint16)
    assert step_of(layout, bits, 7) == step


@pytest.mark.parametrize("step", [-1, 1 << 64])
def test_a_step_without_digits_is_refused(step: int) -> None:
    with pytest.raises(ConfigError, match="step is"):
        step_digits(step)


def test_a_map_names_each_array_once() -> None:
    specs = [TensorSpec(name=name, shape=(2,), dtype="float32") for name in "ab"]
    layout = make_layout(specs, 1)
    bits = np.zeros(layout.numel, np.uint16)
    found = named(layout, bits, "float32", lambda name, array: [(name + "1", array), (name, array)])
    assert set(found) == {"a", "a1", "b", "b1"}
    with pytest.raises(ConfigError, match="gives 'x' to two arrays, the second of 'b'"):
        named(layout, bits, "float32", lambda name, array: [("x", array)])


@pytest.mark.parametrize("found", [None, 3, [1], ["abc"]])
def test_a_map_without_pairs_is_told_what_it_must_return(found: Any) -> None:
    layout = make_layout([TensorSpec(name="a", shape=(2,), dtype="float32")], 1)
    message = rf"map returns a {type(found).__name__} for 'a', must return pairs"
    with pytest.raises(ConfigError, match=message):
        named(layout, np.zeros(layout.numel, np.uint16), "float32", lambda *_: found)
