"""Compressed pulls: an estimate of the weights that all workers hold, for both sides.

EF21-P of Kaja Gruntkowska, Alexander Tyurin and Peter Richtarik, "EF21-P and Friends: Improved
Theoretical Communication Complexity for Distributed Optimization with Bidirectional Compression",
ICML 2023, arXiv:2209.15218. W are the weights on the shard, X the estimate, C compresses:

    shard    u = W - X;  send C(u);  X <- X + D(C(u))        worker    X <- X + D(C(u))

The difference W - X takes the place of a residual: this is error feedback by construction. X has
the same bits on the shard and on every worker, because all of them add the same payloads in the
same order. Its fingerprint names it: a worker states the X that it holds, the shard sends the
deltas from there on, and both compare the fingerprints of the result.

Differs from the paper: X moves when a worker asks, not with each update; a worker that lacks too
many deltas, or has another fingerprint, gets X whole; optimizers other than plain SGD run on W.
"""

from __future__ import annotations

import xxhash

from pscore.compressors import parse_compressor
from pscore.compressors.base import Compressor
from pscore.compressors.qsgd import CONTRACTING_MIN
from pscore.errors import ConfigError
from pscore.net.wire import as_bytes
from pscore.types import FloatArray

DELTAS_MAX = 64  # Deltas in one answer; a worker that is further behind gets the estimate whole.
ESTIMATE_ARRAYS = 4  # On the shard, as long as the weights: X, W - X, and at most two for deltas.


def fingerprint(values: FloatArray) -> int:
    """Returns XXH3-64 of `(numel,) float32`; never 0, which means none."""
    return xxhash.xxh3_64_intdigest(as_bytes(values)) or 1


def parse_pull_compressor(text: str | Compressor) -> Compressor:
    """Returns the compressor of pulls that `text` describes.

    Raises:
        ConfigError: There is no such compressor, or it cannot compress pulls.
    """
    compressor = parse_compressor(text)
    require_for_pulls(compressor)
    return compressor


def require_for_pulls(compressor: Compressor) -> None:
    """Refuses a compressor that cannot compress pulls.

    Raises:
        ConfigError: The difference W - X is unbounded: the compressor keeps more than a residual,
            or none, or adds more noise than it removes.
    """
    if compressor.is_raw or compressor.bounds_residual:
        return
    raise ConfigError(
        f"pull_compression is {str(compressor)!r}, must be a compressor with a bounded residual: "
        "fp16, bf16, int8, 2bit, 1bit, topk, randomk, pulseloco, natural(feedback=True), "
        f"sparseloco(decay=1), or qsgd(feedback=True) with {CONTRACTING_MIN} levels or more"
    )
