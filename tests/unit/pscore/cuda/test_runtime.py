"""How kernels are started: with stand-ins for CuPy's functions and torch's devices and streams.

They show what is called and how often. That the calls do what they should, only a GPU shows:
tests/gpu.
"""

import contextlib
import errno
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pscore.cuda import runtime
from pscore.cuda.encoders import THREADS
from pscore.cuda.sources import names


class Gpu:
    """Two devices, of which the first is current; and CuPy's functions."""

    def __init__(self) -> None:
        self.current = 0
        self.streams = {0: 7000, 1: 7001}
        self.loaded: list[tuple[int, bytes]] = []
        self.started: list[tuple[int, str, Any]] = []

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def module(self) -> Any:
        def start(name: str) -> Any:
            return lambda *arguments: self.started.append((self.current, name, arguments))

        return types.SimpleNamespace(
            load=lambda code: self.loaded.append((self.current, code)), get_function=start
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    fake = Gpu()
    cuda = types.ModuleType("cupy.cuda")
    cuda.function = types.SimpleNamespace(Module=fake.module)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(runtime, "compiled", lambda capability: b"%d%d" % capability)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    stream = lambda index: types.SimpleNamespace(cuda_stream=fake.streams[index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch, "empty", lambda *_, device: types.SimpleNamespace(device=device))
    yield fake
    vars(runtime)["_launcher"].cache_clear()


def test_without_a_folder_for_cupys_files_torch_does_the_work(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose root is read-only: CuPy makes its folder when it is imported."""
    cuda = types.ModuleType("cupy.cuda")

    def fail(name: str) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", "/home/user/.cupy")

    cuda.__getattr__ = fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    device: Any = types.SimpleNamespace(type="cuda", index=1)
    assert runtime.launcher(device) is None
    assert "/home/user/.cupy" in caplog.text
    assert "CUPY_CACHE_DIR" in caplog.text


def test_a_kernel_starts_on_its_own_device_and_torchs_stream_there(gpu: Gpu) -> None:
    launch = runtime.launcher(torch.device("cuda", 1))
    assert launch is not None
    launch("room", 3, (1, 2))
    gpu.streams[1] = 8001
    launch("move", 4, ())
    assert gpu.loaded == [(1, b"90")]  # Once.
    (first, second) = gpu.started
    assert first[:2] == (1, "room")
    assert first[2][:4] == ((3,), (THREADS,), (1, 2), 0)
    assert [one[2][4].ptr for one in (first, second)] == [7001, 8001]
    assert {"room", "move"} <= {*names()}
    assert gpu.current == 0
