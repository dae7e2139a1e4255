"""Runs the CUDA sources on the CPU: compiled as C++ under `shim.hpp`, started through ctypes."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pscore.cuda.encoders import Launch
from pscore.cuda.sources import source

FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-shared", "-fPIC")


def kernel_names() -> list[str]:
    """Returns the names of all kernels."""
    return re.findall(r'extern "C" __global__ void (\w+)\(', source())


def build(folder: Path) -> ctypes.CDLL:
    """Compiles all kernels, with a function `launch_<kernel>` for each; skips without g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed; it compiles the CUDA sources for the CPU")
    launchers = "\n".join(
        f'extern "C" void launch_{name}(unsigned n, void** v) {{ shim::run({name}, n, v); }}'
        for name in kernel_names()
    )
    text = f'#include "shim.hpp"\n{source()}\n{launchers}\n'
    (folder / "kernels.cpp").write_text(text)
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
