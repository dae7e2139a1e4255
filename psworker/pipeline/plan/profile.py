"""The profile of a model: seconds and bytes of each of its layers, in order."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pscore.errors import ConfigError
from pscore.json_text import to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a chain, or one block that cannot be cut; numbers are of one minibatch."""

    name: str
    forward_s: float
    backward_s: float
    output_nbytes: int  # Sent to the next stage if the model is cut behind this layer.
    held_nbytes: int  # Activations kept from forward to backward.
    parameter_nbytes: int  # As float32.
    update_s: float = 0.0  # Of the optimizer's step on its parameters, where the worker makes it.

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def alone_s(self) -> float:
        """Seconds of forward, backward and update on one worker."""
        return self.compute_s + self.update_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The layers of a model, and where they were measured."""

    model: str
    layers: tuple[Layer, ...]
    samples: int  # Samples of a minibatch.
    device: str
    source: str = ""  # Origin of the numbers, if they were not measured here.

    def __post_init__(self) -> None:
        """Checks the layers.

        Raises:
            ConfigError: There is none, or a number is negative or infinite.
        """
        if not self.layers:
            raise ConfigError(f"the profile of {self.model!r} has no layers")
        for layer in self.layers:
            for item in fields(Layer)[1:]:
                value = getattr(layer, item.name)
                if not math.isfinite(value) or value < 0:
                    raise ConfigError(
                        f"layer {layer.name!r} of the profile of {self.model!r} has "
                        f"{item.name}={value}, must be a number of at least 0"
                    )

    def as_json(self) -> str:
        """Returns the profile as text that `read_profile` reads, a layer in each line."""
        head = {**asdict(self), "layers": 0}
        del head["layers"]
        rows = ",\n  ".join(to_json(asdict(layer)) for layer in self.layers)
        return f'{to_json(head, indent=1)[:-2]},\n "layers": [\n  {rows}\n ]\n}}\n'


def read_profile(text: str, where: str) -> Profile:
    """Returns the profile that `text` holds.

    Args:
        text: JSON, as `Profile.as_json` writes it.

    Raises:
        ConfigError: It is no profile.
    """
    try:
        fields = json.loads(text)
        layers = tuple(Layer(**_numbers(row)) for row in fields.pop("layers"))
        return Profile(layers=layers, **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ConfigError(
            f"{where} is no profile of a model ({type(problem).__name__}: {problem}); "
            "psworker plan MODEL --pipeline --save-profile FILE writes one"
        ) from problem


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a layer's fields with numbers of the right types."""
    kinds = {"forward_s": float, "backward_s": float, "update_s": float, "name": str}
    return {name: kinds.get(name, int)(value) for name, value in row.items()}


def sums(values: Sequence[float]) -> list[float]:
    """Returns the sums of the first 0, 1, ... values; their differences are sums of ranges."""
    totals = [0.0]
    for value in values:
        totals.append(totals[-1] + value)
    return totals
