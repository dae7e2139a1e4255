"""Every kernel compiles for the GPUs we name; NVRTC needs no driver and no GPU."""

import pytest

from pscore.cuda.sources import OPTIONS, source
from tests.unit.pscore.cuda.shim import kernel_names

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")


def compiled(text: str, architecture: str) -> tuple[bytes, str]:
    """Returns the machine code, empty if there is an error, and the log of NVRTC."""
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        pytest.skip(f"NVRTC cannot be loaded: {status}")
    options = [f"--gpu-architecture={architecture}".encode(), *(o.encode() for o in OPTIONS)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = bytes(log).rstrip(b"\0\n").decode()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return b"", said
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, code)
    return bytes(code), said


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_kernel_compiles_without_a_warning(architecture: str) -> None:
    code, said = compiled(source(), architecture)
    assert not said
    assert code
    assert [name for name in kernel_names() if name.encode() not in code] == []
    assert len(kernel_names()) > 20


def test_an_error_is_seen() -> None:
    code, said = compiled(source() + "\n__global__ void broken() { nothing(); }", "sm_80")
    assert not code
    assert "nothing" in said
