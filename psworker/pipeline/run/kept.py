"""The bytes that autograd keeps of a forward pass, for its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


class KeptTensors(contextlib.ExitStack):
    """Counts the tensors that autograd keeps inside a `with` block; each storage counts once."""

    def __init__(self, left_out: Iterable[torch.Tensor] = ()) -> None:
        """Begins with none.

        Args:
            left_out: Tensors that do not count: parameters.
        """
        super().__init__()
        self.nbytes = 0  # Bytes so far.
        self._left_out = {tensor.untyped_storage().data_ptr() for tensor in left_out}
        self._seen: dict[int, torch.Tensor] = {}

    def __enter__(self) -> KeptTensors:
        """Begins to count."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self.enter_context(hooks)
        self.callback(self._seen.clear)
        return self

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._left_out and storage.data_ptr() not in self._seen:
            # Alive, so that no other takes its place.
            self._seen[storage.data_ptr()] = tensor.detach()
            self.nbytes += storage.nbytes()
        return tensor


class Activations:
    """The activations of the minibatches in flight, measured once for each shape of an input."""

    def __init__(self) -> None:
        self.nbytes = 0  # Bytes that are kept for their backwards now.
        self._sizes: dict[torch.Size | None, int] = {}

    @contextlib.contextmanager
    def count(self, entry: Any, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """Adds those of the forward pass in a `with` block.

        Args:
            entry: Its input, a tensor; others count as much as the first one of them.
            weights: Its parameters, which do not count.
        """
        shape = _shape_of(entry)
        if shape in self._sizes:
            yield
        else:
            with KeptTensors(weights) as kept:
                yield
            self._sizes[shape] = kept.nbytes
        self.nbytes += self._sizes[shape]

    def drop(self, entry: Any) -> None:
        """Subtracts those of the forward pass of an input, whose backward is over."""
        self.nbytes -= self._sizes[_shape_of(entry)]


def _shape_of(entry: Any) -> torch.Size | None:
    return entry.shape if isinstance(entry, torch.Tensor) else None
