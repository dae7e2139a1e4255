"""Paceline's worker: three lines in a training script, and the classic verbs below them.

import psworker

optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    mode="ssd",
)

The names are imported when they are first used: `import psworker`, and commands that compute
nothing, do without torch, whose import takes more than a second.
"""

import importlib
from typing import TYPE_CHECKING

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
from psworker.training.script_errors import install as _install

if TYPE_CHECKING:
    from pscore.rules import (
        ADPSGD,
        ASGD,
        CD,
        DCASGD,
        DPSGD,
        OD,
        RULES,
        SGP,
        SSD,
        SSGD,
        SSP,
        AllReduce,
        DelayedNesterov,
        DiLoCo,
        LocalSGD,
        SlowMo,
        Staleness,
    )
    from psworker.pipeline.run.pipeline import Pipeline
    from psworker.training.modes import modes
    from psworker.training.optimizer import DistributedOptimizer, clip_grad_norm_
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
    "ADPSGD",
    "AllReduce",
    "ASGD",
    "barrier",
    "broadcast_parameters",
    "CD",
    "clip_grad_norm_",
    "ConfigError",
    "DCASGD",
    "DelayedNesterov",
    "DiLoCo",
    "DistributedOptimizer",
    "DPSGD",
    "GradientError",
    "init",
    "JobMismatchError",
    "live_ranks",
    "LocalSGD",
    "modes",
    "OD",
    "PacelineError",
    "Pipeline",
    "pull",
    "push",
    "push_pull",
    "rank",
    "RemoteProtocolError",
    "RULES",
    "ServerUnavailableError",
    "SGP",
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

_FROM = {
    "pscore.rules": (
        *(
            "ASGD",
            "CD",
            "DCASGD",
            "DelayedNesterov",
            "DiLoCo",
            "LocalSGD",
            "OD",
            "RULES",
            "SlowMo",
            "SSD",
            "SSGD",
        ),
        *("SSP", "Staleness"),
        *("ADPSGD", "AllReduce", "DPSGD", "SGP"),
    ),
    "psworker.pipeline.run.pipeline": ("Pipeline",),
    "psworker.training.modes": ("modes",),
    "psworker.training.optimizer": ("clip_grad_norm_", "DistributedOptimizer"),
    "psworker.training.verbs": (
        *("barrier", "broadcast_parameters", "init", "live_ranks", "pull", "push", "push_pull"),
        *("rank", "shutdown", "size"),
    ),
}
_MODULE_OF = {name: module for module, names in _FROM.items() for name in names}

if not TYPE_CHECKING:  # A type checker knows each name by its import above.

    def __getattr__(name: str) -> object:
        """Returns a name of this package, imported now.

        Raises:
            AttributeError: There is no such name.
        """
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_install()  # An error of ours that ends a script is one sentence.
