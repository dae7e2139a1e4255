"""Copies between a GPU and pinned memory of the host, each way on a stream of its own.

A GPU copies while it computes, if copies and kernels are on different streams. Gradients therefore
leave on one stream while backward continues, and pulled weights come in on another one, into memory
of their own: the kernels that are queued by then may still read the weights in use. Nothing here
waits for the device, unless the caller does so by `Done.wait`.

A device that is not CUDA copies at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from psworker.model.device import is_on_device


class CopyEnd:
    """The end of some copies; a thread that waits for it uses no processor time."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """Follows an event that has been recorded; None: the copies are over."""
        self._event = event

    def is_over(self) -> bool:
        """Returns whether the copies are over; does not wait."""
        event = self._event
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until the copies are over; any thread may call it."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, device: torch.device) -> None:
        """Orders the current stream of a device behind the copies; this thread does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(device).wait_event(self._event)


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the stream that is current on a device; None: the device is not CUDA."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Context manager: makes a stream current, and its device; None changes nothing."""
    if stream is None:
        return contextlib.nullcontext()
    if torch.cuda.current_device() == stream.device_index:
        return torch.cuda.stream(stream)
    return _on_other_device(stream)


@contextlib.contextmanager
def _on_other_device(stream: torch.cuda.Stream) -> Iterator[None]:
    """Context manager: makes a stream of another device current.

    The device comes first: torch restores the stream that was current before, and a stream of
    another device would get a context there, of hundreds of megabytes.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class Copies:
    """The copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = self._coming = None
        if device.type == "cuda":
            self._leaving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._coming = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> CopyEnd:
        """Starts copies to the host, behind the work that the current stream has so far.

        Args:
            pairs: Pinned memory of the host, and the tensor of the device; neither may be written
                to before the copies are over.
        """
        if self._leaving is None:
            for host, there in pairs:
                host.copy_(there)
            return CopyEnd()
        self._leaving.wait_stream(torch.cuda.current_stream(self._device))
        with on_stream(self._leaving):
            for host, there in pairs:
                there.record_stream(self._leaving)  # Its memory may be freed before the copy ends.
                host.copy_(there, non_blocking=True)
            return self._done()

    def to_device(self, hosts: Sequence[torch.Tensor]) -> IncomingTensors:
        """Starts copies to new memory of the device, beside the work that it has so far.

        Args:
            hosts: Pinned memory of the host; it may not be written to before the copies are over.
        """
        if self._coming is None:
            return IncomingTensors(
                self._device, [host.to(self._device, copy=True) for host in hosts]
            )
        with on_stream(self._coming):
            there = [torch.empty_like(host, device=self._device) for host in hosts]
            for mine, host in zip(there, hosts, strict=True):
                mine.copy_(host, non_blocking=True)
            return IncomingTensors(self._device, there, self._done())

    @staticmethod
    def _done() -> CopyEnd:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return CopyEnd(event)


@functools.cache
def copies_of(device: torch.device) -> Copies:
    """Returns the copies of a device, whose streams all tables share."""
    return Copies(device)


class IncomingTensors:
    """Tensors on their way to a device.

    Attributes:
        done: The end of the copies; from then on the host's memory is free.
    """

    def __init__(
        self, device: torch.device, tensors: Sequence[torch.Tensor], done: CopyEnd | None = None
    ) -> None:
        self.done = CopyEnd() if done is None else done
        self._device = device
        self._tensors = tensors

    def arrived(self) -> list[torch.Tensor]:
        """Returns the tensors, for the current stream, which waits for them."""
        self.done.hold(self._device)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for tensor in self._tensors:
                tensor.record_stream(stream)  # It was allocated on the stream of the copies.
        return [*self._tensors]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's values on the host, once all work on it is done.

    A tensor of the host is returned as it is. From a GPU it is copied to pinned memory, which torch
    keeps for the next copy, and this thread waits without using processor time.
    """
    if not is_on_device(tensor):
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    copies_of(tensor.device).to_host((host, tensor)).wait()
    return host


def on_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns values of the host on a device, for its current stream, without waiting for the copy.

    On the CPU the values are returned as they are.
    """
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
