"""The wrapped optimizer's steps on the worker, with the mean gradient that the shards return.

For an optimizer that the shards do not run (`optimizer_on="worker"`). The table's value is then the
mean gradient (`pscore/optimizers/mean.py`), and each pull brings it. All workers start with rank
0's weights, get the same means and make the same steps, so their weights stay equal bit for bit, as
with all-reduce, if their machines compute alike. Weights and optimizer state are in the workers
alone: a checkpoint is `state_dict()` of any of them, saved by the script, and a worker that has
missed a step cannot come back.
"""

from __future__ import annotations

import inspect
import logging

import torch

from pscore.errors import ConfigError, StateLostError, UnsupportedOptimizerError
from pscore.optimizers import OPTIMIZERS
from pscore.optimizers.base import Optimizer
from pscore.optimizers.mean import Mean
from pscore.rules import RULES, make_server_optimizer
from pscore.rules.base import Rule
from psworker.connection.membership.session import Session
from psworker.model.copies import copies_of
from psworker.model.flat import FlatModel

log = logging.getLogger("paceline")
CHOICES = ("auto", "shards", "worker")


def choose_optimizer(
    optimizer: torch.optim.Optimizer, rule: Rule, optimizer_on: str, *, is_raw: bool
) -> Optimizer:
    """Returns the optimizer that the shards run.

    Args:
        optimizer_on: `shards`, `worker`, or `auto`: the shards, if they have a counterpart.

    Raises:
        ConfigError: The choice does not exist, or does not fit the mode or the pulls.
        UnsupportedOptimizerError: The optimizer can run neither there nor here.
    """
    if optimizer_on not in CHOICES:
        raise ConfigError(f"optimizer_on is {optimizer_on!r}, must be one of {', '.join(CHOICES)}")
    if rule.outer_optimizer:
        if optimizer_on == "shards":
            raise ConfigError(
                f"optimizer_on is 'shards', but in mode {rule} the workers run the optimizer"
            )
        _require_steps(optimizer)
        return OPTIMIZERS[rule.outer_optimizer]()
    if optimizer_on == "shards" or not (optimizer_on == "worker" or rule.workers_may_step):
        return make_server_optimizer(optimizer)
    if optimizer_on == "auto":
        try:
            return make_server_optimizer(optimizer)
        except UnsupportedOptimizerError as problem:
            _require_steps(optimizer)
            log.warning("optimizer_on='worker', the shards return the mean gradient: %s", problem)
    _require_fit(optimizer, rule, is_raw=is_raw)
    return Mean()


def _require_fit(optimizer: torch.optim.Optimizer, rule: Rule, *, is_raw: bool) -> None:
    """Raises a `ConfigError` unless workers can make the optimizer's steps in this mode."""
    _require_steps(optimizer)
    if not rule.workers_may_step:
        modes = ", ".join(sorted(name for name, other in RULES.items() if other.outer_optimizer))
        raise ConfigError(
            f"optimizer_on is 'worker', but in mode {rule} no worker gets the mean of each step; "
            f"use ssgd (without backup), {modes}, or an optimizer that the shards run"
        )
    if not is_raw:
        raise ConfigError(
            "pull_compression has estimates of weights, but with optimizer_on='worker' gradients "
            "are pulled; use compression=, which acts on the pushes, or none"
        )


def _require_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raises an `UnsupportedOptimizerError` if its steps need more than dense gradients."""
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizerError(
            f"{kind.__module__}.{kind.__qualname__} computes several gradients in each step "
            "(step(closure)), and no mode has more than one; use an optimizer whose step needs no "
            "closure"
        )
    if kind is torch.optim.SparseAdam:
        raise UnsupportedOptimizerError(
            "torch.optim.SparseAdam takes sparse gradients, and those of the shards are dense; use "
            "torch.optim.Adam, and make the layer with sparse=False"
        )


class MeanGradients:
    """The pulled mean gradients of a table whose optimizer runs on the workers.

    Attributes:
        values: `(layout.numel,) float32` on the model's device, which pulls are written to.
    """

    def __init__(self, flat: FlatModel, session: Session) -> None:
        """Starts without a gradient; raises ConfigError if the job is elastic."""
        if session.min_workers:
            raise ConfigError(
                "optimizer_on is 'worker', but workers of this job come and go, and one that joins "
                "later would have neither weights nor optimizer state; use an optimizer that the "
                "shards run, or a mode with rounds (local, slowmo, diloco)"
            )
        self.values = torch.zeros_like(flat.weights)
        self._flat = flat
        self._session = session
        starts = torch.tensor(flat.layout.offsets, dtype=torch.int64, device="cpu")
        self._starts = starts.to(flat.device)
        self._copies = copies_of(flat.device)
        is_pinned = flat.device.type == "cuda"
        self._firsts = torch.zeros(
            len(starts), pin_memory=is_pinned, dtype=torch.float32, device="cpu"
        )

    def take_weights(self) -> None:
        """Copies what was pulled into the flat weights: no update has been made since an upload."""
        self._flat.weights.copy_(self.values)

    def show(self) -> None:
        """Writes the means into `.grad`; it is None where no worker has a gradient.

        On a device this waits until the means have arrived there.
        """
        with torch.no_grad():
            self._copies.to_host((self._firsts, self.values[self._starts])).wait()
            has_none = torch.isnan(self._firsts).tolist()
            for index, parameter in enumerate(self._flat.parameters):
                mean = self._flat.state_view(self.values, index)
                if has_none[index] and bool(torch.isnan(mean).all()):
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = mean.to(parameter.dtype, copy=True)
                else:
                    parameter.grad.copy_(mean)

    def refuse(self, step: int, why: str) -> StateLostError:
        """Returns the error for a worker that cannot have the job's weights.

        Args:
            why: The worker's situation, as the end of a clause.
        """
        job, rank = self._session.job, self._session.rank
        return StateLostError(
            f"worker {rank} {why} job {job!r} at step {step}, but with optimizer_on='worker' "
            "weights and optimizer state are in the workers, and the shards have none to give: the "
            "other workers continue without it. To start all workers again, run `psserver forget "
            f"{job}` and load a state_dict() that one of them has saved"
        )
