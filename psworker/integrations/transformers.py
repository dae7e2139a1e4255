"""A `Trainer` of Hugging Face whose optimizer's steps are made by the shards.

    from psworker.integrations import hide_launcher
    from psworker.integrations.transformers import PacelineTrainer

    hide_launcher()
    trainer = PacelineTrainer(model, args, train_dataset=part, paceline={"mode": "ssd(steps=5)"})

Each worker is a process of its own to Transformers, and trains on its own part of the data. Rank 0
alone saves; checkpoints, saved models and evaluation have the global weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import psworker
from pscore.rules.base import takes_all
from psworker.integrations import counts_steps

try:
    from transformers import Trainer
    from transformers.trainer_callback import TrainerState
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError:  # An instance is refused.
    Trainer = object

log = logging.getLogger("paceline")


class PacelineTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with `DistributedOptimizer` around the optimizer that it makes."""

    def __init__(
        self, *args: Any, paceline: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Makes the trainer, and joins the job.

        Args:
            *args: Of `Trainer`.
            paceline: Arguments of `DistributedOptimizer`: `{"mode": "ssd(steps=5)"}`.
            **options: Of `Trainer`.

        Raises:
            ConfigError: Transformers is not installed, or has made a process group.
            PacelineError: The shards do not answer, or refuse this worker.
        """
        if Trainer is object:
            raise psworker.ConfigError("PacelineTrainer needs `pip install transformers[torch]`")
        self._paceline = dict(paceline or {})
        self._wrapper: psworker.DistributedOptimizer | None = None
        self._first_step = 0  # The job's step with which this worker began.
        super().__init__(*args, **options)
        if self.args.world_size > 1:
            raise psworker.ConfigError(
                f"Transformers has made a process group of {self.args.world_size} processes, and "
                "would put DDP around the model; call psworker.integrations.hide_launcher() before "
                "TrainingArguments is made"
            )
        psworker.init()
        # Transformers asks its own rank who prints, logs and saves.
        self.args.distributed_state.process_index = psworker.rank()
        self.args.distributed_state.local_process_index = psworker.rank()
        self.state.is_world_process_zero = self.state.is_local_process_zero = psworker.rank() == 0

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Makes the optimizer as `Trainer` does, and puts the wrapper around it, once."""
        if self._wrapper is None:
            optimizer = super().create_optimizer(model)
            module = self.model if model is None else model
            with counts_steps():
                self._wrapper = self.optimizer = psworker.DistributedOptimizer(
                    optimizer, module.named_parameters(), **self._paceline
                )
        return self._wrapper

    def create_scheduler(self, *args: Any, **options: Any) -> Any:
        """Makes the scheduler as `Trainer` does, at the step with which this worker begins."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(*args, **options)
        if is_new and not isinstance(scheduler, ReduceLROnPlateau):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # The steps were made by others.
                for _ in range(self._first_step):
                    scheduler.step()
        return scheduler

    def _init_training_state(
        self, max_steps: int, steps_of_epoch: int, num_epochs: int, *args: Any
    ) -> tuple[int, int]:
        """Begins at the job's step, where others train already: this worker was started again.

        Returns:
            Epochs that are over, and minibatches of the next one that are to be left out.
        """
        place: tuple[int, int] = super()._init_training_state(
            max_steps, steps_of_epoch, num_epochs, *args
        )
        self._first_step = 0
        if self._wrapper is not None:
            return place
        self.create_optimizer()
        assert self._wrapper is not None
        if (step := self._wrapper.steps) <= self.state.global_step:
            return place
        self._remember_the_best(step)
        self._first_step = self.state.global_step = step
        self.state.epoch = step / steps_of_epoch
        if step >= max_steps:
            return num_epochs, 0
        epochs, steps = divmod(step, steps_of_epoch)
        batches = 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps
        return epochs, batches

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        """Prepares the training, and loads no state that accelerate only moves to its device.

        The shards have it, and a worker that is started again would wait for the others there.
        """
        wrapper = self.create_optimizer() if self._wrapper is None else self._wrapper
        vars(wrapper)["load_state_dict"] = lambda state_dict: None
        try:
            return super()._prepare_for_training(*args, **options)
        finally:
            vars(wrapper).pop("load_state_dict", None)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads a checkpoint as `Trainer` does, unless the job is beyond its step."""
        vars(self._wrapper).pop("load_state_dict", None)
        if not self._first_step:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _remember_the_best(self, step: int) -> None:
        """Reads which checkpoint was the best one up to a step, as the former process noted it."""
        newest = (
            get_last_checkpoint(self.args.output_dir) if self.args.load_best_model_at_end else None
        )
        if newest is not None and os.path.isfile(
            path := os.path.join(newest, "trainer_state.json")
        ):
            former = TrainerState.load_from_json(path)
            if former.global_step <= step and os.path.isdir(former.best_model_checkpoint or ""):
                for name in ("best_metric", "best_global_step", "best_model_checkpoint"):
                    setattr(self.state, name, getattr(former, name))

    def _run_epoch(self, *args: Any, **options: Any) -> Any:
        if self._first_step and options.get("resume_from_checkpoint") is None:
            options["resume_from_checkpoint"] = self.args.output_dir  # Leaves minibatches out.
        return super()._run_epoch(*args, **options)

    def train(self, *args: Any, **options: Any) -> Any:
        """Trains as `Trainer` does; with `load_best_model_at_end` all ranks get the best weights.

        Training with this trainer has then ended: the shards' weights are the last ones.
        """
        output = super().train(*args, **options)
        if self.args.load_best_model_at_end and self._wrapper is not None:
            best = {name: value.clone() for name, value in self.model.state_dict().items()}
            self._wrapper.close()
            try:
                psworker.broadcast_parameters(best)  # Rank 0 alone has saved, and so loaded them.
            except psworker.ConfigError:
                if self._first_step < self.state.max_steps:
                    raise
                log.warning(
                    "rank 0 has ended, and this worker was started again after the last step: it "
                    "has the best weights only if it reads them in %s",
                    self.args.output_dir,
                )
            self.model.load_state_dict(best)
        return output

    def evaluate(self, *args: Any, **options: Any) -> Any:
        """Evaluates the global weights."""
        with self._global_weights():
            return super().evaluate(*args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Predicts with the global weights."""
        with self._global_weights():
            return super().predict(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Saves the global weights, on rank 0."""
        if psworker.rank() == 0:
            with self._global_weights():
                super().save_model(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        if psworker.rank() == 0:
            with self._global_weights():
                super()._save_checkpoint(*args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._wrapper is None or not takes_all(self._wrapper.rule):
            return super()._clip_grad_norm(model)
        return psworker.clip_grad_norm_(self._wrapper, self.args.max_grad_norm)

    def _global_weights(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._wrapper is None else self._wrapper.global_weights()
