"""A change of the mode of a running job: every gradient so far counts, and nothing else is lost.

Each worker finishes its pushes and pulls and steps aside, so that the shards do not wait for it;
steps that are still open close with the gradients they have. Behind a barrier nothing is sent. The
first worker switches each shard to the new rule; weights, optimizer state and versions stay. Then
every worker pulls them as at its start. Residuals of error feedback stay with their workers.
"""

from __future__ import annotations

from pscore.errors import ConfigError
from pscore.rules.base import Rule, require_sizes, require_slices
from psworker.training.table import TrainingTable


def require_possible(table: TrainingTable, rule: Rule) -> None:
    """Refuses a mode that a table cannot change to; nothing has changed then.

    Raises:
        ConfigError: The shards would have to run another optimizer, or it does not fit the job.
    """
    former = table.rule
    if rule.outer_optimizer != former.outer_optimizer:
        raise ConfigError(
            f"{former} cannot become {rule} while it runs: the shards would need another "
            "optimizer; save state_dict() and start a new job"
        )
    if table.means is not None and not rule.workers_may_step:
        raise ConfigError(
            f"{former} cannot become {rule} while the workers run the optimizer: the shards have "
            "no weights; save state_dict() and start a new job"
        )
    require_sizes(rule, table.session.num_workers, table.session.min_workers)
    try:
        require_slices(rule, len(table.layout.slices))
    except ConfigError as problem:
        raise ConfigError(
            f"{problem}, or save state_dict() and start a new job, which may have shorter slices"
        ) from None


def change_mode(table: TrainingTable, rule: Rule) -> None:
    """Switches a table to another mode; every worker calls it, between two steps.

    Raises:
        ConfigError: The table cannot change to it.
        JobMismatchError: Another worker has named another mode.
    """
    former = table.rule
    require_possible(table, rule)
    if str(rule) == str(former):
        return
    table.local_step.part()
    table.end_round()
    table.settle()
    table.change_rule(rule)
