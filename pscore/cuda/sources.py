"""The CUDA sources as one translation unit, and the options they are compiled with."""

from __future__ import annotations

import re
from pathlib import Path

FILES = ("common.cu", "dense.cu", "sparse.cu", "local.cu")
# The kernels have to agree with the CPU to the last bit: every operation is rounded by itself.
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")


def source() -> str:
    """Returns the text of all kernels."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in FILES)


def names() -> list[str]:
    """Returns the names of all kernels."""
    return re.findall(r'extern "C" __global__ void (\w+)\(', source())
