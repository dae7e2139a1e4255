"""The CPU as the device of the tests in this folder, so that the tests themselves are tested.

Torch's functions for CUDA then do nothing: of the real ones these tests need streams, which the CPU
has none of, and the mode in which a wait raises an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.integration import test_device
from tests.integration.test_device import STAND_IN


class Stream:
    """A stream that has always work and is never behind."""

    def __init__(self, device: Any = None) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        assert isinstance(other, Stream)


@contextlib.contextmanager
def cuda(where: str) -> Iterator[None]:
    """Context manager: replaces what these tests call of `torch.cuda`, where the CPU stands in."""
    if where != STAND_IN:
        yield
        return
    with contextlib.ExitStack() as stack:

        def replace(name: str, by: Any) -> None:
            stack.enter_context(mock.patch.object(torch.cuda, name, by))

        for name in ("synchronize", "set_sync_debug_mode", "_sleep"):
            replace(name, lambda *_: None)
        replace("Stream", Stream)
        replace("current_stream", Stream)
        replace("stream", lambda _: contextlib.nullcontext())
        yield


@contextlib.contextmanager
def place(where: str) -> Iterator[torch.device]:
    """Context manager: returns the device of a worker's model; the stand-in passes for a GPU."""
    with cuda(where), test_device.place(where) as device:
        yield device
