"""Whether the weights of a table can be published: the shards must have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pscore.errors import ConfigError

if TYPE_CHECKING:
    from pscore.optimizers.base import Optimizer
    from pscore.rules.base import Rule

PUBLISH_EVERY_MAX = 1 << 20


def require_weights(name: str, rule: Rule, optimizer: Optimizer) -> None:
    """Raises ConfigError for a table whose value on the shards is not the model."""
    if not optimizer.holds_weights:
        raise ConfigError(
            f"table {name!r} cannot be published: its workers run the optimizer "
            "(optimizer_on='worker'), so the shards hold no weights; use optimizer_on='shards', or "
            "psworker.Publisher in a job of its own"
        )
    if rule.gossip:
        raise ConfigError(
            f"table {name!r} cannot be published: in mode {rule.name} the workers exchange the "
            "weights, and the shards do not have them; use psworker.Publisher in a job of its own"
        )
