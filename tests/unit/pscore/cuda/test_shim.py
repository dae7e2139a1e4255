"""The shim finds a lost barrier, a misaligned load and flushed denormals."""

import ctypes
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from pscore.compressors import parse_compressor
from pscore.cuda.encoders import KernelEncoder
from pscore.cuda.sources import source
from tests.golden.compressors.vectors import gradient
from tests.unit.pscore.compressors.cases import EXTREMES, Sender
from tests.unit.pscore.cuda.shim import build, flushed_denormals, launcher

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
BARRIER = "__syncthreads();"
# Kernels' code up to a barrier, and a compressor that runs it. No place in memory depends on them.
BARRIERS = {
    "x[place(k) - blockIdx.x * BLOCK] = u[k];\n  " + BARRIER: "1bit",
    "lanes[t] = lane;\n  " + BARRIER: "1bit",
    "lanes[t] += lanes[t + half];\n    " + BARRIER: "2bit",
    "part[t] = largest;\n  " + BARRIER: "int8",
    "nibbles[row][threadIdx.x] = (u8)nibble;\n  }\n  " + BARRIER: "1bit",
}


def is_right(library: ctypes.CDLL, name: str, grad: np.ndarray) -> bool:
    """Returns whether kernels make the CPU's payload and residual."""
    compressor = parse_compressor(name)
    sender = Sender(compressor, len(grad))
    encoder = KernelEncoder(compressor, len(grad), CPU, launcher(library))
    expected = sender.encode(grad, seed=5, step=0)
    room = torch.zeros(len(grad) + 16)
    start = -room.data_ptr() // 4 % 16
    there = room[start : start + len(grad)]
    there.copy_(torch.from_numpy(grad))
    encoder.encode(there, seed=5, step=0)
    payload = encoder.finish(encoder.sent.numpy())
    return payload.tobytes() == expected.tobytes() and all(
        np.array_equal(encoder.state[key].numpy().view(np.uint32), value.view(np.uint32))
        for key, value in sender.state.items()
    )


@pytest.mark.parametrize("code", BARRIERS)
def test_a_lost_barrier_is_noticed(code: str) -> None:
    assert source().count(code) == 1
    without = source().replace(code, code.removesuffix(BARRIER))
    assert not is_right(build(without), BARRIERS[code], gradient(9000, 0))


@pytest.mark.parametrize("name", ["2bit", "bf16", "int8", "topk(ratio=0.1)", "fp16"])
def test_flushed_denormals_are_noticed(name: str) -> None:
    library = build()
    grads = [EXTREMES["denormal"], EXTREMES["mixed"]]
    assert all(is_right(library, name, grad) for grad in grads)
    with flushed_denormals(library):
        assert not all(is_right(library, name, grad) for grad in grads)


def test_a_misaligned_load_ends_the_process() -> None:
    text = (
        "import numpy as np\n"
        "from tests.unit.pscore.cuda.shim import build, launcher\n"
        "launch = launcher(build())\n"
        "values = np.zeros(4096, np.float32)\n"
        "start = -values.ctypes.data // 4 % 4\n"
        "flags = np.zeros(2, np.int32)\n"
        "for inner in (0, 1):\n"
        "    at = np.uint64(values.ctypes.data + 4 * (start + inner))\n"
        "    where = (at, np.uint64(0), np.int32(2000), np.uint64(flags.ctypes.data))\n"
        "    launch('room', 1, where)\n"
        "    print('aligned', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout == "aligned\n"
    assert done.returncode in (-signal.SIGILL, -signal.SIGTRAP)
