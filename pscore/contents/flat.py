"""Slices that hold parts of a flat vector: the parameters of a model, as most tables do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pscore.compressors.base import Compressor
from pscore.content import Content, Stepping
from pscore.errors import ConfigError, DecodeError
from pscore.optimizers import OPTIMIZERS
from pscore.partition import ALIGNMENT, SLICE_NUMEL_MAX, SLICE_NUMEL_MIN, Layout, make_layout
from pscore.types import ByteArray, SliceSpec, TensorSpec

FLOAT_NBYTES = 4


@dataclass(frozen=True)
class Flat(Content):
    """Parts of one flat vector of float32.

    Attributes:
        long: Whether slices have up to 16 MiB of weights, for shared memory (pscore/partition.py).
        numel: Elements of a slice, where a job wants short ones; 0: as the model's size says.
    """

    name: ClassVar[str] = "flat"
    long: bool = False
    numel: int = 0

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the content that `arguments` describes.

        Raises:
            ConfigError: There is another argument, `long` is not True or False, or `numel` not 0 or
                a length that a slice can have.
        """
        is_long, numel = arguments.get("long", False), arguments.get("numel", 0)
        is_known = arguments.keys() <= {"long", "numel"} and isinstance(is_long, bool)
        if not is_known or type(numel) is not int or not _is_length(numel):
            raise ConfigError(f"content 'flat' has no arguments {dict(arguments)!r}")
        return cls(long=is_long, numel=numel)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `of`."""
        given: dict[str, Any] = {"long": True} if self.long else {}
        return given | ({"numel": self.numel} if self.numel else {})

    def layout(self, tensors: Sequence[TensorSpec], num_shards: int) -> Layout:
        """Returns the slices of a flat vector (pscore/partition.py)."""
        return make_layout(tensors, num_shards, is_long=self.long, per_slice=self.numel)

    def optimizer(self, name: str) -> Stepping:
        """Returns an optimizer on flat slices (pscore/optimizers)."""
        return OPTIMIZERS.require(name)()

    @property
    def request_nbytes_max(self) -> int:
        """A pull asks for the whole slice: it needs no payload."""
        return 0

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


def _is_length(numel: int) -> bool:
    return not numel or (SLICE_NUMEL_MIN <= numel <= SLICE_NUMEL_MAX and numel % ALIGNMENT == 0)
