"""Where tensors are."""

from __future__ import annotations

import torch


def is_on_device(tensor: torch.Tensor) -> bool:
    """Returns whether the host cannot read a tensor: work on it is queued and runs later."""
    return not tensor.is_cpu
