"""The part of a step that a worker makes by itself, where it runs the wrapped optimizer."""

from __future__ import annotations

import torch


class LocalStep:
    """The local part of a step where there is none, because the shards run the optimizer."""

    def make(self, *, skips: bool) -> None:
        """Makes one step, unless the script leaves it out."""

    def announce(self) -> None:
        """Reports that this worker takes part again; all do so before any starts."""

    def start(self) -> int | None:
        """Begins with the weights that the model has now.

        Returns:
            The step of the workers with which this one makes its steps; None: it depends on none.
        """
        return None

    def begin(self) -> None:
        """Notes that the model has the weights with which the next step begins."""

    def part(self) -> None:
        """Notes that this worker makes no further step."""

    def close(self) -> None:
        """Closes the connections that the step has to other workers, if any."""

    def share_state(self) -> None:
        """Makes the wrapped optimizer's state the same on all workers; all of them call it.

        Raises:
            PacelineError: A shard does not answer.
        """

    def note_average(self, average: torch.Tensor) -> None:
        """Notes an average of all models, `(layout.numel,)`."""
