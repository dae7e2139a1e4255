"""The kernels that make each compressor's payload, on memory of a device.

An encoder only starts kernels, in order, through a `Launch`; it neither waits nor reads anything
back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pscore.compressors import blocks, draw, sparse
from pscore.compressors.base import RESIDUAL, Compressor
from pscore.compressors.bf16 import BF16
from pscore.compressors.dgc import DGC, MOMENTUM
from pscore.compressors.fp16 import FP16
from pscore.compressors.int8 import Int8
from pscore.compressors.natural import Natural
from pscore.compressors.one_bit import OneBit
from pscore.compressors.qsgd import QSGD
from pscore.compressors.randomk import SEED_NBYTES, RandomK
from pscore.compressors.terngrad import TernGrad
from pscore.compressors.topk import TopK
from pscore.compressors.two_bit import FACTOR, TwoBit
from pscore.cuda.base import Encoder

THREADS = 256
EACH = 8  # Elements of a thread.
SELECT_INTS = 4
BINS = 2048
DIGITS = ((20, 11), (9, 11), (0, 9))  # Shift and width, as in `sparse.select_kth`.

# Starts a kernel by name with so many blocks of 256 threads; arguments are NumPy scalars.
Launch = Callable[[str, int, tuple[Any, ...]], None]


class KernelEncoder(Encoder):
    """Encodes one slice of a device by kernels."""

    def __init__(
        self, compressor: Compressor, numel: int, device: torch.device, launch: Launch
    ) -> None:
        """Allocates what encoding needs, once.

        Args:
            compressor: One that `can_encode`.
        """
        super().__init__(compressor, numel, device)
        self._launch = launch
        self._scratch: torch.Tensor | None = None

    def _encode(self, grad: torch.Tensor, seed: int, step: int) -> None:
        assert grad.is_contiguous()
        assert grad.data_ptr() % 16 == 0  # Kernels load four elements at once.
        if MOMENTUM not in self.state:
            start_room(self._launch, grad, self.residual, self._flags)
        ENCODERS[type(self.compressor)](self, grad, seed, step)

    # ----- arguments of kernels

    @property
    def verdict(self) -> np.uint64:
        """The flags of a number beyond float32, and of NaN or Inf in the gradient."""
        return pointer(self._flags)

    @property
    def residual(self) -> np.uint64:
        """The residual; 0 if none is kept."""
        return pointer(self.state[RESIDUAL]) if RESIDUAL in self.state else np.uint64(0)

    def at(self, offset: int) -> np.uint64:
        """Returns the address of a byte of the payload."""
        return np.uint64(self.payload.data_ptr() + offset)

    def scratch(self, num_ints: int) -> np.uint64:
        """Returns the address of `num_ints` int32 that are kept from one call to the next."""
        if self._scratch is None:
            self._scratch = torch.zeros(num_ints, dtype=torch.int32, device=self.payload.device)
        assert len(self._scratch) == num_ints
        return pointer(self._scratch)

    def blocks(self, kernel: str, *arguments: Any) -> None:
        """Starts a kernel with one block of threads for each block of elements."""
        self._launch(kernel, blocks.num_blocks(self.numel), arguments)

    def threads(self, kernel: str, count: int, *arguments: Any) -> None:
        """Starts a kernel with at least `count` threads."""
        self._launch(kernel, -(-count // THREADS), arguments)


def start_room(
    launch: Launch, grad: torch.Tensor, residual: np.uint64, flags: torch.Tensor
) -> None:
    """Starts the check of a gradient, in one pass.

    Args:
        grad: `(numel,) float32` on the device, at a multiple of 16 bytes.
        residual: Address of `(numel,) float32`; 0 if there is none.
        flags: `(2,) int32`, zeros. The first becomes 1 where float32 does not hold the sum with the
            residual, the second where the gradient holds NaN or Inf.
    """
    n = np.int32(grad.numel())
    num_blocks = blocks.num_blocks(grad.numel())
    launch("room", num_blocks, (pointer(grad), residual, n, pointer(flags)))


def pointer(tensor: torch.Tensor) -> np.uint64:
    """Returns the address of a tensor's memory."""
    return np.uint64(tensor.data_ptr())


def _head(encoder: KernelEncoder) -> int:
    return 4 * blocks.num_blocks(encoder.numel)


