"""Activations and their gradients as messages between workers: parts of float32 numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch

from pscore.errors import ConfigError, RemoteProtocolError
from pscore.types import FloatArray
from psworker.gossip.base import PART_NUMEL, Meet, Post, Tag, Want, require_numel, to_host

# Kinds besides activations and gradients, which are 1 and 2: a stage's part of a checkpoint, and
# the words of workers that have ended their minibatches (continuing.py).
STATE, DONE, END = 3, 4, 5
SHAPE_NUMEL = 16  # Numbers in front of the first part: number of dimensions, and the dimensions.

Missing = Callable[[], Generator[Meet, Any, int | None]]


def send(
    post: Post, to: int, kind: int, minibatch: int, values: torch.Tensor, epoch: int = 0
) -> None:
    """Sends a tensor to a rank; it may change afterwards.

    Args:
        epoch: Epoch of the members under which it holds; 0: under any.

    Raises:
        ConfigError: It is not float32, or has too many dimensions.
    """
    if values.dtype != torch.float32 or values.ndim >= SHAPE_NUMEL:
        raise ConfigError(
            f"a stage returns {values.dtype} of {values.ndim} dimensions, must be float32 of less "
            f"than {SHAPE_NUMEL}: cut the model elsewhere"
        )
    shape = np.zeros(SHAPE_NUMEL, np.float32)
    shape[: values.ndim + 1] = [values.ndim, *values.shape]
    numbers = np.concatenate([shape, to_host(values.contiguous().flatten())])
    for part, begin in enumerate(range(0, len(numbers), PART_NUMEL)):
        post.give(to, Tag(kind, minibatch, part, epoch), numbers[begin : begin + PART_NUMEL])


def receive(
    source: int, kind: int, minibatch: int, epoch: int = 0, missing: Missing | None = None
) -> Generator[Want | Meet, Any, torch.Tensor | None]:
    """Returns a tensor of a rank when it is here; None if the members have changed meanwhile.

    Parts that came are kept by nobody then, so the caller gives up the run.

    Args:
        epoch: Epoch of the members under which it holds; 0: under any.
        missing: Called when the members have changed; returns how many have yet to enter the
            directory again, or None if one is gone. None: each change is such a one.

    Raises:
        RemoteProtocolError: The rank has sent another number of numbers than their shape has.
    """
    first: Any = yield from _part(source, Tag(kind, minibatch, 0, epoch), missing)
    if first is None:
        return None
    shape = _shape_in(first, source)
    parts = [first[SHAPE_NUMEL:]]
    numel = int(np.prod(shape, dtype=np.int64))
    while sum(map(len, parts)) < numel:
        part = yield from _part(source, Tag(kind, minibatch, len(parts), epoch), missing)
        if part is None:
            return None
        require_numel(source, part, 1, PART_NUMEL)
        parts.append(part)
    whole = np.concatenate(parts)
    require_numel(source, whole, numel, numel)
    return torch.from_numpy(whole).reshape(shape)


def _shape_in(first: FloatArray, source: int) -> tuple[int, ...]:
    """Returns the shape of a tensor, from the numbers in front of its first part."""
    numbers = first[:SHAPE_NUMEL]
    is_shape = len(numbers) == SHAPE_NUMEL and bool(np.isfinite(numbers).all())
    if not is_shape or (numbers < 0).any() or numbers[0] >= SHAPE_NUMEL:
        raise RemoteProtocolError(f"worker {source} has sent a tensor without a shape")
    return tuple(int(number) for number in numbers[1 : int(numbers[0]) + 1])


def _part(
    source: int, tag: Tag, missing: Missing | None
) -> Generator[Want | Meet, Any, FloatArray | None]:
    """Returns a part of a tensor; None if the members have changed."""
    values: FloatArray | None = yield Want(source, tag)
    while values is None and missing is not None:
        number = yield from missing()
        if number is None:
            return None
        values = yield Want(source, tag, waits=number == 0)
    return values
