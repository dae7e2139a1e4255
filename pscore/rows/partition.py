"""The assignment of rows to buckets, of buckets to slices, and of slices to shards.

The top 12 bits of an id's hash are its bucket. A slice owns a range of buckets, which moves as a
unit when a checkpoint is loaded on another number of shards; ranges differ by one bucket at most.
"""

from __future__ import annotations

import numpy as np

from pscore.rows.hashing import IdArray, hashes
from pscore.types import IntArray

BUCKET_BITS = 12
BUCKETS = 1 << BUCKET_BITS


def buckets_of(ids: IdArray, seed: int) -> IntArray:
    """Returns the bucket of each id, `(n,) int64`."""
    return (hashes(ids, seed) >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def slices_of(ids: IdArray, seed: int, num_slices: int) -> IntArray:
    """Returns the index of the slice that owns each id, `(n,) int64`."""
    return buckets_of(ids, seed) * num_slices >> BUCKET_BITS


def bucket_range(index: int, num_slices: int) -> tuple[int, int]:
    """Returns the first bucket of a slice, and that behind its last one."""
    return -(-index * BUCKETS // num_slices), -(-(index + 1) * BUCKETS // num_slices)


def shares_of(rows: int, buckets: range, least: int = 0) -> IntArray:
    """Returns the share of each bucket in the rows of all, `(len(buckets),) int64`.

    Args:
        rows: Rows of all buckets.
        buckets: Those of which the shares are wanted.
        least: The smallest share.
    """
    edges = np.arange(buckets.start, buckets.stop + 1) * rows // BUCKETS
    shares: IntArray = np.maximum(np.diff(edges), least)
    return shares
