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
import os
from typing import TYPE_CHECKING

from pscore.errors import (
    ConfigError,
    GradientError,
    JobMismatchError,
    LimitError,
    PacelineError,
    RemoteProtocolError,
    ReplacedError,
    ServerUnavailableError,
    StateLostError,
    TransportError,
    UnsupportedOptimizerError,
)
from psworker.training.script_errors import SHORT, print_short_errors

if TYPE_CHECKING:
    from pscore.compressors.base import Compressor
    from pscore.compressors.bf16 import BF16
    from pscore.compressors.dgc import DGC
    from pscore.compressors.fp16 import FP16
    from pscore.compressors.int8 import Int8
    from pscore.compressors.natural import Natural
    from pscore.compressors.none import NoCompression
    from pscore.compressors.one_bit import OneBit
    from pscore.compressors.qsgd import QSGD
    from pscore.compressors.randomk import RandomK
    from pscore.compressors.sparseloco import SparseLoCo
    from pscore.compressors.terngrad import TernGrad
    from pscore.compressors.topk import TopK
    from pscore.compressors.two_bit import TwoBit
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
    from pscore.rules.base import Rule
    from psworker.pipeline.run.pipeline import Pipeline
    from psworker.training.modes import modes
    from psworker.training.optimizer import DistributedOptimizer, clip_grad_norm_
    from psworker.training.verbs import (
        barrier,
        broadcast_parameters,
        init,
        live_ranks,
        local_rank,
        pull,
        push,
        push_pull,
        rank,
        shutdown,
        size,
    )

_FROM = {
    "pscore.compressors.base": ("Compressor",),
    "pscore.compressors.bf16": ("BF16",),
    "pscore.compressors.dgc": ("DGC",),
    "pscore.compressors.fp16": ("FP16",),
    "pscore.compressors.int8": ("Int8",),
    "pscore.compressors.natural": ("Natural",),
    "pscore.compressors.none": ("NoCompression",),
    "pscore.compressors.one_bit": ("OneBit",),
    "pscore.compressors.qsgd": ("QSGD",),
    "pscore.compressors.randomk": ("RandomK",),
    "pscore.compressors.sparseloco": ("SparseLoCo",),
    "pscore.compressors.terngrad": ("TernGrad",),
    "pscore.compressors.topk": ("TopK",),
    "pscore.compressors.two_bit": ("TwoBit",),
    "pscore.rules": (
        "ADPSGD",
        "ASGD",
        "CD",
        "DCASGD",
        "DPSGD",
        "OD",
        "RULES",
        "SGP",
        "SSD",
        "SSGD",
        "SSP",
        "AllReduce",
        "DelayedNesterov",
        "DiLoCo",
        "LocalSGD",
        "SlowMo",
        "Staleness",
    ),
    "pscore.rules.base": ("Rule",),
    "psworker.pipeline.run.pipeline": ("Pipeline",),
    "psworker.training.modes": ("modes",),
    "psworker.training.optimizer": (
        "DistributedOptimizer",
        "clip_grad_norm_",
    ),
    "psworker.training.verbs": (
        "barrier",
        "broadcast_parameters",
        "init",
        "live_ranks",
        "local_rank",
        "pull",
        "push",
        "push_pull",
        "rank",
        "shutdown",
        "size",
    ),
}
_MODULE_OF = {name: module for module, names in _FROM.items() for name in names}

__all__ = [
    "ADPSGD",
    "AllReduce",
    "ASGD",
    "barrier",
    "BF16",
    "broadcast_parameters",
    "CD",
    "clip_grad_norm_",
    "Compressor",
    "ConfigError",
    "DCASGD",
    "DelayedNesterov",
    "DGC",
    "DiLoCo",
    "DistributedOptimizer",
    "DPSGD",
    "FP16",
    "GradientError",
    "init",
    "Int8",
    "JobMismatchError",
    "LimitError",
    "live_ranks",
    "local_rank",
    "LocalSGD",
    "modes",
    "Natural",
    "NoCompression",
    "OD",
    "OneBit",
    "PacelineError",
    "Pipeline",
    "print_short_errors",
    "pull",
    "push",
    "push_pull",
    "QSGD",
    "RandomK",
    "rank",
    "RemoteProtocolError",
    "ReplacedError",
    "Rule",
    "RULES",
    "ServerUnavailableError",
    "SGP",
    "shutdown",
    "size",
    "SlowMo",
    "SparseLoCo",
    "SSD",
    "SSGD",
    "SSP",
    "Staleness",
    "StateLostError",
    "TernGrad",
    "TopK",
    "TransportError",
    "TwoBit",
    "UnsupportedOptimizerError",
]

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


if os.environ.get(SHORT):  # `psworker run` sets it for its workers.
    print_short_errors()
