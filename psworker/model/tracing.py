"""Functions that torch.compile leaves alone: they talk to shards, and nothing of it can be a graph.

A script may compile its whole training step, with the optimizer in it. Without the mark, Dynamo
would follow a step into the exchange with the shards, and fail there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def not_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that a compiled script calls as it is.

    `torch.compiler.disable` would import Dynamo with this package, which takes a second; this is
    how torch's own optimizers are marked, and Dynamo is imported by the first call.
    """
    marked: Callable[P, R] = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return marked
