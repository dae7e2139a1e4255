"""Compressors by name. A new one is one file here and one line in `COMPRESSORS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pscore.compressors.base import Compressor
from pscore.compressors.bf16 import BF16
from pscore.compressors.dgc import DGC
from pscore.compressors.fp16 import FP16
from pscore.compressors.int8 import Int8
from pscore.compressors.natural import Natural
from pscore.compressors.none import NoCompression
from pscore.compressors.one_bit import OneBit
from pscore.compressors.qsgd import QSGD
from pscore.compressors.randomk import RandomK
from pscore.compressors.sparseloco import SparseLoCo
from pscore.compressors.terngrad import TernGrad
from pscore.compressors.topk import TopK
from pscore.compressors.two_bit import TwoBit
from pscore.plugins import make_plugin, parse_plugin

COMPRESSORS: dict[str, type[Compressor]] = {
    compressor.name: compressor
    for compressor in (
        NoCompression,
        FP16,
        BF16,
        Int8,
        TwoBit,
        OneBit,
        QSGD,
        TernGrad,
        TopK,
        RandomK,
        DGC,
        Natural,
        SparseLoCo,
    )
}

__all__ = ["COMPRESSORS", "Compressor", "make_compressor", "parse_compressor"]


def make_compressor(name: str, arguments: Mapping[str, Any]) -> Compressor:
    """Returns the compressor `name` with `arguments`; those left out have their defaults.

    Raises:
        ConfigError: No compressor has this name, or it has no such argument.
    """
    return make_plugin("compression", COMPRESSORS, name, arguments)


def parse_compressor(text: str | Compressor) -> Compressor:
    """Returns the compressor that `text` describes: `none`, `fp16` or `2bit(threshold=0.004)`.

    >>> str(parse_compressor("topk(ratio=0.001)"))
    "topk(ratio=0.001, select='exact')"

    Raises:
        ConfigError: The text does not have that form, or there is no such compressor or argument.
    """
    if isinstance(text, Compressor):
        return text
    return make_compressor(*parse_plugin("compression", text))
