"""Hashes, buckets and first values of rows."""

import hashlib
import statistics

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.rows.hashing import hashes, mask_of, mix64
from pscore.rows.init import QUANTILES, initial_rows
from pscore.rows.partition import BUCKETS, bucket_range, buckets_of, slices_of

IDS = np.array([0, 1, 7, 1 << 53, (1 << 53) + 1, (1 << 64) - 1], np.uint64)


def test_the_hash_is_that_of_splitmix64() -> None:
    """The first numbers of its generator, seeds 0 and 1234567: published test values."""
    golden = 0x9E3779B97F4A7C15
    states = [golden, 1234567 + golden, 1234567 + 2 * golden]
    wanted = [0xE220A8397B1DCDAF, 6457827717110365317, 3203168211198807973]
    assert mix64(np.array([s % (1 << 64) for s in states], np.uint64)).tolist() == wanted


def test_ids_beyond_what_a_float_holds_are_different_rows() -> None:
    """One of the systems that were read passes ids as float32, another as float64."""
    assert len(set(hashes(IDS, 3).tolist())) == len(IDS)
    rows = initial_rows("normal(1)", 3, IDS, 4)
    assert len({row.tobytes() for row in rows}) == len(IDS)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 7])
def test_each_bucket_has_one_slice_and_each_slice_one_range(num_slices: int) -> None:
    ranges = [bucket_range(index, num_slices) for index in range(num_slices)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == BUCKETS
    ids = np.arange(5000, dtype=np.uint64)
    buckets, owners = buckets_of(ids, 5), slices_of(ids, 5, num_slices)
    for index, (start, stop) in enumerate(ranges):
        inside = (start <= buckets) & (buckets < stop)
        np.testing.assert_array_equal(inside, owners == index)


MILLION = np.arange(1_000_000)


@pytest.mark.parametrize("ids", [MILLION, MILLION * 1_000_003, MILLION << 12, -MILLION])
@pytest.mark.parametrize("num_slices", [2, 3, 4])
def test_each_shard_has_its_share_of_a_million_rows_within_one_percent(
    ids: np.ndarray, num_slices: int
) -> None:
    """Six standard deviations are 1.0 %; ranges of buckets differ by 0.1 % at most."""
    owners = np.bincount(slices_of(ids.astype(np.uint64), 0, num_slices), minlength=num_slices)
    share = len(ids) / num_slices
    assert abs(owners - share).max() <= 0.01 * share


def test_first_values_have_golden_bits() -> None:
    def digest(values: np.ndarray) -> str:
        return hashlib.sha256(values.tobytes()).hexdigest()[:16]

    assert digest(QUANTILES) == "72378d3fe3424cfc"
    assert digest(initial_rows("normal(0.5)", 1, IDS, 5)) == "1f657abd4fe68f1a"
    assert digest(initial_rows("uniform(0.01)", 1, IDS, 5)) == "b9d08e700951f2db"
    assert not initial_rows("zeros", 1, IDS, 5).any()


def test_first_values_depend_on_seed_id_and_position_alone() -> None:
    rows = initial_rows("uniform(1)", 9, IDS, 6)
    np.testing.assert_array_equal(rows[2:3], initial_rows("uniform(1)", 9, IDS[2:3], 6))
    np.testing.assert_array_equal(rows[:, :3], initial_rows("uniform(1)", 9, IDS, 3))
    assert not np.array_equal(rows, initial_rows("uniform(1)", 10, IDS, 6))


def test_a_uniform_value_has_one_rounding() -> None:
    draws = mix64(mix64(IDS ^ mask_of(9)) + np.uint64(0x9E3779B97F4A7C15))
    exact = [(2 * (int(draw) >> 40) + 1 - (1 << 24)) / (1 << 24) for draw in draws]
    wanted = np.array(exact, np.float32) * np.float32(0.3)
    np.testing.assert_array_equal(initial_rows("uniform(0.3)", 9, IDS, 1)[:, 0], wanted)


def test_normal_values_are_normal() -> None:
    values = np.sort(initial_rows("normal(2)", 0, np.arange(4096, dtype=np.uint64), 4).ravel())
    normal = statistics.NormalDist(0.0, 2.0)
    wanted = np.array([normal.inv_cdf((i + 0.5) / len(values)) for i in range(len(values))])
    inner = slice(100, -100)
    np.testing.assert_allclose(values[inner], wanted[inner], atol=0.2)


def test_a_bound_on_the_norm_is_torchs() -> None:
    free = initial_rows("normal(1)", 0, IDS, 8).astype(np.float64)
    norms = np.linalg.norm(free, axis=1, keepdims=True)
    assert norms.min() < 2.5 < norms.max()
    wanted = np.where(norms > 2.5, free * 2.5 / (norms + 1e-7), free)
    np.testing.assert_allclose(initial_rows("normal(1)", 0, IDS, 8, 2.5), wanted, rtol=1e-6)


@pytest.mark.parametrize("text", ["", "ones", "uniform", "uniform()", "normal(-1)", "normal(nan)",
                                  "normal(1e9)", "zeros(1)", "uniform(1)x"])  # fmt: skip
def test_other_first_values_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be zeros"):
        initial_rows(text, 0, IDS, 1)
