"""The float32 elements in which a tensor of any dtype travels, so that its sum is exact.

Shards add in float32 alone. Before it travels a tensor is widened, which changes no value:

| dtype | widened to | travels as |
|---|---|---|
| float32, float16, bfloat16, float8 | float32 | its values |
| complex64 | pairs of float32 | its values |
| integers, bool | int64 | its bytes |
| float64, complex128 | float64 | its bytes |

Bytes travel two in an element, as a whole number that float32 holds, and in rows: each worker has a
row of its own, so the shards add nothing to it, and every worker adds up the rows. The sum costs
the memory of 2 tensors of 8-byte elements for each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from pscore.errors import ConfigError

WORDS = 4  # Elements of float32 with the bytes of an int64 or float64.
WIDE = {torch.int64: np.int64, torch.float64: np.float64}
HALF = 32  # Bits of a half of an int64.


@dataclass(frozen=True, slots=True)
class Lanes:
    """The way in which tensors of one shape and one widened dtype travel."""

    shape: torch.Size  # Shape of the tensors.
    wide: torch.dtype  # `torch.float32`, `float64` or `int64`, in which they are added up.
    is_complex: bool  # Whether a tensor is complex; it is then widened to pairs of real numbers.
    rows: int  # Number of rows of bytes; 1: only one worker ever sends anything but zeros.

    @classmethod
    def of(cls, like: torch.Tensor, rows: int) -> Lanes:
        """Returns the way in which tensors of this shape and dtype travel.

        Raises:
            ConfigError: The tensor is sparse or quantized, or has no memory.
        """
        if like.is_meta:
            raise ConfigError("a tensor is on meta, and has no values")
        if like.layout != torch.strided or like.is_quantized:
            raise ConfigError(
                f"a tensor is {like.dtype} with layout {like.layout}; exchange its dense values, "
                "tensor.to_dense() or tensor.dequantize()"
            )
        if like.is_complex():
            wide = torch.float64 if like.dtype == torch.complex128 else torch.float32
        elif like.is_floating_point():
            wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        else:
            wide = torch.int64
        return cls(like.shape, wide, like.is_complex(), rows)

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the float32 elements that travel."""
        shape = (*self.shape, *((2,) if self.is_complex else ()))
        return (shape or (1,)) if self.wide == torch.float32 else (self.rows, *shape, WORDS)

    @property
    def numel(self) -> int:
        """Number of the elements that travel."""
        return math.prod(self.sent_shape)

    def widen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the values of a tensor on the host, flat, in the widened dtype."""
        values = tensor.detach()
        if self.is_complex:
            pair = torch.complex128 if self.wide == torch.float64 else torch.complex64
            values = torch.view_as_real(values.to(pair).resolve_conj())
        return values.to(device="cpu", dtype=self.wide).reshape(-1)

    def none(self) -> torch.Tensor:
        """Returns widened values that change no sum: -0.0, as 0.0 changes the sign of -0.0."""
        shape = (*self.shape, *((2,) if self.is_complex else ()))
        value = -0.0 if self.wide == torch.float32 else 0
        return torch.full((math.prod(shape),), value, dtype=self.wide)

    def write(self, values: torch.Tensor, row: int, out: torch.Tensor) -> None:
        """Writes widened values into the elements that travel; the other rows keep theirs.

        Args:
            values: Result of `widen`.
            row: The row of the worker that sends them.
            out: `(numel,) float32`.
        """
        if self.wide == torch.float32:
            out.copy_(values)
        else:
            words = values.numpy().view(np.uint16)
            out.view(self.rows, -1)[row] = torch.from_numpy(words.astype(np.float32))

    def read(self, sent: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the sum of the rows, flat, in the widened dtype.

        Args:
            sent: `(numel,) float32`, the sum of the elements of all workers.

        Raises:
            ConfigError: The sum is beyond int64.
        """
        if self.wide == torch.float32:
            return sent.clone()
        words = sent.numpy().astype(np.uint16).reshape(self.rows, -1)
        rows = torch.from_numpy(words.view(WIDE[self.wide]))
        if self.rows == 1:
            return rows[0]
        if self.wide == torch.int64 and _is_beyond_int64(rows):
            raise ConfigError(f"the sum of {name!r} is beyond int64; exchange tensor.double()")
        return rows.sum(0)

    def narrow(self, values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Returns flat, widened values in the tensors' shape and a dtype of theirs.

        Args:
            dtype: A dtype that is widened to the same.

        Raises:
            ConfigError: An integer is beyond the dtype.
        """
        if self.is_complex:
            return torch.view_as_complex(values.view(*self.shape, 2)).to(dtype)
        narrow = values.to(dtype)
        if self.wide == torch.int64 and not torch.equal(narrow.to(torch.int64), values):
            raise ConfigError(
                f"the sum of {name!r} is beyond {dtype}, the dtype of its tensors; exchange "
                "tensor.long()"
            )
        return narrow.view(self.shape)


def _is_beyond_int64(rows: torch.Tensor) -> bool:
    """Returns whether a sum over rows of int64 is beyond its range, somewhere."""
    low = (rows & ((1 << HALF) - 1)).sum(0)
    high = (rows >> HALF).sum(0) + (low >> HALF)
    limit = 1 << (HALF - 1)
    return bool(((high < -limit) | (high >= limit)).any())
