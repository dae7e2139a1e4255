"""Access to the parts behind `DistributedOptimizer` that tests look at, in one place."""

from typing import Any

import torch

import psworker
from psworker.compression.pull_estimate import PulledEstimate
from psworker.peers.peers import Peers
from psworker.pipeline.run.continuing import ContinuingDriver
from psworker.training.local_steps.peer_step import PeerStep
from psworker.training.table import TrainingTable


def table_of(optimizer: psworker.DistributedOptimizer) -> TrainingTable:
    """Returns the table that a wrapper trains."""
    return optimizer._table


def peers_of(optimizer: psworker.DistributedOptimizer) -> Peers:
    """Returns the connections to other workers, in a mode that has them."""
    step = table_of(optimizer).local_step
    assert isinstance(step, PeerStep)
    return step._peers


def gossip_of(optimizer: psworker.DistributedOptimizer) -> Any:
    """Returns the state machine of exchanges with other workers, of the mode's own class."""
    return peers_of(optimizer).gossip


def wrapped_by(optimizer: psworker.DistributedOptimizer) -> torch.optim.Optimizer:
    """Returns the optimizer that a wrapper wraps."""
    return optimizer._inner


def estimates_of(optimizer: psworker.DistributedOptimizer) -> list[PulledEstimate]:
    """Returns the estimates of the slices whose pulls are compressed."""
    held = table_of(optimizer).exchange._estimates
    return [estimate for estimate in held if estimate is not None]


def forget_worker(optimizer: psworker.DistributedOptimizer) -> None:
    """Makes every shard declare this worker lost; the worker does not know it yet."""
    session = table_of(optimizer).session
    for link in session.links:
        patience_s = link.patience.limit_s
        session._joining.leave(link, "the test wants it", failed=True)
        link.patience.limit_s = patience_s


def has_members(driver: ContinuingDriver) -> bool:
    """Returns whether a pipeline's worker knows of workers that train."""
    return bool(driver._members.ranks)
