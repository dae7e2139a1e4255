"""Encoders in plain torch, for a device without kernels: the same bytes, in more passes.

Each function is the formula of its compressor's file with torch's operations for the loops. Every
operation rounds by itself and nothing is contracted, so that the bits are the CPU's; where a sum's
order is part of the contract (`blocks.py`) it is added in that order. Nothing here waits for the
device: sizes that only it knows are counted there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pscore.compressors import blocks, sparse
from pscore.compressors.base import RESIDUAL, Compressor
from pscore.compressors.bf16 import BF16
from pscore.compressors.blocks import BLOCK, LANES, SCALE_MIN, SQUARES_MAX, SQUARES_MIN
from pscore.compressors.dgc import DGC, MOMENTUM
from pscore.compressors.fp16 import FP16
from pscore.compressors.int8 import LEVELS, ROUND, SCALE_MAX, Int8
from pscore.compressors.natural import CODE_MAX, OFFSET, Natural
from pscore.compressors.one_bit import OneBit
from pscore.compressors.qsgd import QSGD, UNIT
from pscore.compressors.randomk import SEED_NBYTES, RandomK
from pscore.compressors.sparseloco import CHUNK, INDEX_BITS, SparseLoCo, num_chunks, power_of_two
from pscore.compressors.terngrad import CLIP, TernGrad
from pscore.compressors.topk import TopK
from pscore.compressors.two_bit import FACTOR, TwoBit
from pscore.cuda.base import Encoder, is_not_finite

ABS_BITS = 0x7FFFFFFF
WORD = 0xFFFFFFFF
HALF_MAX = 65504.0
BF16_MAX = 0x7F7F
SMALLEST = float(SCALE_MIN)


class TorchEncoder(Encoder):
    """Encodes one slice by torch's own operations, on any of its devices."""

    def __init__(self, compressor: Compressor, numel: int, device: torch.device) -> None:
        """Allocates what encoding needs, once.

        Args:
            compressor: One of those in `FORMS`.
        """
        super().__init__(compressor, numel, device)
        self._num_blocks = blocks.num_blocks(numel)
        starts = BLOCK * torch.arange(self._num_blocks, dtype=torch.float64, device=device)
        self.sizes = (numel - starts).clamp(max=BLOCK)  # (num_blocks,) float64

    def _encode(self, grad: Tensor, seed: int, step: int) -> None:
        self.refused.copy_(is_not_finite(grad))
        FORMS[type(self.compressor)](self, grad, seed, step)

    @property
    def head(self) -> int:
        """Bytes of the blocks' scales."""
        return 4 * self._num_blocks

    def with_residual(self, grad: Tensor) -> Tensor:
        """Returns the sum of gradient and residual; sets the flag if it is not finite."""
        u = self.state[RESIDUAL] + grad if RESIDUAL in self.state else grad
        self.require_finite(u)
        return u

    def require_finite(self, values: Tensor) -> None:
        """Sets the flag by which `finish` reports numbers that are not finite."""
        self.bad.copy_(torch.isfinite(values).all().logical_not().view(1))

    def keep(self, name: str, values: Tensor) -> None:
        """Replaces an array of the state, if there is one and the gradient is fit to be sent."""
        if name in self.state:
            old = self.state[name]
            old.copy_(torch.where((self.refused | self.bad) != 0, old, values))

    def put(self, start: int, values: Tensor) -> None:
        """Writes values into the payload, from byte `start` on."""
        flat = values.reshape(-1)
        self.payload[start : start + flat.nbytes].view(flat.dtype).copy_(flat)

    def put_scales(self, scales: Tensor) -> None:
        """Writes the blocks' scales, `(num_blocks,) float32`."""
        self.put(0, scales)

    def in_blocks(self, u: Tensor) -> Tensor:
        """Returns `(num_blocks, 2048)`, zeros behind a short block."""
        behind = self._num_blocks * BLOCK - self.numel
        return torch.nn.functional.pad(u, (0, behind)).view(self._num_blocks, BLOCK)

    def flat(self, values: Tensor) -> Tensor:
        """Returns the output of `in_blocks` as `(numel,)`."""
        return values.reshape(-1)[: self.numel]

    def like(self, value: float, of: Tensor) -> Tensor:
        """Returns a number as a tensor: torch multiplies by a scalar's inverse to divide by it."""
        return torch.full((), value, dtype=of.dtype, device=of.device)

    def hashes(self, index: Tensor, seed: int) -> Tensor:
        """Returns `draw.bits_32` of int64 numbers, as int64."""
        low, high = seed & WORD, seed >> 32 & WORD
        x = (index * 0x9E3779B1 & WORD) ^ low
        x = x ^ x >> 16
        x = (x * 0x7FEB352D & WORD) + high & WORD
        x = x ^ x >> 15
        x = x * 0x846CA68B & WORD
        return x ^ x >> 16

    def noise(self, seed: int) -> Tensor:
        """Returns 16 bits for each element of all blocks, `(num_blocks, 2048) int32`."""
        pairs = torch.arange(self._num_blocks * BLOCK // 2, device=self.payload.device)
        words = self.hashes(pairs, seed)
        halves = torch.stack((words & 0xFFFF, words >> 16), dim=1)
        return halves.to(torch.int32).view(self._num_blocks, BLOCK)


def _fold(lanes: Tensor) -> Tensor:
    half = lanes.shape[1] // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]


def _sum(x: Tensor) -> Tensor:
    """Returns the sum of each block in the order of the contract."""
    a, b, c, d, e, f, g, h = x.view(len(x), BLOCK // LANES, LANES).unbind(1)
    return _fold(((a + b) + (c + d)) + ((e + f) + (g + h)))


def _in_range(narrow: Tensor, wide: Tensor) -> Tensor:
    """Returns sums of squares as float64: those of float32 where that holds them."""
    holds = (narrow >= float(SQUARES_MIN)) & (narrow <= float(SQUARES_MAX))
    return torch.where(holds, narrow.double(), wide)


def _column(values: Tensor) -> Tensor:
    return values.view(-1, 1)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _fp16(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    u = encoder.with_residual(grad)
    sent = u.clamp(-HALF_MAX, HALF_MAX).half()
    encoder.put(0, sent)
    encoder.keep(RESIDUAL, u - sent.float())


def _bf16(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    u = encoder.with_residual(grad)
    bits = _bits(u)
    magnitude = bits & ABS_BITS
    rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16
    upper = (bits >> 16 & 0x8000) | rounded.clamp(max=BF16_MAX)
    encoder.put(0, upper.to(torch.int16))
    encoder.keep(RESIDUAL, u - (upper << 16).view(torch.float32))


def _int8(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    u = encoder.with_residual(grad)
    x = encoder.in_blocks(u)
    limit = x.abs().amax(1)
    is_sent, most = limit >= SMALLEST, encoder.like(float(LEVELS), x)
    scale = torch.where(is_sent, (limit / most).clamp(max=float(SCALE_MAX)), 0.0)
    inverse = torch.where(is_sent, most / limit, 0.0)
    level = (x * _column(inverse) + float(ROUND)) - float(ROUND)
    encoder.put_scales(scale)
    encoder.put(encoder.head, encoder.flat(level).to(torch.int8))
    encoder.keep(RESIDUAL, u - encoder.flat(level * _column(scale)))


def _put_ternary(encoder: TorchEncoder, start: int, up: Tensor, down: Tensor) -> None:
    """Writes 2-bit codes of all blocks, and zeros up to a whole word."""
    codes = torch.where(up, 3, torch.where(down, 2, 0)).view(-1, 4)
    packed = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    encoder.put(start, packed[: 4 * -(-encoder.numel // 16)].to(torch.uint8))


def _two_bit(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    compressor = encoder.compressor
    assert isinstance(compressor, TwoBit)
    u = encoder.with_residual(grad)
    x = encoder.in_blocks(u)
    if compressor.threshold:
        start, threshold = 0, _column(encoder.like(compressor.threshold, x))
        value = threshold
    else:
        start = encoder.head
        threshold, value, scales = _adapted(encoder, x)
        encoder.put_scales(scales)
    up, down = x >= threshold, x <= -threshold
    _put_ternary(encoder, start, up, down)
    sent = torch.where(up, value, torch.where(down, -value, 0.0))
    encoder.keep(RESIDUAL, u - encoder.flat(sent))


def _adapted(encoder: TorchEncoder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each block's threshold and value, `(num_blocks, 1)`, and scales as they are sent."""
    first, second = x[:, :LANES], x[:, 1024 : 1024 + LANES]
    exact = first.double() * first.double() + second.double() * second.double()
    squares = _in_range(_fold(first * first + second * second), _fold(exact))
    sampled = encoder.sizes.clamp(max=LANES) + (encoder.sizes - 1024).clamp(0, LANES)
    threshold = (FACTOR * torch.sqrt(squares / sampled)).float()
    a, b = (
        torch.where(part.abs() >= _column(threshold), part.abs(), 0.0) for part in (first, second)
    )
    count = ((a > 0).sum(1) + (b > 0).sum(1)).float()
    narrow = _fold(a + b)
    wide = (_fold(a.double() + b.double()) / count.double()).float()
    value = torch.where(torch.isfinite(narrow), narrow / count, wide)
    limit, none = x.abs().amax(1), count == 0
    threshold, value = torch.where(none, limit, threshold), torch.where(none, limit, value)
    is_sent = value >= SMALLEST
    threshold = torch.where(is_sent, threshold, math.inf)
    return _column(threshold), _column(value), torch.where(is_sent, value, 0.0)


def _one_bit(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    u = encoder.with_residual(grad)
    x = encoder.in_blocks(u)
    narrow, wide = _sum(x.abs()), (_sum(x.abs().double()) / encoder.sizes).float()
    mean = torch.where(torch.isfinite(narrow), narrow / encoder.sizes.float(), wide)
    scale = torch.where(mean >= SMALLEST, mean, 0.0)
    is_negative = x < 0
    weights = 1 << torch.arange(7, -1, -1, device=x.device)
    packed = (is_negative.view(-1, 8) * weights).sum(1)
    encoder.put_scales(scale)
    encoder.put(encoder.head, packed[: 4 * -(-encoder.numel // 32)].to(torch.uint8))
    sent = torch.where(is_negative, _column(-scale), _column(scale))
    encoder.keep(RESIDUAL, u - encoder.flat(sent))


def _qsgd(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    compressor = encoder.compressor
    assert isinstance(compressor, QSGD)
    u = encoder.with_residual(grad)
    x = encoder.in_blocks(u)
    limit = x.abs().amax(1)
    is_sent, levels = limit >= SMALLEST, encoder.like(float(compressor.levels), x)
    most = float(blocks.largest_scale(compressor.levels))
    scale = torch.where(is_sent, (limit / levels).clamp(max=most), 0.0)
    inverse = torch.where(is_sent, levels * float(UNIT) / limit, 0.0)
    level = ((x * _column(inverse)).to(torch.int32) + encoder.noise(seed)) >> 16
    encoder.put_scales(scale)
    encoder.put(encoder.head, encoder.flat(level).to(torch.int8))
    encoder.keep(RESIDUAL, u - encoder.flat(level.float() * _column(scale)))


def _terngrad(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    u = encoder.with_residual(grad)
    x = encoder.in_blocks(u)
    squares = _in_range(_sum(x * x), _sum(x.double() * x.double()))
    clip = (CLIP * torch.sqrt(squares / encoder.sizes)).float()
    scale = torch.minimum(x.abs().amax(1), clip)
    is_sent = scale >= SMALLEST
    scale = torch.where(is_sent, scale, 0.0)
    inverse = torch.where(is_sent, encoder.like(float(UNIT), x) / scale, 0.0)
    drawn = encoder.noise(seed) < (x.abs() * _column(inverse)).to(torch.int32)
    up, down = drawn & (x >= 0), drawn & (x < 0)
    encoder.put_scales(scale)
    _put_ternary(encoder, encoder.head, up, down)
    sent = torch.where(up, _column(scale), torch.where(down, _column(-scale), 0.0))
    encoder.keep(RESIDUAL, u - encoder.flat(sent))


def _natural(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    u = encoder.with_residual(grad)
    bits, noise = _bits(u), encoder.flat(encoder.noise(seed))
    code = ((bits & ABS_BITS) + (noise << 7) >> 23) - int(OFFSET)
    code = code.clamp(0, int(CODE_MAX))
    sign = torch.where(code > 0, bits >> 24 & 0x80, 0)
    encoder.put(0, (sign | code).to(torch.uint8))
    power = (sign << 24 | code + int(OFFSET) << 23).view(torch.float32)
    encoder.keep(RESIDUAL, u - torch.where(code > 0, power, 0.0))


def _randomk(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    compressor = encoder.compressor
    assert isinstance(compressor, RandomK)
    u, n = encoder.with_residual(grad), encoder.numel
    k = sparse.num_sent(compressor.ratio, n)
    parts = torch.arange(k, device=u.device)
    first, behind = parts * n // k, (parts + 1) * n // k
    positions = first + encoder.hashes(parts, seed) % (behind - first)
    signed = seed - (1 << 64) if seed >> 63 else seed
    encoder.payload[:SEED_NBYTES].view(torch.int64).fill_(signed)
    encoder.put(SEED_NBYTES, u.gather(0, positions))
    encoder.keep(RESIDUAL, u.scatter(0, positions, 0.0))


def _topk(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    compressor = encoder.compressor
    assert isinstance(compressor, TopK)
    u = encoder.with_residual(grad)
    k = sparse.num_sent(compressor.ratio, encoder.numel)
    is_sent = _put_largest(encoder, u, k, compressor.select)
    encoder.keep(RESIDUAL, torch.where(is_sent, 0.0, u))


def _dgc(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    compressor = encoder.compressor
    assert isinstance(compressor, DGC)
    ahead, own = (compressor.momentum, 1.0) if compressor.nesterov else (1.0, 0.0)
    momentum = encoder.state[MOMENTUM] * compressor.momentum + grad * ahead
    velocity = encoder.state[RESIDUAL] + (momentum + grad * own)
    encoder.require_finite(velocity)  # It is not where the momentum is not.
    k = sparse.num_sent(compressor.ratio_at(step), encoder.numel)
    is_sent = _put_largest(encoder, velocity, k, compressor.select)
    encoder.keep(RESIDUAL, torch.where(is_sent, 0.0, velocity))
    encoder.keep(MOMENTUM, torch.where(is_sent, 0.0, momentum))


def _put_largest(encoder: TorchEncoder, u: Tensor, k: int, select: str) -> Tensor:
    """Does what `sparse.encode` does, without the host knowing how many are sent.

    Returns:
        Which elements are sent, `(numel,) bool`.
    """
    magnitude = _bits(u) & ABS_BITS
    kth = magnitude.topk(k, sorted=False).values.min()
    above, equal = magnitude > kth, (magnitude == kth) & (magnitude > 0)
    is_sent = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    if select == "sampled":
        sample = magnitude[:: sparse.stride(encoder.numel)]
        rank = sparse.sample_rank(k, encoder.numel)
        reaching = magnitude >= sample.topk(rank, sorted=False).values.min().clamp(min=2)
        is_sent = torch.where(reaching.sum() > 2 * k, is_sent, reaching)
    count = is_sent.sum()
    last = encoder.compressor.payload_nbytes_max(encoder.numel) // 4  # Behind all: not sent.
    room = torch.zeros(last + 1, dtype=torch.int32, device=u.device)
    room[:1] = count
    place = torch.where(is_sent, is_sent.cumsum(0), last)
    positions = torch.arange(encoder.numel, dtype=torch.int32, device=u.device)
    room.scatter_(0, place, positions)
    room.scatter_(0, torch.where(is_sent, place + count, last), _bits(u))
    encoder.put(0, room[:last])
    return is_sent


def _sparseloco(encoder: TorchEncoder, grad: Tensor, seed: int, step: int) -> None:
    compressor, n = encoder.compressor, encoder.numel
    assert isinstance(compressor, SparseLoCo)
    encoder.require_finite(encoder.state[RESIDUAL] + grad)
    u = encoder.state[RESIDUAL] * compressor.decay + grad
    behind = num_chunks(n) * CHUNK - n
    x = torch.nn.functional.pad(u, (0, behind)).view(-1, CHUNK)
    places, is_real = _largest_of_chunks(x, n, compressor.k)
    # A column of zeros replaces the elements that a short chunk lacks.
    chosen = torch.nn.functional.pad(x, (0, 1)).gather(1, places)
    levels, is_high = _levels_of_chunks(chosen, is_real)
    sent = torch.where(is_high, levels[:, 1:], levels[:, :1])
    sent = torch.where(chosen < 0, -sent, sent)
    count, start = compressor.num_sent(n), levels.nbytes
    encoder.put(0, levels)
    codes = (2 * (chosen < 0) + is_high.to(torch.int64)).reshape(-1)[:count]
    encoder.put(start, packed := _in_bytes(codes, 2, 4))
    encoder.put(start + len(packed), _in_bytes(places.reshape(-1)[:count], INDEX_BITS, 2))
    rest = torch.nn.functional.pad(x, (0, 1)).scatter(1, places, chosen - sent)
    encoder.keep(RESIDUAL, rest[:, :CHUNK].reshape(-1)[:n])


def _largest_of_chunks(x: Tensor, numel: int, k: int) -> tuple[Tensor, Tensor]:
    """Returns the places of the k largest of each chunk, in order, and which of them there are.

    Args:
        x: `(num_chunks, 4096) float32`.
        numel: Elements of the slice; those behind it are never chosen.
        k: Elements of a chunk that are sent.

    Returns:
        `(num_chunks, k) int64`, 4096 where a short chunk has no more, and `(num_chunks, k) bool`.
    """
    place = torch.arange(CHUNK, device=x.device)
    sizes = (numel - CHUNK * torch.arange(len(x), device=x.device)).clamp(max=CHUNK)
    magnitude = torch.where(place < _column(sizes), _bits(x) & ABS_BITS, -1)
    kth = _column(magnitude.topk(k, dim=1).values[:, -1])
    above, equal = magnitude > kth, (magnitude == kth) & (kth >= 0)
    is_sent = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    places = torch.where(is_sent, place, CHUNK).sort(dim=1).values[:, :k]
    return places, places < CHUNK


def _levels_of_chunks(chosen: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor]:
    """Returns low and high of each chunk, `(num_chunks, 2) float32`, and which elements are high.

    Args:
        chosen: `(num_chunks, k) float32`, zero where there is no element.
        is_real: Likewise, whether there is one.
    """
    sizes, width = chosen.abs(), power_of_two(chosen.shape[1])

    def mean(of: Tensor) -> Tensor:
        kept = torch.where(of, sizes, 0.0).double()
        sums = _fold(torch.nn.functional.pad(kept, (0, width - kept.shape[1])))
        return _column((sums / of.sum(1).clamp(min=1)).float())

    is_high = (sizes >= mean(is_real)) & is_real
    levels = torch.cat((mean(is_real & ~is_high), mean(is_high)), dim=1)
    return torch.where(levels >= SMALLEST, levels, 0.0), is_high


def _in_bytes(values: Tensor, width: int, group: int) -> Tensor:
    """Returns numbers of `width` bits as bytes, the first in the highest bits.

    Args:
        values: `(count,) int64`.
        width: Bits of each.
        group: Numbers that fill whole bytes together; zeros complete the last ones.
    """
    padded = torch.nn.functional.pad(values, (0, -len(values) % group)).view(-1, group)
    word = sum(padded[:, place] << width * (group - 1 - place) for place in range(group))
    num_bytes = width * group // 8
    assert isinstance(word, Tensor)
    columns = [word >> 8 * (num_bytes - 1 - place) & 0xFF for place in range(num_bytes)]
    return torch.stack(columns, dim=1).to(torch.uint8).reshape(-1)


FORMS: Mapping[type[Compressor], Callable[[TorchEncoder, Tensor, int, int], None]] = {
    FP16: _fp16,
    BF16: _bf16,
    TwoBit: _two_bit,
    OneBit: _one_bit,
    Int8: _int8,
    QSGD: _qsgd,
    TernGrad: _terngrad,
    Natural: _natural,
    TopK: _topk,
    RandomK: _randomk,
    DGC: _dgc,
    SparseLoCo: _sparseloco,
}
