"""Checks that gradients that leave during backward are not changed afterwards.

Sending a gradient during backward hides its transfer behind the rest of backward, but then it must
not change any more: no gradient clipping, no unscaling, no second backward pass that accumulates. A
script's past steps do not show what it will do next, so gradients leave early only if the script
asks for it. Then `step()` compares each gradient with the one that has left, because `torch.amp`'s
kernels, `.data` and NumPy views change a gradient without changing its version. A difference is an
error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pscore.errors import ConfigError, GradientError

INSTEAD = "pass overlap=False to DistributedOptimizer"


class EarlyGradients:
    """The gradients of a step that have left during backward."""

    def __init__(self, overlap: bool, names: Sequence[str], *, has_views: bool = False) -> None:
        """Starts before the first step.

        Args:
            has_views: Whether a large `.grad` becomes a view of the flat vector (grad_views.py).

        Raises:
            ConfigError: `overlap` is something else, or does not go with `has_views`.
        """
        if overlap not in (True, False):
            raise ConfigError(
                f"overlap is {overlap!r}, must be True (gradients leave during backward, and the "
                "script does not change them afterwards) or False"
            )
        if has_views and not overlap:
            raise ConfigError("gradient_as_bucket_view=True needs overlap=True")
        self.is_wanted = bool(overlap)
        self.has_views = has_views
        self._names = names
        self._seen: dict[int, tuple[int, int]] = {}  # Parameter: identity and version of .grad.

    @property
    def has_begun(self) -> bool:
        """Whether backward has made a gradient in this step."""
        return bool(self._seen)

    def changed(self, what: str) -> None:
        """Records a change of a value that travels with every push of a step.

        Raises:
            GradientError: Some pushes may have left already in this step.
        """
        if self._seen:
            raise GradientError(
                f"{what} was changed after gradients had been pushed during backward; change it "
                f"before backward(), or {INSTEAD}"
            )

    def made(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Records that backward has made a gradient.

        Raises:
            GradientError: It has left already in this step.
        """
        if index in self._seen:
            raise self._error(index, "got a second gradient")
        self._seen[index] = self._mark(parameter)

    def moved(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Records that the wrapper itself has replaced a gradient's memory."""
        self._seen[index] = self._mark(parameter)

    def check(self, parameters: Sequence[torch.nn.Parameter]) -> list[int]:
        """Returns the parameters whose gradients have left, at the end of a step.

        Raises:
            GradientError: One of them was visibly changed since.
        """
        for index, mark in self._seen.items():
            if self._mark(parameters[index]) != mark:
                raise self._error(index, "was changed")
        return list(self._seen)

    def refuse(self, index: int) -> None:
        """Raises GradientError for a gradient that differs from the one that has left."""
        raise self._error(index, "was changed")

    def forget(self) -> None:
        """Ends a step: its gradients have been checked, or none has left."""
        self._seen.clear()

    def _error(self, index: int, what: str) -> GradientError:
        return GradientError(
            f"the gradient of {self._names[index]!r} {what} after it had been pushed during "
            f"backward; {INSTEAD} (it is what gradient clipping and loss scaling need), or "
            "accumulate inside `with optimizer.no_sync():`"
        )

    @staticmethod
    def _mark(parameter: torch.nn.Parameter) -> tuple[int, int]:
        grad = parameter.grad
        return (0, 0) if grad is None else (id(grad), grad._version)
