"""A change of the mode of a running job: every gradient so far counts, and nothing else is lost.

Each worker settles what it has under way and steps aside, so that nobody waits for it any more;
steps that are still open close with what is in. Behind a barrier nothing moves. The first worker
has each shard go on under the new rule, with weights, optimizer state and versions as they are;
then each takes them as it does at the start. What error feedback owes stays with the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pscore.errors import ConfigError
from pscore.rules.base import Rule, require_sizes

if TYPE_CHECKING:
    from psworker.training.optimizer import DistributedOptimizer


def change_mode(wrapper: DistributedOptimizer, rule: Rule, grads: Sequence[torch.Tensor]) -> None:
    """Has the job of `wrapper` go on under `rule`; every worker calls it, between two steps.

    Args:
        wrapper: Of this worker.
        rule: The new mode.
        grads: Of each slice, `(numel,) float32`: where the moves of an open round are written.

    Raises:
        ConfigError: The shards would have to run another optimizer.
        JobMismatchError: Another worker has named another mode.
    """
    former, exchange, replica = wrapper.rule, wrapper.exchange, wrapper.replica
    if rule.outer_optimizer != former.outer_optimizer:
        raise ConfigError(
            f"{former} cannot become {rule} while it runs: the shards run another optimizer then; "
            "save state_dict() and begin anew"
        )
    require_sizes(rule, wrapper.session.num_workers, wrapper.session.min_workers)
    if str(rule) == str(former):
        return
    exchange.flush()
    replica.end_round(grads, exchange)
    exchange.run(replica.settle())
    exchange.change(rule, replica.step)
    wrapper.rule = rule
    replica.change(rule)
    exchange.run(replica.begin(exchange))
    wrapper.progress.locate()
    wrapper.show_weights()
