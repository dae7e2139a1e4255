"""First values of rows: a pure function of the seed, the id and the position in the row.

Element j of row id is made of h = mix(hash(id) + (j + 1) GOLDEN), where hash(id) is that of
hashing.py. So a row that was never updated needs no memory, and all sides see the same bits.

    uniform(a)   a (2 u + 1 - 2^24) 2^-24 with u the top 24 bits of h: one rounding, that of the
                 product with a, and no value beyond a
    normal(std)  std (Q[h's top 12 bits] + Q[the next 12]), with Q the 4096 quantiles of a normal
                 distribution, of variance 1/2; at most 5 standard deviations
    zeros        0

A bound on the norm is applied as torch does at a lookup: w *= max_norm / (norm + 1e-7).
"""

from __future__ import annotations

import math
import re
from statistics import NormalDist
from typing import NamedTuple

import numba
import numpy as np

from pscore.errors import ConfigError
from pscore.memory.kernels import kernel
from pscore.rows.hashing import GOLDEN, IdArray, mask_of, mix
from pscore.types import FloatArray

QUANTILE_BITS = 12
ZEROS, UNIFORM, NORMAL = 0, 1, 2
SCALE_MAX = 1e6
NORM_EPS = 1e-7  # As in torch's renormalisation.
U40, U52, U12 = np.uint64(40), np.uint64(52), np.uint64((1 << QUANTILE_BITS) - 1)
STEP24 = np.float32(2.0**-24)


def _quantiles() -> FloatArray:
    count = 1 << QUANTILE_BITS
    distribution = NormalDist()
    values = np.array([distribution.inv_cdf((i + 0.5) / count) for i in range(count)])
    return (values / math.sqrt(2.0 * float((values**2).mean()))).astype(np.float32)


QUANTILES = _quantiles()


class Init(NamedTuple):
    """First values, as kernels take them."""

    kind: int  # ZEROS, UNIFORM or NORMAL.
    scale: np.float32
    mask: np.uint64  # The seed's hash.
    max_norm: float  # 0: none.
    quantiles: FloatArray


def parse_init(text: str) -> tuple[int, float]:
    """Returns the kind of first values and their scale.

    Raises:
        ConfigError: The text is none of `zeros`, `uniform(a)`, `normal(std)`.
    """
    match = re.fullmatch(r"(zeros|uniform|normal)(?:\(([-+.\de]{1,32})\))?", text)
    kinds = {"zeros": ZEROS, "uniform": UNIFORM, "normal": NORMAL}
    try:
        if match is None or (match[1] == "zeros") != (match[2] is None):
            raise ValueError
        scale = 0.0 if match[2] is None else float(match[2])
        if not 0.0 <= scale <= SCALE_MAX:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"init is {text[:40]!r}, must be zeros, uniform(a) or normal(std), with a number in "
            f"0..{SCALE_MAX:g}"
        ) from None
    return kinds[match[1]], scale


def make_init(init: str, seed: int, max_norm: float = 0.0) -> Init:
    """Returns first values as kernels take them; raises ConfigError if `init` is wrong."""
    kind, scale = parse_init(init)
    return Init(kind, np.float32(scale), mask_of(seed), float(max_norm), QUANTILES)


@numba.njit(nogil=True, error_model="numpy")
def project(floats, base, dim, max_norm):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Scales a row whose norm is above `max_norm`, if that is not 0; for kernels."""
    if max_norm > 0.0:
        total = 0.0
        for j in range(dim):
            total += float(floats[base + j]) * float(floats[base + j])
        norm = math.sqrt(total)
        if norm > max_norm:
            factor = np.float32(max_norm / (norm + NORM_EPS))
            for j in range(dim):
                floats[base + j] *= factor


@numba.njit(nogil=True, error_model="numpy")
def fill(floats, base, dim, row, init):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Writes the first values of one row, an id, from `floats[base]` on; for kernels."""
    first = mix(row ^ init.mask)
    for j in range(dim):
        value = np.float32(0.0)
        if init.kind != ZEROS:
            drawn = mix(first + np.uint64(j + 1) * GOLDEN)
            if init.kind == UNIFORM:
                unit = np.int64(drawn >> U40)
                value = np.float32(2 * unit + 1 - (1 << 24)) * STEP24 * init.scale
            else:
                one = init.quantiles[np.int64(drawn >> U52)]
                other = init.quantiles[np.int64((drawn >> U40) & U12)]
                value = (one + other) * init.scale
        floats[base + j] = value
    project(floats, base, dim, init.max_norm)


@kernel
def _fill_all(ids: IdArray, dim: int, init: Init, out: FloatArray) -> None:
    for i in range(len(ids)):
        fill(out, i * dim, dim, ids[i], init)


def initial_rows(init: str, seed: int, ids: IdArray, dim: int, max_norm: float = 0.0) -> FloatArray:
    """Returns the rows of ids that were never updated, `(n, dim) float32`.

    Args:
        init: `zeros`, `uniform(a)` or `normal(std)`.
        ids: `(n,) uint64`.
        max_norm: Largest norm; 0: none.

    Raises:
        ConfigError: `init` is wrong.
    """
    ids = np.ascontiguousarray(ids, np.uint64)
    out = np.empty(len(ids) * dim, np.float32)
    _fill_all(ids, dim, make_init(init, seed, max_norm), out)
    return out.reshape(len(ids), dim)
