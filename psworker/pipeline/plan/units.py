"""Bandwidths and sizes of memory as people write them: `1gbit`, `16g`."""

from __future__ import annotations

import math
import re

from pscore.errors import ConfigError

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bandwidths(text: str, name: str = "--bandwidth") -> list[float]:
    """Returns bytes per second of links such as `1gbit`, or `100gbit,10gbit`: inner ones first.

    Args:
        text: Bits per second.

    Raises:
        ConfigError: It is none.
    """
    bandwidths = []
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+(?:\.\d*)?)([kmgt]?)(?:bit)?(?:/s)?", part.strip().lower())
        if matched is None or not float(matched[1]):
            raise ConfigError(f"{name} is {text!r}, must be as 1gbit, or 100gbit,10gbit")
        bandwidths.append(float(matched[1]) * UNITS[matched[2]] / 8)
    return bandwidths


def parse_memory(text: str | None, name: str = "--memory") -> float:
    """Returns the bytes of a text such as `16g`; without one there is no limit.

    Raises:
        ConfigError: It is none.
    """
    if text is None:
        return math.inf
    matched = re.fullmatch(r"(\d+(?:\.\d*)?)([kmgt]?)(i?)b?", text.strip().lower())
    if matched is None or not float(matched[1]):
        raise ConfigError(f"{name} is {text!r}, must be as 16g, or 16gib")
    power = "kmgt".find(matched[2]) + 1 if matched[2] else 0
    return float(matched[1]) * float(1024 if matched[3] else 1000) ** power
