"""Runs the CUDA sources on the CPU: compiled as C++ under `shim.hpp`, started through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pscore.cuda.encoders import Launch
from pscore.cuda.sources import names, source

SHIM = Path(__file__).with_name("shim.hpp")
FOLDER = Path(__file__).resolve().parents[4] / "build" / "shim"
FLAGS = (
    *("-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-shared", "-fPIC"),
    # Undefined behaviour, such as a load of a misaligned float4, ends the process: SIGILL.
    *("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
)


def build(text: str | None = None) -> ctypes.CDLL:
    """Compiles all kernels, with a function `launch_<kernel>` for each; skips without g++.

    A library of the same text and compiler is made once, also for other processes.

    Args:
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
    code = f"{SHIM.read_text('utf-8')}\n{kernels}\n{launchers}\n"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256("\0".join((version, *FLAGS, code)).encode()).hexdigest()
    FOLDER.mkdir(parents=True, exist_ok=True)
    library = FOLDER / f"{key}.so"
    with (FOLDER / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            command = [compiler, *FLAGS, "-x", "c++", "-", "-o", f"{library}.draft"]
            done = subprocess.run(command, input=code, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            Path(f"{library}.draft").rename(library)
    return ctypes.CDLL(str(library))


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
