"""The kernels as the runtime compiles them: NVRTC needs no driver and no GPU."""

import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pscore.cuda import runtime
from pscore.cuda.sources import OPTIONS, names, source

nvidia = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
SM_80, SM_90 = (8, 0), (9, 0)


class NVRTCError(Exception):
    """As CuPy's."""


class StandIn:
    """NVRTC by the names of `cupy.cuda.nvrtc`, through NVIDIA's own Python package.

    CuPy is not among what the tests install, since it would need a GPU for anything else.
    """

    NVRTCError = NVRTCError

    def createProgram(self, text: str, name: str, *none: object) -> Any:  # noqa: N802
        try:
            status, program = nvidia.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], [])
        except RuntimeError as problem:  # Of cuda-pathfinder, which looks for the library.
            pytest.skip(f"NVRTC cannot be loaded: {problem}")
        assert status == nvidia.nvrtcResult.NVRTC_SUCCESS
        return program

    def compileProgram(self, program: Any, options: Sequence[str]) -> None:  # noqa: N802
        encoded = [option.encode() for option in options]
        (status,) = nvidia.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvidia.nvrtcResult.NVRTC_SUCCESS:
            raise NVRTCError(status)

    def getProgramLog(self, program: Any) -> str:  # noqa: N802
        log = self._read(nvidia.nvrtcGetProgramLogSize, nvidia.nvrtcGetProgramLog, program)
        return log.rstrip(b"\0\n").decode()

    def getCUBIN(self, program: Any) -> bytes:  # noqa: N802
        return self._read(nvidia.nvrtcGetCUBINSize, nvidia.nvrtcGetCUBIN, program)

    def getPTX(self, program: Any) -> bytes:  # noqa: N802
        return self._read(nvidia.nvrtcGetPTXSize, nvidia.nvrtcGetPTX, program)

    def destroyProgram(self, program: Any) -> None:  # noqa: N802
        nvidia.nvrtcDestroyProgram(program)

    @staticmethod
    def _read(size: Callable[[Any], Any], read: Callable[..., Any], program: Any) -> bytes:
        data = bytearray(size(program)[1])
        read(program, data)
        return bytes(data)


class Watched:
    """NVRTC, with log and PTX of each program, which are lost when it is destroyed."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.logs: list[str] = []
        self.ptx: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def getCUBIN(self, program: Any) -> Any:  # noqa: N802
        self.logs.append(str(self._real.getProgramLog(program)).strip())
        self.ptx.append(self._real.getPTX(program).decode())
        return self._real.getCUBIN(program)


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """NVRTC as the runtime finds it: CuPy's if that is installed."""
    if importlib.util.find_spec("cupy") is None:
        package, inner = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
        monkeypatch.setitem(sys.modules, "cupy", package)
        monkeypatch.setitem(sys.modules, "cupy.cuda", inner)
        real: Any = StandIn()
    else:
        inner = importlib.import_module("cupy.cuda")
        real = inner.nvrtc
    watched = Watched(real)
    monkeypatch.setattr(inner, "nvrtc", watched, raising=False)
    runtime.compiled.cache_clear()
    yield watched
    runtime.compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("capability", [SM_80, SM_90])
def test_every_kernel_compiles_without_a_warning(
    nvrtc: Watched, capability: tuple[int, int]
) -> None:
    code = runtime.compiled(capability)
    assert nvrtc.logs == [""]
    assert [name for name in names() if name.encode() not in code] == []
    assert len(names()) > 20


@pytest.mark.slow
def test_nothing_is_flushed_contracted_or_approximated(nvrtc: Watched) -> None:
    """Of the options that the runtime really passes: CuPy's RawModule adds -ftz=true to ours."""
    runtime.compiled(SM_90)
    (ptx,) = nvrtc.ptx
    found = set(re.findall(r"\b(\w+(?:\.\w+)*\.f(?:32|64))\b", ptx))
    assert {"add.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f64"} <= found
    is_wrong = re.compile(r"\.ftz|\.approx|\.full|^fma|^mad")
    assert [name for name in sorted(found) if is_wrong.search(name)] == []


@pytest.mark.slow
def test_options_that_flush_or_contract_are_seen(
    nvrtc: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [option for option in OPTIONS if "fmad" not in option and "prec" not in option]
    monkeypatch.setattr(runtime, "OPTIONS", (*kept, "-ftz=true", "--prec-div=false"))
    runtime.compiled(SM_90)
    (ptx,) = nvrtc.ptx
    assert "--ftz(-ftz)=true" in nvrtc.logs[0]  # The last one wins, with a warning.
    assert ".ftz" in ptx
    assert "fma." in ptx
    assert ".approx" in ptx or ".full" in ptx


@pytest.mark.usefixtures("nvrtc")
def test_an_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = source() + "\n__global__ void broken() { nothing(); }"
    monkeypatch.setattr(runtime, "source", lambda: broken)
    with pytest.raises(RuntimeError, match="nothing"):
        runtime.compiled(SM_80)
