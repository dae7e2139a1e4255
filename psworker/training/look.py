"""A look at the shards' own weights, for evaluation and checkpoints: it changes no training.

What is shown is pulled as it is on the shards, also where training goes on from an estimate of it,
into memory of its own; whatever fails meanwhile, the weights that training goes on from are as they
were. The shards are told that it is only a look, and remember nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pscore.errors import ReplacedError, UnknownJobError
from pscore.types import IntArray
from psworker.replica.ports import Landing
from psworker.training.setback import guard

if TYPE_CHECKING:
    from psworker.training.optimizer import DistributedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a look has found."""

    weights: torch.Tensor  # (layout.numel,) float32, on the host.
    state: list[torch.Tensor]  # Of the optimizer, likewise; empty unless asked for.
    counts: list[IntArray]  # With state: optimizer steps of each segment, by slice.


def look(wrapper: DistributedOptimizer, num_state: int | None = None) -> Seen:
    """Returns the shards' weights, with this worker's last push in them.

    A worker that the shards have declared lost comes back first, as it would with its next step.

    Args:
        wrapper: Of this worker.
        num_state: State arrays of the shards' optimizer, which come along; None: without them.

    Raises:
        PacelineError: Nobody answers, or the worker cannot come back.
    """
    try:
        with guard(wrapper):
            return _look(wrapper, num_state)
    except (ReplacedError, UnknownJobError):
        if wrapper.gradients.have_left:  # In the middle of a step: that comes back at its end.
            raise
        with guard(wrapper):
            return _look(wrapper, num_state)


def _look(wrapper: DistributedOptimizer, num_state: int | None) -> Seen:
    exchange, replica, layout = wrapper.exchange, wrapper.replica, wrapper.bucket.layout
    flats = [torch.zeros(layout.numel) for _ in range(1 + (num_state or 0))]
    landings = [
        Landing(weights=weights, state=state, is_look=True)
        for weights, *state in (
            [flat[spec.start : spec.stop] for flat in flats] for spec in layout.slices
        )
    ]
    exchange.flush()
    exchange.run(replica.peek(landings, exchange, with_state=num_state is not None))
    counts = [landing.counts for landing in landings if landing.counts is not None]
    return Seen(weights=flats[0], state=flats[1:], counts=counts)


@contextlib.contextmanager
def global_weights(
    wrapper: DistributedOptimizer, buffers: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    """Puts the shards' weights into the model, and what was there back afterwards.

    Args:
        wrapper: Of this worker.
        buffers: Does the same with the buffers that workers share.
    """
    bucket, replica = wrapper.bucket, wrapper.replica
    bucket.warn_of_changes()
    with guard(wrapper):
        drifts = replica.drifts or wrapper.exchange.compresses_pulls
        is_there = wrapper.rule.by_step and not drifts
        other = None if is_there else look(wrapper).weights.to(bucket.device)
    with contextlib.ExitStack() as undo:
        if other is not None:
            bucket.swap_weights(other)
            undo.callback(bucket.note_weights)
            undo.callback(bucket.swap_weights, other)
        with guard(wrapper):
            undo.enter_context(buffers)
        yield
