"""The state of the wrapped optimizer as one mean of all workers, for modes that demand it.

Where workers run the wrapped optimizer, each has a state of its own: a momentum, say, of its own
gradients. A mode in which all make the same steps (`Rule.alike`) needs the same state on all of
them, or their models part for ever. The mean is the state that one process would have if it had
made the mean of their moves, for every optimizer whose state is linear in the gradients.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from pscore.types import FloatArray
from psworker.connection.membership.session import Session
from psworker.training.state.optimizer_state import complete, pack, unpack
from psworker.training.table import TrainingTable
from psworker.training.verbs import named

BARRIER = "state"
HASH_BITS = 48  # The shards' barriers carry float64, exact up to 53 bits.


def share_state(inner: torch.optim.Optimizer, table: TrainingTable) -> None:
    """Replaces the state of each worker's optimizer by the mean over those that have one.

    All workers call it, and meet once more after it. A state that is the same everywhere stays as
    it is, to the bit.

    Args:
        inner: The wrapped optimizer, of the same class and parameters on all workers.

    Raises:
        ConfigError: The states have different lengths: the optimizers differ.
        PacelineError: A shard does not answer.
    """
    session, parameters = table.session, table.flat.parameters
    own = pack(inner)
    length = int(session.agree(BARRIER, float(len(own)), holds=True))
    if _are_equal(session, own):
        return
    has_any = len(own) > 0
    if len(own) < length:
        complete(inner, parameters)
        own = pack(inner)
    # The mean of the differences to it is added, so numbers that are equal on all stay so.
    weight, name = float(has_any), f"{table.name}.state{length}"
    mean = _mean(name, own, weight)
    unpack(inner, mean + _mean(name, own - mean, weight), parameters)


def _are_equal(session: Session, values: FloatArray) -> bool:
    """Returns whether all workers have the same bits; all of them call it."""
    digest = hashlib.sha256(values.tobytes()).digest()
    number, most = int.from_bytes(digest[: HASH_BITS // 8], "big"), float(1 << HASH_BITS)
    largest = session.agree(BARRIER, float(number), holds=True)
    return largest == most - session.agree(BARRIER, most - number, holds=True)


def _mean(name: str, values: FloatArray, weight: float) -> FloatArray:
    """Returns the mean of all workers' arrays, `(k,)`, which are given under one name."""
    tensor = torch.from_numpy(values)
    shared = named(name, tensor)
    shared.push(tensor, weight)
    return np.asarray(shared.pull().numpy())
