"""The weight versions of a stage's replica that minibatches in flight still need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Weights = list[torch.Tensor]


class WeightRing:
    """Keeps the weights of some versions; a slot that is free is written again.

    A forward on a slot's tensors makes autograd keep them, so that its backward uses the same
    version without a copy.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, in_place: bool = False) -> None:
        """Begins with version 0, the parameters' values.

        Args:
            parameters: Their values are the newest version, after each update.
            in_place: Whether there is one slot, which each update overwrites: no stashing.
        """
        self._parameters = list(parameters)
        self._in_place = in_place
        self._free: list[Weights] = []
        self._slots: dict[int, Weights] = {0: self._copied()}
        self.most = 1  # Slots held at once, so far.

    def weights(self, version: int) -> Weights:
        """Returns the weights of a version, leaves that take gradients."""
        return self._slots[version]

    def add(self, version: int, oldest: int) -> None:
        """Stores the parameters as a version, and frees those before `oldest`."""
        if self._in_place:
            slot = next(iter(self._slots.values()))
            for old, new in zip(slot, self._parameters, strict=True):
                # Behind autograd's back, as a pipeline without stashing would.
                old.data.copy_(new.detach())
            self._slots = dict.fromkeys(range(oldest, version + 1), slot)
            return
        for former in [number for number in self._slots if number < oldest]:
            self._free.append(self._slots.pop(former))
        self._slots[version] = self._copied()
        self.most = max(self.most, len(self._slots))

    def _copied(self) -> Weights:
        if not self._free:
            return [value.detach().clone().requires_grad_() for value in self._parameters]
        slot = self._free.pop()
        with torch.no_grad():
            for old, new in zip(slot, self._parameters, strict=True):
                old.copy_(new)
        return slot
