"""Compressors by name. A new one is one file here and one line in `own.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pscore.compressors import own
from pscore.compressors.base import Compressor as Compressor
from pscore.compressors.own import *  # noqa: F403
from pscore.plugins import make_plugin, parse_plugin
from pscore.registry import Registry, classes_of

COMPRESSORS: Registry[Compressor] = Registry(
    "compression", "paceline.compressors", Compressor, classes_of(own, Compressor)
)


def make_compressor(name: str, arguments: Mapping[str, Any]) -> Compressor:
    """Returns the compressor `name` with `arguments`; those left out have their defaults.

    Raises:
        ConfigError: No compressor has this name, or it has no such argument.
    """
    return make_plugin(COMPRESSORS, name, arguments)


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
