"""One version of published weights, as numpy arrays."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pscore.errors import ConfigError
from pscore.partition import Layout
from pscore.publish.codec import BitArray, widen
from pscore.subscription.assembly import WeightsVersion
from pscore.types import TensorSpec

Array = npt.NDArray[Any]
Map = Callable[[str, Array], Iterable[tuple[str, Array]]]
STEP = "paceline.step"  # The tensor that a `Publisher` adds: its step in digits of base 256.
STEP_DIGITS = 8
DTYPES = ("float32", "float16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """One version of all tensors. Its memory is its own: no later version changes it.

    Attributes:
        version: Its identity.
        step: Steps of training behind it.
        exact: Whether all tensors are of one step; not in an asynchronous mode.
        arrays: The tensors by name, read only; bfloat16 as `uint16`, its bits.
        bits: All of them, `(layout.numel,) uint16`.
        layout: The place of each tensor in `bits`.
    """

    version: WeightsVersion
    step: int
    exact: bool
    arrays: Mapping[str, Array]
    bits: BitArray
    layout: Layout
    _taken_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Seconds since this version was taken."""
        return time.monotonic() - self._taken_s


def step_digits(step: int) -> npt.NDArray[np.float32]:
    """Returns a step as the tensor `STEP`: its digits are exact in bfloat16.

    Raises:
        ConfigError: It has no such digits.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 8 * STEP_DIGITS:
        raise ConfigError(f"step is {step!r}, must be a whole number from 0 on, below 2^64")
    return np.frombuffer(number.to_bytes(STEP_DIGITS, "little"), np.uint8).astype(np.float32)


def tensors_of(layout: Layout) -> list[tuple[TensorSpec, int]]:
    """Returns the tensors of a model, each with its place in the flat vector."""
    places = zip(layout.tensors, layout.offsets, strict=True)
    return [(spec, begin) for spec, begin in places if spec.name != STEP]


def step_of(layout: Layout, bits: BitArray, step: int) -> int:
    """Returns the step that a `Publisher` has given a version; else `step`, the shards' own."""
    for spec, begin in zip(layout.tensors, layout.offsets, strict=True):
        if spec.name == STEP:
            digits = np.empty(STEP_DIGITS, dtype=np.float32)
            widen(bits[begin : begin + STEP_DIGITS], digits)
            return int.from_bytes(digits.astype(np.uint8).tobytes(), "little")
    return step


def named(layout: Layout, bits: BitArray, dtype: str, mapping: Map | None) -> dict[str, Array]:
    """Returns the tensors of a version by name, read only.

    Args:
        layout: The place of each.
        bits: `(layout.numel,) uint16`.
        dtype: `float32`, `float16` or `bf16`, which is given as its bits, `uint16`.
        mapping: Called with each name and array; returns those that take its place. None: each
            stays as it is.

    Raises:
        ConfigError: The mapping gives two arrays one name, or no pairs.
    """
    flat: Array = bits
    if dtype != "bf16":
        flat = np.empty(len(bits), dtype=np.float32)
        widen(bits, flat)
        flat = flat.astype(dtype, copy=False)
    flat = flat.view()
    flat.flags.writeable = False
    arrays: dict[str, Array] = {}
    for spec, begin in tensors_of(layout):
        array = flat[begin : begin + spec.numel].reshape(spec.shape)
        found = [(spec.name, array)] if mapping is None else mapping(spec.name, array)
        for name, given in _pairs(found, spec.name):
            if name in arrays:
                raise ConfigError(f"map gives {name!r} to two arrays, the second of {spec.name!r}")
            arrays[name] = given
    return arrays


def _pairs(found: Any, name: str) -> list[tuple[str, Array]]:
    """Returns the result of a mapping as pairs; raises ConfigError if it has none."""
    try:
        return [(each, array) for each, array in found]
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"map returns a {type(found).__name__} for {name!r}, must return pairs of a name and "
            "an array, in a list"
        ) from problem


def require_dtype(dtype: str) -> None:
    """Raises ConfigError for a dtype that arrays cannot have."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
