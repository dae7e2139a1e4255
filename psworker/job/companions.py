"""Tables that are trained beside the parameters of a model, as a protocol.

A room that has such tables registers the function that finds them in a model, so that the training
knows no room by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pscore.rules.base import Rule
from psworker.connection.membership.session import Session

Run = Callable[[Callable[[], Any]], Any]


class Companion(Protocol):
    """Tables of another kind than the model's, whose steps are those of the wrapped optimizer."""

    @property
    def by_step(self) -> bool:
        """Whether steps of these tables wait for workers."""

    @property
    def has_gradient(self) -> bool:
        """Whether backward has made a gradient of any of them since they were cleared."""

    def start(self) -> None:
        """Uploads first values where there are none, if this worker has to; `ask` follows.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def ask(self) -> int:
        """Asks the shards with which step this worker begins; from their answers on they wait.

        Returns:
            The step of the training.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def begin_at(self, step: int | None) -> Callable[[], None]:
        """Announces to the shards the step with which this worker begins, after `ask`.

        Args:
            step: Step of the training; None: that of `ask`.

        Returns:
            A function that waits for their answers; it raises as `ask` does.
        """

    def give_up_step(self) -> None:
        """Records that the step under way, which may not have left whole, is given up."""

    def begin_again(self) -> None:
        """Forgets pushes under way after this worker has joined the job again; `ask` follows.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def zero_grad(self) -> None:
        """Clears the gradients."""

    def prepare(self) -> None:
        """Checks gradients and hyper-parameters of the step under way, before anything has left.

        Raises:
            GradientError: A gradient holds NaN or Inf.
            ConfigError: A hyper-parameter is wrong.
        """

    def push(self, samples: float, *, skips: bool) -> None:
        """Pushes the gradients of the step under way.

        Args:
            samples: Weight in the mean of the step.
            skips: Whether this worker leaves the step out.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def finish(self) -> None:
        """Ends the step."""

    def flush(self) -> None:
        """Waits until the last pushes are counted.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def locate(self, step: int) -> None:
        """Sets the step at which all workers are, which have flushed: that of a loaded state.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """

    def end(self) -> None:
        """Ends everything: this worker leaves the job."""


Declare = Callable[[], Sequence[Companion]]


class FindCompanions(Protocol):
    """Finds the tables of one room in a model."""

    def __call__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        named: Sequence[tuple[str, torch.nn.Parameter]],
        rule: Rule,
        session: Session,
        beside: str,
        run: Run,
    ) -> Declare:
        """Returns the function that declares the tables at every shard, once all is checked.

        It returns the companions, none where the model has no such tables, and raises
        JobMismatchError if the job has other tables; the message names the difference.

        Args:
            beside: Name of the table of the dense part, as it was when training began.
            run: Runs a function; if this worker was declared lost, it rejoins and runs it again.

        Raises:
            ConfigError: A table has no optimizer, or an optimizer has other parameters.
        """


FINDERS: list[FindCompanions] = []  # The functions of the rooms that have been imported.
# Functions that each step calls: they warn of tables with a gradient that are part of no job.
WARNINGS: list[Callable[[], None]] = []
