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
from pscore.rules import (
    ASGD,
    CD,
    DCASGD,
    OD,
    RULES,
    SSD,
    SSGD,
    SSP,
    DiLoCo,
    LocalSGD,
    SlowMo,
    Staleness,
)
from psworker.modes import modes
from psworker.training.optimizer import DistributedOptimizer, clip_grad_norm_
from psworker.training.script_errors import install as _install
from psworker.training.verbs import (
    barrier,
    broadcast_parameters,
    init,
    live_ranks,
    pull,
    push,
    push_pull,
    rank,
    shutdown,
    size,
)

__all__ = [
    "ASGD",
    "barrier",
    "broadcast_parameters",
    "CD",
    "clip_grad_norm_",
    "ConfigError",
    "DCASGD",
    "DiLoCo",
    "DistributedOptimizer",
    "GradientError",
    "init",
    "JobMismatchError",
    "live_ranks",
    "LocalSGD",
    "modes",
    "OD",
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
    "SlowMo",
    "SSD",
    "SSGD",
    "SSP",
    "Staleness",
    "TransportError",
    "UnsupportedOptimizerError",
]

_install()  # An error of ours that ends a script is one sentence.
