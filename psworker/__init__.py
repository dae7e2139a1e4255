"""Paceline's worker: three lines in a training script, and the classic verbs below them.

import psworker

optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    mode="ssd",
)
"""

from pscore.errors import (
    ConfigError,
    GradientError,
    JobMismatchError,
    PacelineError,
    RemoteProtocolError,
    ServerUnavailableError,
    TransportError,
    UnsupportedOptimizerError,
)
from pscore.rules import ASGD, RULES, SSD, SSGD
from psworker.lowlevel import (
    barrier,
    broadcast_parameters,
    init,
    pull,
    push,
    push_pull,
    rank,
    shutdown,
    size,
)
from psworker.modes import modes
from psworker.optimizer import DistributedOptimizer

__all__ = [
    "ASGD",
    "barrier",
    "broadcast_parameters",
    "ConfigError",
    "DistributedOptimizer",
    "GradientError",
    "init",
    "JobMismatchError",
    "modes",
    "PacelineError",
    "pull",
    "push",
    "push_pull",
    "rank",
    "RemoteProtocolError",
    "RULES",
    "ServerUnavailableError",
    "shutdown",
    "size",
    "SSD",
    "SSGD",
    "TransportError",
    "UnsupportedOptimizerError",
]
