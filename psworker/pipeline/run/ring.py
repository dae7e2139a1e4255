"""The weight versions of a stage's replica that minibatches in flight still need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Weights = list[torch.Tensor]


class WeightRing:
    """Keeps the weights of some versions; memory that is free is written again.

    A forward on a version's tensors makes autograd keep them, so that its backward uses the same
    version without a copy. The newest version is the memory of the parameters, where they can be
    moved: an update that would overwrite a version in use moves them to a copy first.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], *, moves: bool = True, in_place: bool = False
    ) -> None:
        """Begins with version 0, the parameters' values.

        Args:
            parameters: Their values are the newest version, after each update.
            moves: Whether the parameters may get other memory; else each version is a copy.
            in_place: Whether there is one copy, which each update overwrites: no stashing.
        """
        self._parameters = list(parameters)
        self._moves, self._in_place = moves and not in_place, in_place
        self._free: list[Weights] = []
        self._newest = 0
        self._slots: dict[int, Weights] = {0: self._shown()}
        self.most = self.held  # Versions in memory at once, so far.

    @property
    def held(self) -> int:
        """Versions in memory, the parameters included."""
        slots = [*list(self._slots.values()), *self._free]
        return len({id(slot) for slot in slots}) + (not self._moves)

    def weights(self, version: int) -> Weights:
        """Returns the weights of a version, leaves that take gradients."""
        return self._slots[version]

    def update(self, oldest: int) -> None:
        """Frees the versions that are not needed any more, before an update of the parameters.

        Args:
            oldest: The oldest version that is used behind the update.
        """
        if self._in_place:
            kept = min(oldest, self._newest)
            self._slots = {number: slot for number, slot in self._slots.items() if number >= kept}
            return
        is_used = oldest <= self._newest
        for number in [number for number in self._slots if number < oldest]:
            slot = self._slots.pop(number)
            if number != self._newest or not self._moves:  # Else it is the parameters' memory.
                self._free.append(slot)
        if self._moves and is_used:
            for parameter, own in zip(self._parameters, self._copied(), strict=True):
                parameter.data = own.data

    def add(self, version: int) -> None:
        """Stores the parameters, behind an update, as a version."""
        self._newest = version
        if self._in_place:
            slot = next(iter(self._slots.values()))
            for old, new in zip(slot, self._parameters, strict=True):
                # Behind autograd's back, as a pipeline without stashing would.
                old.data.copy_(new.detach())
            self._slots[version] = slot
            return
        self._slots[version] = self._shown()
        self.most = max(self.most, self.held)

    def _shown(self) -> Weights:
        """Returns the newest weights as leaves: in the parameters' memory, or copies."""
        if self._moves:
            return [value.data.requires_grad_() for value in self._parameters]
        return self._copied()

    def _copied(self) -> Weights:
        if not self._free:
            return [value.detach().clone().requires_grad_() for value in self._parameters]
        slot = self._free.pop()
        with torch.no_grad():
            for old, new in zip(slot, self._parameters, strict=True):
                old.copy_(new)
        return slot
