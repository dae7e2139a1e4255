"""When a gradient may leave: as soon as backward has made it, or only at `step()`.

A gradient that leaves during backward hides its way behind the rest of backward, but then nobody
may change it any more: gradient clipping, unscaling, or a second backward pass that accumulates.
`auto` watches the first steps: if no gradient (nor a learning rate, or `samples`) is touched
between its hook and `step()`, and each hook fires once a step, pushes leave early from then on. A
change that comes later all the same is an error that names it, never a silent push of the old.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pscore.errors import ConfigError, GradientError

WATCHED_STEPS = 3


class Overlap:
    """Whether gradients leave early, and the proof that none was changed afterwards."""

    def __init__(self, overlap: bool | str, names: Sequence[str]) -> None:
        """Starts watching.

        Args:
            overlap: True, False or "auto".
            names: Of the parameters.

        Raises:
            ConfigError: `overlap` is something else.
        """
        if overlap not in (True, False, "auto"):
            raise ConfigError(f"overlap is {overlap!r}, must be True, False or 'auto'")
        self.is_wanted = self.is_early = overlap is True
        self._watches = overlap == "auto"
        self._names = names
        self._seen: dict[int, tuple[int, int]] = {}  # Parameter: identity and version of .grad.
        self._steps = 0

    @property
    def has_begun(self) -> bool:
        """Whether backward has made a gradient in this step."""
        return bool(self._seen)

    def changed(self, what: str) -> None:
        """Notes that something was changed that travels with every push of a step.

        Raises:
            GradientError: Some of them may have left already in this step.
        """
        if self._seen and self.is_early:
            raise GradientError(
                f"{what} was changed after gradients had been pushed during backward; change it "
                "before backward(), or pass overlap=False to DistributedOptimizer"
            )
        if self._seen:
            self._watches = False

    def made(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Notes that backward has made a gradient.

        Raises:
            GradientError: It has left already in this step.
        """
        if index in self._seen:
            if self.is_early:
                raise GradientError(self._message(index, "got a second gradient"))
            self._watches = False
        self._seen[index] = self._mark(parameter)

    def moved(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Notes that the wrapper itself has given a gradient other memory."""
        self._seen[index] = self._mark(parameter)

    def finish(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Checks, at the end of a step, that what was noted is still the same.

        Raises:
            GradientError: A gradient was changed after it had left.
        """
        for index, mark in self._seen.items():
            if self._mark(parameters[index]) != mark:
                if self.is_early:
                    raise GradientError(self._message(index, "was changed"))
                self._watches = False
        self._seen.clear()
        self._steps += 1
        if self._watches and self._steps >= WATCHED_STEPS:
            self.is_early, self._watches = True, False

    def forget(self) -> None:
        """Takes a step for not begun: nothing of it has left, and it is left out."""
        self._seen.clear()

    def _message(self, index: int, what: str) -> str:
        return (
            f"the gradient of {self._names[index]!r} {what} after it had been pushed during "
            "backward; pass overlap=False to DistributedOptimizer (it is what gradient clipping "
            "and accumulation need)"
        )

    @staticmethod
    def _mark(parameter: torch.nn.Parameter) -> tuple[int, int]:
        grad = parameter.grad
        return (0, 0) if grad is None else (id(grad), grad._version)
