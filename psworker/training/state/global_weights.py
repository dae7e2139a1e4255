"""The shards' own weights in the model, for evaluation: training is not changed by it.

The weights are pulled exactly, also where training uses a compressed estimate of them, into memory
of their own. If that fails, the weights that training uses are as they were. The shards know that
such a pull is only a look, and keep no state for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from psworker.training.changes.recovery import WorkerRecovery
from psworker.training.state.buffers import Buffers
from psworker.training.table import TrainingTable


@contextlib.contextmanager
def global_weights(
    table: TrainingTable, recovery: WorkerRecovery, buffers: Buffers
) -> Iterator[None]:
    """Context manager: loads the global weights and buffers; restores the former ones on exit."""
    flat, replica = table.flat, table.replica
    warn_of_changes(table)
    with recovery.guard():
        drifts = replica.drifts or table.exchange.compresses_pulls
        is_there = table.rule.by_step and not drifts
        other = None if is_there else flat.placed(recovery.peek().weights)
    with contextlib.ExitStack() as undo:
        if other is not None:
            table.local_step.note_average(other)
            flat.swap_weights(other)
            undo.callback(flat.note_weights)
            undo.callback(flat.swap_weights, other)
        with recovery.guard():
            undo.enter_context(buffers.shared())
        yield


def warn_of_changes(table: TrainingTable) -> None:
    """Warns once if the script has changed weights, where the shards make the steps.

    Where the workers make them, such a change stays, or is a part of the round's move.
    """
    if table.means is None and not table.rule.outer_optimizer:
        table.flat.warn_of_changes()
