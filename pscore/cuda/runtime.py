"""Compiles the kernels with NVRTC, and starts them on torch's memory and torch's current stream.

NVRTC and the start of kernels are CuPy's. A process compiles all kernels when it starts the first
one, in about two seconds. Nothing here waits for the device. Without CuPy `launcher` logs once what
to install, and torch does the work.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

from pscore.cuda.encoders import THREADS, Launch
from pscore.cuda.sources import OPTIONS, names, source

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
    try:
        from cupy.cuda import function
    except OSError as problem:  # CuPy makes a folder as it is imported.
        log.warning("CuPy is not used (%s): set CUPY_CACHE_DIR to a folder for its files", problem)
        return None
    functions: dict[str, Callable[..., None]] = {}

    def launch(name: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        # CuPy's own guard would make a context on the device that was current before.
        with torch.cuda.device(index):
            if not functions:
                module = function.Module()
                module.load(compiled(torch.cuda.get_device_capability(index)))
                functions.update({known: module.get_function(known) for known in names()})
            stream = Stream(torch.cuda.current_stream(index).cuda_stream)
            functions[name]((num_blocks,), (THREADS,), arguments, 0, stream)

    return launch


class Stream:
    """A stream of torch, as CuPy's functions read it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        """Keeps the address; the stream is torch's."""
        self.ptr = ptr  # Its `cudaStream_t`.


@functools.cache
def compiled(capability: tuple[int, int]) -> bytes:
    """Returns the machine code of all kernels, compiled with `OPTIONS`; it needs no device.

    CuPy's RawModule would add -ftz=true, which flushes denormals to zero: the CPU's payloads and
    residuals keep them.

    Args:
        capability: Compute capability of the device, such as (9, 0).

    Raises:
        RuntimeError: NVRTC refuses the source; the message is its log.
    """
    from cupy.cuda import nvrtc

    major, minor = capability
    program = nvrtc.createProgram(source(), "paceline.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{major}{minor}"))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as problem:
        raise RuntimeError(nvrtc.getProgramLog(program)) from problem
    finally:
        nvrtc.destroyProgram(program)
