"""The choice of an encoder on a device: kernels with CuPy, else torch, else the host encodes."""

from __future__ import annotations

import functools
import logging

import torch

from pscore.compressors.base import Compressor
from pscore.cuda.base import Encoder
from pscore.cuda.encoders import KernelEncoder, can_encode
from pscore.cuda.plain import TorchEncoder
from pscore.cuda.runtime import launcher

log = logging.getLogger("paceline")


def make_encoder(compressor: Compressor, numel: int, device: torch.device) -> Encoder | None:
    """Returns an encoder for slices of `numel` elements on a device; logs the choice once.

    Returns:
        None if the host has to encode a copy of the gradient.
    """
    if compressor.needs_norm:
        _tell(str(compressor), device, "on the host: it needs a sum over all of a slice")
        return None
    if compressor.needs_origin:
        _tell(str(compressor), device, "on the host, which has the weights that moves begin at")
        return None
    if not can_encode(compressor):
        _tell(str(compressor), device, "by torch on the device: there are no kernels")
        return TorchEncoder(compressor, numel, device)
    launch = launcher(device)
    if launch is None:
        if device.type != "cuda":  # On CUDA `launcher` has logged it, with advice.
            _tell(str(compressor), device, "by torch on the device")
        return TorchEncoder(compressor, numel, device)
    _tell(str(compressor), device, "by kernels on the device")
    return KernelEncoder(compressor, numel, device, launch)


@functools.cache
def _tell(compressor: str, device: torch.device, way: str) -> None:
    log.info("%s of gradients on %s is encoded %s", compressor, device, way)
