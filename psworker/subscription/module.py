"""Writes published weights into a torch module, in place: changed elements only."""

from __future__ import annotations

import numpy as np
import torch

from pscore.errors import BrokenModuleError, ConfigError
from pscore.publish.codec import BitArray
from pscore.subscription.weights import PublishedWeights, tensors_of

FEW = 8  # Up to one element of so many is written by its index; else the whole tensor.


class ModuleTarget:
    """The parameters of a module that follow published weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Changes nothing yet; raises ConfigError if it is no module."""
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"into() takes a torch.nn.Module, not a {type(module).__name__}")
        self._parameters = dict(module.named_parameters())
        self._written: BitArray | None = None  # The version in the module; None: not known.
        self._next: BitArray | None = None
        self._patches: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []

    def prepare(self, weights: PublishedWeights) -> None:
        """Finds the changes that lead to a version, and copies them to the module's devices.

        Raises:
            ConfigError: The module has other parameters.
        """
        layout = weights.layout
        differing = {spec.name for spec, _ in tensors_of(layout)} ^ set(self._parameters)
        if differing:
            raise ConfigError(f"module and job differ in the parameters {sorted(differing)[:4]}")
        self._patches = []
        for spec, begin in tensors_of(layout):
            parameter = self._parameters[spec.name]
            if tuple(parameter.shape) != spec.shape:
                raise ConfigError(
                    f"{spec.name!r} is {tuple(parameter.shape)} in the module, {spec.shape} in the "
                    "job"
                )
            new = weights.bits[begin : begin + spec.numel]
            indices = None
            if self._written is not None and parameter.is_contiguous():
                changed = np.flatnonzero(new != self._written[begin : begin + spec.numel])
                if len(changed) == 0:
                    continue
                if len(changed) * FEW <= spec.numel:
                    indices = torch.from_numpy(changed).to(parameter.device)
                    new = new[changed]
            values = torch.from_numpy(np.array(new)).view(torch.bfloat16)
            self._patches.append((parameter, indices, values.to(parameter.device, parameter.dtype)))
        self._next = weights.bits

    def apply(self) -> None:
        """Writes the version that was prepared; without one, nothing.

        Raises:
            BrokenModuleError: A part of it could not be written.
        """
        if self._next is None:
            return
        written, self._written = self._next, None
        try:
            with torch.no_grad():
                for parameter, indices, values in self._patches:
                    if indices is None:
                        parameter.copy_(values.view(parameter.shape))
                    else:
                        parameter.view(-1).index_copy_(0, indices, values)
        except RuntimeError as problem:
            raise BrokenModuleError(
                f"the module holds a part of a version: {problem}; commit the next one before it "
                "is used"
            ) from problem
        self._written, self._next, self._patches = written, None, []
