"""Copies past the caches: the same bytes at any address, and no other bytes."""

import numpy as np
import pytest

from pscore.memory import kernels, streaming
from pscore.placement import WORKER, WorkerPlacement

LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 1000]


@pytest.mark.parametrize("numel", LENGTHS)
def test_a_copy_is_exact_and_changes_nothing_else(numel: int) -> None:
    source = np.random.default_rng(numel).standard_normal(numel + 40, dtype=np.float32)
    for start in range(0, 20, 3):
        for place in (0, 1, 7, 15, 16):
            out = np.full(numel + 40, 7.0, np.float32)
            part = out[place : place + numel]
            assert streaming.copy_checked(source[start : start + numel], part)
            assert np.array_equal(part, source[start : start + numel])
            assert (out[:place] == 7.0).all()
            assert (out[place + numel :] == 7.0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("numel", [1, 40, 100])
def test_nan_and_inf_are_found_at_every_place(numel: int, value: float) -> None:
    for position in range(numel):
        source = np.zeros(numel, np.float32)
        source[position] = value
        assert not streaming.copy_checked(source, np.empty(numel, np.float32))


def test_huge_and_tiny_numbers_are_finite() -> None:
    extremes = np.finfo(np.float32)
    values = np.array([extremes.max, -extremes.max, extremes.tiny, 1e-45, -0.0] * 20, np.float32)
    out = np.empty_like(values)
    assert streaming.copy_checked(values, out)
    assert np.array_equal(values.view(np.uint32), out.view(np.uint32))


@pytest.mark.parametrize("is_large", [False, True])
def test_several_arrays_are_gathered_and_the_first_bad_one_is_named(
    monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(streaming, "WORKER", WorkerPlacement(streamed_nbytes_min=0))
    flat = np.full(200, 7.0, np.float32)
    flat[100:140] = np.arange(40)  # It lies there already.
    sources = [np.arange(30, dtype=np.float32), flat[100:140], np.arange(17, dtype=np.float32) + 5]
    spans = np.array([[3, 33], [100, 140], [160, 177]])
    addresses = np.array([source.ctypes.data for source in sources])
    expected = flat.copy()
    expected[3:33], expected[160:177] = sources[0], sources[2]
    assert streaming.gather(addresses, spans, flat) == -1
    assert np.array_equal(flat, expected)
    for bad, position in ((2, 16), (1, 0), (0, 29)):
        sources[bad][position] = np.nan
        assert streaming.gather(addresses, spans, flat) == bad
    assert streaming.gather(addresses[:0], spans[:0], flat) == -1


def test_small_copies_go_through_the_cache() -> None:
    assert streaming.copier(WORKER.streamed_nbytes_min - 1) is kernels.copy_checked
    assert streaming.copier(WORKER.streamed_nbytes_min) is streaming.copy_checked
