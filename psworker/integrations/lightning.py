"""A callback of Lightning that lets the shards make the optimizers' steps.

    Trainer(callbacks=[PacelineCallback(mode="ssd(steps=5)")], devices=1)

It is no strategy: to Lightning each worker is a process of its own, on one device. Validation and
checkpoints have the global weights, and rank 0 alone saves. `gradient_clip_val` clips the workers'
mean gradient, in the modes whose updates take every worker's.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import fields
from typing import Any

import psworker
from pscore.rules.base import takes_all
from psworker.integrations import counts_steps

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.utilities import rank_zero_only
except ModuleNotFoundError:  # An instance is refused.
    Callback = TorchCheckpointIO = object


class PacelineCallback(Callback):  # type: ignore[misc]
    """Puts `DistributedOptimizer` around the optimizers of `configure_optimizers`."""

    def __init__(self, **options: Any) -> None:
        """Keeps the arguments of `DistributedOptimizer`: `mode="ssd(steps=5)"`.

        Raises:
            ConfigError: Lightning is not installed.
        """
        if Callback is object:
            raise psworker.ConfigError("PacelineCallback needs `pip install lightning`")
        super().__init__()
        self._options = options
        self._wrappers: list[psworker.DistributedOptimizer] = []
        self._evaluation = contextlib.ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Joins the job, and wraps the optimizers, before a checkpoint is restored.

        Raises:
            ConfigError: Lightning has a strategy of several processes.
            PacelineError: The shards do not answer, or refuse this worker.
        """
        if trainer.world_size > 1:
            raise psworker.ConfigError(
                f"Lightning's strategy has {trainer.world_size} processes, and averages gradients "
                "itself; pass devices=1 and num_nodes=1 to Trainer in every worker"
            )
        # A scheduler keeps the plain optimizer, which shares its groups with the wrapper.
        with counts_steps():
            self._wrappers = trainer.optimizers = [
                psworker.DistributedOptimizer(
                    optimizer, pl_module.named_parameters(), **self._options
                )
                for optimizer in trainer.optimizers
            ]
        trainer.strategy.checkpoint_io = _FirstRankIO()
        if all(takes_all(wrapper.rule) for wrapper in self._wrappers):
            trainer.strategy.precision_plugin.clip_grad_by_norm = _clip_mean
        rank_zero_only.rank = psworker.rank()  # Only rank 0 logs; it was 0 in all.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins at the job's step, where others train already: this worker was started again."""
        steps = [wrapper.steps for wrapper in self._wrappers]
        if trainer.ckpt_path is None and sum(steps) > trainer.global_step:
            _go_to(trainer, max(steps), sum(steps))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Loads the global weights."""
        for wrapper in self._wrappers:
            self._evaluation.enter_context(wrapper.global_weights())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restores the weights of training."""
        self._evaluation.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restores the weights of training."""
        self._evaluation.close()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Puts the global weights into a checkpoint."""
        with contextlib.ExitStack() as stack:
            for wrapper in self._wrappers:
                stack.enter_context(wrapper.global_weights())
            state = pl_module.state_dict()
            checkpoint["state_dict"] = {name: value.clone() for name, value in state.items()}

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Leaves the global weights in the model."""
        for wrapper in self._wrappers:
            wrapper.close()


def _go_to(trainer: Any, step: int, of_all: int) -> None:
    """Sets the loops and schedulers of a trainer that is about to begin to a later step.

    Args:
        step: Steps that are over.
        of_all: Their sum over all optimizers.
    """
    batches, steps_of_epoch = trainer.accumulate_grad_batches, trainer.num_training_batches
    if steps_of_epoch != float("inf"):
        steps_of_epoch = math.ceil(steps_of_epoch / batches)
    epochs, rest = divmod(step, steps_of_epoch)
    loop, inner = trainer.fit_loop, trainer.fit_loop.epoch_loop
    _set(loop.epoch_progress, int(epochs), int(epochs))
    _set(inner.batch_progress, batches * step, batches * int(rest))
    _set(inner.automatic_optimization.optim_progress.optimizer.step, of_all, 0)
    _set(inner.manual_optimization.optim_step_progress, of_all, 0)
    inner._batches_that_stepped = step
    if rest:  # The epoch goes on with the batches that are left.
        inner.restarting = True
        inner.update_restart_stage()
    for entry in trainer.lr_scheduler_configs:
        made = 0 if entry.reduce_on_plateau else {"epoch": int(epochs)}.get(entry.interval, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The optimizer's steps were made by others.
            for _ in range(made // entry.frequency):
                entry.scheduler.step()


def _set(progress: Any, total: int, current: int) -> None:
    """Sets what has been begun and ended of something that a loop counts."""
    for part, count in ((progress.total, total), (progress.current, current)):
        for one in fields(part):
            setattr(part, one.name, count)


def _clip_mean(optimizer: Any, clip_val: float) -> None:
    """Clips by the norm of the workers' mean gradient, where Lightning clips each worker's own.

    Args:
        optimizer: The wrapper, or Lightning's around it, which a module's hook may pass.
        clip_val: `gradient_clip_val` of the trainer.
    """
    wrapper = getattr(optimizer, "optimizer", optimizer)
    if clip_val > 0:
        psworker.clip_grad_norm_(wrapper, clip_val)


class _FirstRankIO(TorchCheckpointIO):  # type: ignore[misc]
    """Checkpoint files that only rank 0 writes and removes."""

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        if psworker.rank() == 0:
            super().save_checkpoint(*args, **options)

    def remove_checkpoint(self, *args: Any, **options: Any) -> None:
        if psworker.rank() == 0:
            super().remove_checkpoint(*args, **options)
