"""The shared loops, against NumPy, on any memory a payload may lie in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba.core.caching import CompileResultCacheImpl, IndexDataCacheFile

from pscore.memory import kernels
from pscore.types import FloatArray

ARRAYS = hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(-1e6, 1e6, width=32))
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 1000)


def random(numel: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


@kernels.kernel
def twice(value: int) -> int:
    return 2 * value


def test_a_loop_runs_where_the_disk_has_no_room_for_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def full(*_: object) -> None:
        tries.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "load", lambda *_: None)  # No code of before.
    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    assert twice(21) == 42
    assert tries


def test_a_loop_runs_where_no_folder_can_be_written_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])

    def thrice(value: int) -> int:
        return 3 * value

    def fourfold(value: int) -> int:
        return 4 * value

    kernels.warn_of_compiling.cache_clear()
    assert kernels.kernel(thrice)(7) == 21
    assert kernels.kernel(fourfold)(7) == 28
    assert len(caplog.messages) == 1
    assert "set NUMBA_CACHE_DIR" in caplog.text


@given(ARRAYS, st.sampled_from([1.0, 2.0, 0.5, 32.0, -3.0]))
@settings(max_examples=50)
def test_assigning_is_one_multiplication(source: FloatArray, scale: float) -> None:
    out = np.full_like(source, np.nan)
    kernels.assign_scaled(source, out, scale)
    assert np.array_equal(out, source * np.float32(scale))


@given(ARRAYS, st.sampled_from([1.0, 2.0, 0.1, 32.0, -3.0]))
@settings(max_examples=50)
def test_adding_is_a_product_and_a_sum_each_rounded(source: FloatArray, scale: float) -> None:
    """Not fused: the bits must not depend on the machine that a shard runs on."""
    out = random(len(source))
    expected = out + source * np.float32(scale)
    kernels.add_scaled(source, out, scale)
    assert np.array_equal(out, expected)


@given(st.integers(0, 5000), st.integers(1, 5), st.booleans())
@settings(max_examples=50)
def test_a_sum_in_one_pass_has_the_bits_of_one_after_the_other(
    numel: int, num_sources: int, in_place: bool
) -> None:
    """Also where a source is not aligned, as in a slice behind another of any length."""
    sources = [random(numel + 1, seed)[1:] for seed in range(num_sources)]
    scales = [1.0, 0.1, 3.0, -2.0, 1.0][:num_sources]
    expected = np.empty(numel, np.float32)
    kernels.assign_scaled(sources[0], expected, scales[0])
    for source, scale in zip(sources[1:], scales[1:], strict=True):
        kernels.add_scaled(source, expected, scale)
    out = sources[0] if in_place else np.full(numel, np.nan, np.float32)
    kernels.sum_all(sources, scales, out)
    assert out.tobytes() == expected.tobytes()


def test_scale_one_is_exact() -> None:
    source, out = random(100), np.zeros(100, np.float32)
    kernels.assign_scaled(source, out, 1.0)
    assert np.array_equal(out, source)


def test_the_source_is_not_changed() -> None:
    source = random(10)
    kept = source.copy()
    kernels.add_scaled(source, random(10, 1), 3.0)
    kernels.assign_scaled(source, random(10, 2), 3.0)
    assert np.array_equal(source, kept)


@pytest.mark.parametrize("numel", LENGTHS)
def test_copying_says_whether_all_is_finite(numel: int) -> None:
    source, out = random(numel), np.zeros(numel, np.float32)
    assert kernels.copy_checked(source, out)
    assert np.array_equal(out, source)
    assert kernels.all_finite(source)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("numel", [1, 17, 1000])
def test_one_bad_element_anywhere_is_found(bad: float, numel: int) -> None:
    for position in {0, numel // 2, numel - 1}:
        source = random(numel)
        source[position] = bad
        assert not kernels.all_finite(source)
        assert not kernels.copy_checked(source, np.zeros(numel, np.float32))


def test_the_largest_finite_numbers_are_finite() -> None:
    limits = np.finfo(np.float32)
    extremes = np.array([limits.max, limits.min, limits.tiny, limits.smallest_subnormal, -0.0])
    assert kernels.all_finite(extremes.astype(np.float32))


def test_read_only_and_unaligned_memory_is_read() -> None:
    """A payload lies behind a header of any length, in memory that cannot be written."""
    values = random(20)
    for shift in range(4):
        raw = bytes(shift) + values.tobytes()
        source = np.frombuffer(raw, dtype=np.float32, offset=shift)
        out = np.zeros(20, np.float32)
        kernels.assign_scaled(source, out, 2.0)
        assert np.array_equal(out, values * 2)
        kernels.add_scaled(source, out, 1.0)
        assert np.array_equal(out, values * 2 + values)
        assert kernels.all_finite(source)


def test_a_read_only_view_shares_memory_and_cannot_be_written() -> None:
    array = random(4)
    view = kernels.read_only(array)
    assert np.shares_memory(view, array)
    assert array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1.0
