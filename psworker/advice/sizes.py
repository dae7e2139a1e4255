"""Models by name with their numbers of parameters, and numbers as people write them."""

from __future__ import annotations

import difflib
import re

from pscore.errors import ConfigError
from pscore.partition import NUMEL_MAX
from pscore.timing.shown import three_figures

# Trained parameters; tied weights count once. A test compares those that `plan` can make.
NUMELS = {
    "alexnet": 61_100_840,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "lenet": 61_706,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-7b": 6_738_415_616,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "vit-b16": 86_567_656,
}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbgt]?)")
SIMULATED_MAX = 1 << 42  # Most parameters that a prediction takes; a job takes fewer (NUMEL_MAX).


def parse_model(model: str) -> tuple[int, str]:
    """Returns the parameters of a model, and where their number comes from.

    Args:
        model: A known name, or a number: `350000000`, `350M`, `1.3B`.

    Raises:
        ConfigError: It is neither, or no model has so many parameters.
    """
    name = model.strip().lower()
    if name in NUMELS:
        return NUMELS[name], f"known: {name}, tied weights counted once"
    matched = NUMBER.fullmatch(name.replace(",", "").replace("_", ""))
    if matched is None:
        near = difflib.get_close_matches(name, NUMELS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"model is {model!r}, must be one of {', '.join(NUMELS)}, or a number of parameters "
            f"such as 350M or 1.3B{hint}"
        )
    numel = float(matched[1]) * UNITS[matched[2]]
    if not 1 <= numel <= SIMULATED_MAX:
        raise ConfigError(f"model is {model!r}, {numel:g} parameters; must be 1 to {SIMULATED_MAX}")
    return round(numel), "given"


def is_too_large(numel: int) -> bool:
    """Returns whether one job cannot hold a model of so many parameters."""
    return numel > NUMEL_MAX


def shown_numel(numel: int) -> str:
    """Returns a number of parameters as people write it: `1.56B`."""
    for unit, factor in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if numel >= factor:
            return f"{three_figures(numel / factor)}{unit}"
    return str(numel)


def shown_nbytes(nbytes: float) -> str:
    """Returns bytes as people write them: `5.8 GiB`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{three_figures(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"
