"""Loops over the ids of a batch, beside numpy's and torch's own ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pscore.rows.batches import add_rows, distinct, divide
from pscore.rows.partition import slices_of

BOUNDS = {"few": 3, "many": 900, "of 64 bits": 1 << 62}


def ids_of(num: int, bound: int) -> np.ndarray:
    return np.random.default_rng(num).integers(-bound, bound, num).view(np.uint64)


@pytest.mark.parametrize("num", [0, 1, 5000])
@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_distinct_ids_are_numpys_without_the_padding(
    num: int, bound: int, padding: int | None
) -> None:
    batch = ids_of(num, bound)
    ids, counts, places = distinct(batch, padding)
    is_kept = np.ones(num, np.bool_) if padding is None else batch.view(np.int64) != padding
    wanted = np.unique(batch[is_kept], return_inverse=True, return_counts=True)
    for found, values in zip((ids, places[is_kept], counts), wanted, strict=True):
        np.testing.assert_array_equal(found, values)
    assert (places[~is_kept] == len(ids)).all()


@pytest.mark.parametrize("num_slices", [1, 3, 64])
def test_a_slice_has_the_positions_of_its_ids_in_their_order(num_slices: int) -> None:
    ids = np.unique(ids_of(3000, 1 << 62))
    order, edges = divide(ids, 7, num_slices)
    owners = slices_of(ids, 7, num_slices)
    for index in range(num_slices):
        found = order[edges[index] : edges[index + 1]]
        np.testing.assert_array_equal(found, np.flatnonzero(owners == index))


def test_sums_of_rows_have_the_bits_of_torchs_embedding() -> None:
    drawn = torch.Generator().manual_seed(0)
    places = torch.randint(11, (500,), generator=drawn)  # Row 10 is the padding.
    grad = torch.randn(500, 7, generator=drawn)
    out = np.zeros((11, 7), np.float32)
    add_rows(grad.numpy(), places.numpy(), out)
    wanted = torch.ops.aten.embedding_dense_backward(grad, places, 11, 10, False)
    assert np.array_equal(out, wanted.numpy())
