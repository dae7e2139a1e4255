"""Slices that hold parts of a flat vector: the parameters of a model, as most tables do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pscore.compressors.base import Compressor
from pscore.content import Content, Stepping
from pscore.errors import ConfigError, DecodeError
from pscore.optimizers import OPTIMIZERS
from pscore.partition import Layout, make_layout
from pscore.types import ByteArray, SliceSpec, TensorSpec

FLOAT_NBYTES = 4


@dataclass(frozen=True)
class Flat(Content):
    """Parts of one flat vector of float32.

    Attributes:
        long: Whether slices have up to 16 MiB of weights, within one host (pscore/partition.py).
    """

    name = "flat"
    request_nbytes_max = 0  # A pull asks for the whole slice: it needs no payload.
    long: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the content that `arguments` describes.

        Raises:
            ConfigError: There is another argument than `long`, or that is not True or False.
        """
        is_long = arguments.get("long", False)
        if arguments.keys() - {"long"} or not isinstance(is_long, bool):
            raise ConfigError(f"content 'flat' has no arguments {dict(arguments)!r}")
        return cls(long=is_long)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `of`."""
        return {"long": True} if self.long else {}

    def layout(self, tensors: Sequence[TensorSpec], num_shards: int) -> Layout:
        """Returns the slices of a flat vector (pscore/partition.py)."""
        return make_layout(tensors, num_shards, is_long=self.long)

    def optimizer(self, name: str) -> Stepping:
        """Returns an optimizer on flat slices (pscore/optimizers)."""
        return OPTIMIZERS.require(name)()

    def read_request(self, data: ByteArray, part: SliceSpec, layout: Layout) -> object:
        """Raises DecodeError if there is a payload."""
        if data.nbytes:
            raise DecodeError(f"a pull with {data.nbytes} bytes of payload, none wanted")
        return None

    def push_nbytes_max(self, part: SliceSpec, optimizer: Stepping, compressor: Compressor) -> int:
        """Returns the bytes of a compressed gradient, or of weights and state if those are more."""
        arrays_nbytes = (1 + len(optimizer.state_names)) * FLOAT_NBYTES * part.numel
        return max(compressor.payload_nbytes_max(part.numel), arrays_nbytes)

    def weights_nbytes(self, parts: Sequence[SliceSpec], layout: Layout) -> int:
        """Returns four bytes for each element."""
        return sum(FLOAT_NBYTES * part.numel for part in parts)

    def memory_nbytes(
        self, parts: Sequence[SliceSpec], layout: Layout, optimizer: Stepping, num_arrays: int
    ) -> int:
        """Returns the bytes of all arrays."""
        return num_arrays * self.weights_nbytes(parts, layout)
