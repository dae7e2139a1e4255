"""A worker's cache of rows: which are pulled, and the bound of their age."""

import numpy as np
import pytest

from pscore.errors import ConfigError
from psworker.rows.cache import RowCache


class Shard:
    """Rows that change at every step: each holds its id and the step."""

    def __init__(self) -> None:
        self.step = 0
        self.pulled: list[int] = []

    def pull(self, ids: np.ndarray, out: np.ndarray) -> None:
        self.pulled += ids.tolist()
        out[:, 0], out[:, 1] = ids, self.step


def read(cache: RowCache, shard: Shard, ids: list[int]) -> np.ndarray:
    out = np.empty((len(ids), 2), np.float32)
    shard.pulled.clear()
    cache.read(np.array(ids, np.uint64), out, shard.step, shard.pull)
    assert out[:, 0].tolist() == ids
    return shard.step - out[:, 1]


def test_a_row_is_used_again_for_so_many_steps_and_no_more() -> None:
    cache, shard = RowCache(rows=8, staleness=2), Shard()
    ages = []
    for step in range(7):
        shard.step = step
        ages.append(read(cache, shard, [5])[0])
    assert ages == [0, 1, 2, 0, 1, 2, 0]
    assert (cache.num_hits, cache.num_misses) == (4, 3)


def test_ages_never_pass_the_bound_and_memory_never_the_size() -> None:
    cache, shard = RowCache(rows=20, staleness=3), Shard()
    rng = np.random.default_rng(0)
    for step in range(200):
        shard.step = step
        ids = rng.permutation(rng.choice(60, size=12, replace=False, p=np.full(60, 1 / 60)))
        assert read(cache, shard, ids.tolist()).max() <= 3
        assert len(cache) <= 20
    assert cache.num_hits > 200


def test_rows_used_longest_ago_make_room() -> None:
    cache, shard = RowCache(rows=3, staleness=100), Shard()
    for step, ids in enumerate([[1, 2, 3], [1, 3], [4]]):
        shard.step = step
        read(cache, shard, ids)
    read(cache, shard, [1, 3, 4])
    assert shard.pulled == []
    read(cache, shard, [2])
    assert shard.pulled == [2]
    cache.clear()
    read(cache, shard, [4])
    assert shard.pulled == [4]


def test_a_batch_larger_than_the_cache_is_read_all_the_same() -> None:
    cache, shard = RowCache(rows=2, staleness=1), Shard()
    read(cache, shard, [9, 1, 5, 7])
    assert len(cache) == 2


def test_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match="staleness=0, must be 1 or more"):
        RowCache(rows=1, staleness=0)
