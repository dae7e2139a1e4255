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

import pscore.errors
from pscore.errors import BrokenModuleError as BrokenModuleError
from pscore.errors import ConfigError as ConfigError
from pscore.errors import GradientError as GradientError
from pscore.errors import JobMismatchError as JobMismatchError
from pscore.errors import LimitError as LimitError
from pscore.errors import PacelineError as PacelineError
from pscore.errors import RemoteProtocolError as RemoteProtocolError
from pscore.errors import ReplacedError as ReplacedError
from pscore.errors import ServerUnavailableError as ServerUnavailableError
from pscore.errors import StateLostError as StateLostError
from pscore.errors import TableFullError as TableFullError
from pscore.errors import TransportError as TransportError
from pscore.errors import UnsupportedOptimizerError as UnsupportedOptimizerError
from psworker.training.script_errors import SHORT
from psworker.training.script_errors import print_short_errors as print_short_errors

if TYPE_CHECKING:
    from pscore.compressors.base import Compressor as Compressor
    from pscore.compressors.own import *  # noqa: F403
    from pscore.rules import RULES as RULES
    from pscore.rules.base import Rule as Rule
    from pscore.rules.own import *  # noqa: F403
    from psworker.pipeline.run.pipeline import Pipeline as Pipeline
    from psworker.rows.cache import RowCache as RowCache
    from psworker.rows.exported import load_embedding as load_embedding
    from psworker.rows.exported import update_embedding as update_embedding
    from psworker.rows.modules import Embedding as Embedding
    from psworker.rows.modules import EmbeddingBag as EmbeddingBag
    from psworker.rows.modules import dense_parameters as dense_parameters
    from psworker.rows.optimizers import FTRL as FTRL
    from psworker.rows.optimizers import RowwiseAdagrad as RowwiseAdagrad
    from psworker.rows.prefetch import prefetch as prefetch
    from psworker.subscription.publisher import Publisher as Publisher
    from psworker.subscription.subscriber import Subscriber as Subscriber
    from psworker.training.modes import modes as modes
    from psworker.training.optimizer import DistributedOptimizer as DistributedOptimizer
    from psworker.training.optimizer import clip_grad_norm_ as clip_grad_norm_
    from psworker.training.verbs import barrier as barrier
    from psworker.training.verbs import broadcast_parameters as broadcast_parameters
    from psworker.training.verbs import init as init
    from psworker.training.verbs import live_ranks as live_ranks
    from psworker.training.verbs import local_rank as local_rank
    from psworker.training.verbs import pull as pull
    from psworker.training.verbs import push as push
    from psworker.training.verbs import push_pull as push_pull
    from psworker.training.verbs import rank as rank
    from psworker.training.verbs import shutdown as shutdown
    from psworker.training.verbs import size as size

_FROM = {
    "pscore.compressors.base": ("Compressor",),
    "pscore.rules": ("RULES",),
    "pscore.rules.base": ("Rule",),
    "psworker.pipeline.run.pipeline": ("Pipeline",),
    "psworker.rows.cache": ("RowCache",),
    "psworker.rows.exported": ("load_embedding", "update_embedding"),
    "psworker.rows.modules": ("Embedding", "EmbeddingBag", "dense_parameters"),
    "psworker.rows.optimizers": ("FTRL", "RowwiseAdagrad"),
    "psworker.rows.prefetch": ("prefetch",),
    "psworker.subscription.publisher": ("Publisher",),
    "psworker.subscription.subscriber": ("Subscriber",),
    "psworker.training.modes": ("modes",),
    "psworker.training.optimizer": ("DistributedOptimizer", "clip_grad_norm_"),
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
_PLUGINS = ("pscore.compressors.own", "pscore.rules.own")  # Each class of these is a name too.


def _plugins() -> dict[str, object]:
    """Returns the classes of Paceline's own compressors and rules, imported now."""
    modules = [importlib.import_module(name) for name in _PLUGINS]
    items = [item for module in modules for item in vars(module).items()]
    return {name: value for name, value in items if isinstance(value, type)}


def __dir__() -> list[str]:
    errors = [name for name in vars(pscore.errors) if name in globals() and name[0].isupper()]
    return sorted({*errors, *_MODULE_OF, *_plugins(), "print_short_errors"}, key=str.casefold)


if not TYPE_CHECKING:  # A type checker knows each name by its import above.

    def __getattr__(name: str) -> object:
        """Returns a name of this package, imported now; `__all__` has all of them.

        Raises:
            AttributeError: There is no such name.
        """
        if name in _MODULE_OF:
            found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        elif name == "__all__":
            found = __dir__()
        elif name.startswith("_") or name not in _plugins():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            found = _plugins()[name]
        globals()[name] = found
        return found


if os.environ.get(SHORT):  # `psworker run` sets it for its workers.
    print_short_errors()