def _cast(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    n = np.int32(encoder.numel)
    name = encoder.compressor.name
    encoder.blocks(name, pointer(grad), encoder.residual, encoder.at(0), n, encoder.verdict)


def _two_bit(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    compressor, n = encoder.compressor, np.int32(encoder.numel)
    assert isinstance(compressor, TwoBit)
    start = (pointer(grad), encoder.residual)
    if compressor.threshold:
        threshold = np.float32(compressor.threshold)
        encoder.blocks("two_bit_fixed", *start, threshold, encoder.at(0), n, encoder.verdict)
    else:
        where = (encoder.at(0), encoder.at(_head(encoder)))
        factor = np.float32(FACTOR)
        encoder.blocks("two_bit_adapted", *start, factor, *where, n, encoder.verdict)


def _one_bit(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    where = (encoder.at(0), encoder.at(_head(encoder)), np.int32(encoder.numel), encoder.verdict)
    encoder.blocks("one_bit", pointer(grad), encoder.residual, *where)


def _int8(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    where = (encoder.at(0), encoder.at(_head(encoder)), np.int32(encoder.numel), encoder.verdict)
    encoder.blocks("int8_levels", pointer(grad), encoder.residual, *where)


def _qsgd(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    compressor = encoder.compressor
    assert isinstance(compressor, QSGD)
    levels = np.float32(compressor.levels), blocks.largest_scale(compressor.levels)
    start = (pointer(grad), encoder.residual, *levels, *draw.halves(seed))
    where = (encoder.at(0), encoder.at(_head(encoder)), np.int32(encoder.numel), encoder.verdict)
    encoder.blocks("qsgd", *start, *where)


def _terngrad(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    where = (encoder.at(0), encoder.at(_head(encoder)), np.int32(encoder.numel), encoder.verdict)
    encoder.blocks("terngrad", pointer(grad), encoder.residual, *draw.halves(seed), *where)


def _natural(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    where = (encoder.at(0), np.int32(encoder.numel), encoder.verdict)
    encoder.blocks("natural", pointer(grad), encoder.residual, *draw.halves(seed), *where)


def _randomk(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    compressor, n = encoder.compressor, np.int32(encoder.numel)
    assert isinstance(compressor, RandomK)
    k = sparse.num_sent(compressor.ratio, encoder.numel)
    signed = seed - (1 << 64) if seed >> 63 else seed
    encoder.payload[:SEED_NBYTES].view(torch.int64).fill_(signed)
    encoder.blocks("take", pointer(grad), encoder.residual, n, encoder.verdict)
    where = (n, np.int32(k), *draw.halves(seed), encoder.at(SEED_NBYTES))
    encoder.threads("randomk", k, encoder.residual, *where, encoder.verdict)


def _topk(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    compressor = encoder.compressor
    assert isinstance(compressor, TopK)
    n = np.int32(encoder.numel)
    encoder.blocks("take", pointer(grad), encoder.residual, n, encoder.verdict)
    k = sparse.num_sent(compressor.ratio, encoder.numel)
    _send_largest(encoder, k, compressor.select, np.uint64(0))


def _dgc(encoder: KernelEncoder, grad: torch.Tensor, seed: int, step: int) -> None:
    compressor = encoder.compressor
    assert isinstance(compressor, DGC)
    momentum = pointer(encoder.state[MOMENTUM])
    factors = np.float32(1.0), np.float32(compressor.momentum), np.int32(compressor.nesterov)
    for kernel in ("dgc_room", "dgc_correct"):
        where = (pointer(grad), momentum, encoder.residual)
        encoder.blocks(kernel, *where, *factors, np.int32(encoder.numel), encoder.verdict)
    k = sparse.num_sent(compressor.ratio_at(step), encoder.numel)
    _send_largest(encoder, k, compressor.select, momentum)


def _send_largest(encoder: KernelEncoder, k: int, select: str, momentum: np.uint64) -> None:
    """Starts what `sparse.encode` does, without the host knowing how many are sent."""
    n, num_blocks = np.int32(encoder.numel), blocks.num_blocks(encoder.numel)
    base = encoder.scratch(SELECT_INTS + BINS + 2 * num_blocks)
    state, bins = base, np.uint64(base + 4 * SELECT_INTS)
    above = np.uint64(bins + 4 * BINS)
    equal = np.uint64(above + 4 * num_blocks)
    limit = np.int32(min(encoder.numel, 2 * k))

    def choose(rank: int, stride: int, *, is_sample: bool, if_exceeded: bool) -> None:
        flag, residual = np.int32(if_exceeded), encoder.residual
        encoder.threads("select_begin", 1, state, bins, np.int32(rank), flag)
        for shift, width in DIGITS:
            digit = (np.int32(stride), np.int32(shift), np.int32(width), state, bins, flag)
            num_samples = -(-encoder.numel // stride)
            encoder.threads("select_count", -(-num_samples // EACH), residual, n, *digit)
            encoder.threads("select_digit", 1, state, bins, np.int32(width), flag)
        if is_sample:
            encoder.threads("select_sampled", 1, state)
        encoder.blocks("count_blocks", residual, n, state, above, equal, flag)
        where = (above, equal, np.int32(num_blocks), limit, flag)
        encoder.threads("place_blocks", 1, state, *where)

    if select == "sampled":
        rank, stride = sparse.sample_rank(k, encoder.numel), sparse.stride(encoder.numel)
        choose(rank, stride, is_sample=True, if_exceeded=False)
        choose(k, 1, is_sample=False, if_exceeded=True)
    else:
        choose(k, 1, is_sample=False, if_exceeded=False)
    where = (above, equal, encoder.at(0), encoder.verdict)
    encoder.blocks("move", encoder.residual, momentum, n, state, *where)


ENCODERS: Mapping[type[Compressor], Callable[[KernelEncoder, torch.Tensor, int, int], None]] = {
    FP16: _cast,
    BF16: _cast,
    TwoBit: _two_bit,
    OneBit: _one_bit,
    Int8: _int8,
    QSGD: _qsgd,
    TernGrad: _terngrad,
    Natural: _natural,
    TopK: _topk,
    RandomK: _randomk,
    DGC: _dgc,
}


def can_encode(compressor: Compressor) -> bool:
    """Returns whether there are kernels."""
    return type(compressor) in ENCODERS and not compressor.needs_norm
