"""Compiles the kernels with CuPy, and starts them on torch's memory and torch's current stream.

CuPy compiles with NVRTC at the first use and caches the result on disk. Nothing here waits for the
device. Without CuPy `launcher` logs once what to install, and torch does the work.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

from pscore.cuda.encoders import THREADS, Launch
from pscore.cuda.sources import OPTIONS, source

log = logging.getLogger("paceline")
DEFAULT_CUDA = 12


def advice(cuda_version: str | None) -> str:
    """Returns advice on the package for torch's version of CUDA, such as "12.8"."""
    major = int(cuda_version.split(".")[0]) if cuda_version else DEFAULT_CUDA
    return (
        "CuPy is not installed: torch compresses gradients and makes local updates on the device, "
        f"in many passes; torch has CUDA {cuda_version}, so `pip install paceline[cuda{major}]` "
        f"(or cupy-cuda{major}x) adds kernels that make one"
    )


def launcher(device: torch.device) -> Launch | None:
    """Returns a function that starts kernels on a device; None, after a warning, without CuPy."""
    if device.type != "cuda":
        return None
    return _launcher(torch.empty(0, device=device).device.index)


@functools.cache
def _launcher(index: int) -> Launch | None:
    if importlib.util.find_spec("cupy") is None:
        log.warning("%s", advice(torch.version.cuda))
        return None
    import cupy

    module = cupy.RawModule(code=source(), options=OPTIONS, backend="nvrtc")
    functions: dict[str, Callable[..., None]] = {}

    def launch(name: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        stream = torch.cuda.current_stream(index).cuda_stream
        with cupy.cuda.Device(index), cupy.cuda.ExternalStream(stream, index):
            if name not in functions:
                functions[name] = module.get_function(name)
            functions[name]((num_blocks,), (THREADS,), arguments)

    return launch
