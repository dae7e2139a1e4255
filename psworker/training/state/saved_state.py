"""`state_dict` and `load_state_dict` of the wrapper, in torch's format."""

from __future__ import annotations

from typing import Any

import torch

from psworker.training.changes.recovery import WorkerRecovery
from psworker.training.state.state_dict import read_state, restore, torch_state
from psworker.training.table import TrainingTable


class SavedState(torch.optim.Optimizer):
    """A torch optimizer whose state is on the shards, or partly there."""

    _table: TrainingTable
    _recovery: WorkerRecovery
    _inner: torch.optim.Optimizer
    _is_global = False  # Whether the model holds the global weights: inside `global_weights`.

    def state_dict(self) -> dict[str, Any]:
        """Returns the shards' optimizer state in torch's format, and this worker's own.

        The usual keys hold what `torch.optim` keeps there, so that a plain optimizer can load it;
        `paceline` holds the step, the mode and the residuals of error feedback. Inside
        `global_weights` in the middle of a round, the step is that of the round's beginning, to
        which the global weights belong (docs/training.md lists the modes that continue exactly).

        Raises:
            ConfigError: The model is sharded (FSDP2); the message names another way.
            PacelineError: A shard refused something, or does not answer.
        """
        inner = self._inner.state_dict()["state"] if self._runs_inner else None
        plain = super().state_dict()
        return torch_state(
            self._table,
            self._recovery,
            self.param_groups,
            plain,
            inner,
            at_round=self._is_global,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the shards' optimizer state and the model's weights on all workers.

        Every worker calls it, after it has loaded the model's weights; rank 0's go to the shards.

        Args:
            state_dict: From `state_dict` of a wrapper, or of a plain torch optimizer.

        Raises:
            ConfigError: The state is of another model or optimizer.
            PacelineError: A shard refused something, or does not answer.
        """
        with self._recovery.guard():
            loaded = read_state(self._table, self.param_groups, state_dict)
            plain = {"state": {}, "param_groups": state_dict["param_groups"]}
            super().load_state_dict(plain)
            if self._runs_inner:
                self._inner.load_state_dict({**plain, "state": state_dict["state"]})
            self._inner.param_groups = self.param_groups
            restore(self._table, loaded)

    @property
    def _runs_inner(self) -> bool:
        """Whether this worker runs the wrapped optimizer."""
        return bool(self._table.rule.outer_optimizer) or self._table.means is not None
