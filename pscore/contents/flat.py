"""Slices that hold parts of a flat vector: the parameters of a model, as most tables do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pscore.compressors.base import Compressor
from pscore.content import Content, Stepping
from pscore.errors import ConfigError, DecodeError
from pscore.optimizers import OPTIMIZERS
from pscore.partition import Layout, make_layout
from pscore.types import ByteArray, SliceSpec, TensorSpec

FLOAT_NBYTES = 4
SLICE_MIB_LEAST, SLICE_MIB_MOST = 4, 16  # A frame holds a slice of 16 MiB with three arrays of state.
MIB_NUMEL = (1 << 20) // FLOAT_NBYTES


@dataclass(frozen=True)
class Flat(Content):
    """Parts of one flat vector of float32.

    Attributes:
        slice_mib: The most MiB of weights in a slice; 0: pscore/partition.py chooses, 4 at most.
    """

    name: ClassVar[str] = "flat"
    slice_mib: int = 0

    def __post_init__(self) -> None:
        """Checks the length.

        Raises:
            ConfigError: It is no length that a slice may have.
        """
        least, most, given = SLICE_MIB_LEAST, SLICE_MIB_MOST, self.slice_mib
        if type(given) is not int or (given and not least <= given <= most):
            raise ConfigError(f"slice_mib is {given!r}, must be an integer in {least}..{most}")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the content that `arguments` describes.

        Raises:
            ConfigError: One of them is unknown or wrong.
        """
        if unknown := arguments.keys() - {"slice_mib"}:
            raise ConfigError(f"content 'flat' has no arguments {', '.join(sorted(unknown))}")
        return cls(**arguments)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `of`."""
        return {"slice_mib": self.slice_mib} if self.slice_mib else {}

    def layout(self, tensors: Sequence[TensorSpec], num_shards: int) -> Layout:
        """Returns the slices of a flat vector (pscore/partition.py)."""
        return make_layout(tensors, num_shards, slice_numel=self.slice_mib * MIB_NUMEL)

    def optimizer(self, name: str) -> Stepping:
        """Returns an optimizer on flat slices (pscore/optimizers)."""
        return OPTIMIZERS.require(name)()

    @property
    def request_nbytes_max(self) -> int:
        """A pull asks for the whole slice: it needs no payload."""
        return 0

    def read_request(self, data: ByteArray, part: SliceSpec, layout: Layout) -> object:
        """Refuses a payload.

        Raises:
            DecodeError: There is one.
        """
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
