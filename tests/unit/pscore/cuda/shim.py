"""Runs the CUDA sources on the CPU: compiled as C++ under `shim.hpp`, started through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pscore.cuda.encoders import Launch
from pscore.cuda.sources import names, source

FLAGS = (
    *("-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-shared", "-fPIC"),
    # Undefined behaviour, such as a load of a misaligned float4, ends the process: SIGILL.
    *("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
)


def build(folder: Path, text: str | None = None) -> ctypes.CDLL:
    """Compiles all kernels, with a function `launch_<kernel>` for each; skips without g++.

    Args:
        folder: Where to compile.
        text: The kernels' source; None: `source()`.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed; it compiles the CUDA sources for the CPU")
    launchers = "\n".join(
        f'extern "C" void launch_{name}(unsigned n, void** v) {{ shim::run({name}, n, v); }}'
        for name in names()
    )
    kernels = source() if text is None else text
    (folder / "kernels.cpp").write_text(f'#include "shim.hpp"\n{kernels}\n{launchers}\n')
    include = f"-I{Path(__file__).parent}"
    command = [compiler, *FLAGS, include, "kernels.cpp", "-o", "kernels.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernels.so"))


def launcher(library: ctypes.CDLL) -> Launch:
    """Returns what starts a kernel on memory of the host, and waits for it."""

    def launch(name: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        kept = [ctypes.create_string_buffer(value.tobytes()) for value in arguments]
        pointers = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(value) for value in kept))
        library[f"launch_{name}"](ctypes.c_uint(num_blocks), pointers)

    return launch


@contextlib.contextmanager
def flushed_denormals(library: ctypes.CDLL) -> Iterator[None]:
    """Context manager: kernels take denormals for zeros, as CUDA's do with -ftz=true."""
    if not library.flush_denormals(1):
        pytest.skip("no SSE on this processor: its mode for denormals is another")
    try:
        yield
    finally:
        library.flush_denormals(0)
