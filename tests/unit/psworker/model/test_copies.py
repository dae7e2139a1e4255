"""Copies between a device and the host, where the CPU stands for the device."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from psworker.model.copies import Copies, CopyEnd, copies_of, on_device, on_host, on_stream

CPU = torch.device("cpu")


def test_copies_to_the_host_are_over_at_once_on_the_cpu() -> None:
    host, there = torch.zeros(3), torch.arange(3.0)
    other, number = torch.zeros(()), torch.tensor(7.0)
    done = Copies(CPU).to_host((host, there), (other, number))
    assert done.is_over()
    done.wait()
    assert torch.equal(host, there)
    assert other == number


def test_incoming_tensors_have_memory_of_their_own() -> None:
    host = torch.arange(3.0)
    coming = copies_of(CPU).to_device([host, 2 * host])
    host.zero_()  # The next answer lands in the same memory.
    first, second = coming.arrived()
    assert coming.done.is_over()
    assert first.tolist() == [0.0, 1.0, 2.0]
    assert second.tolist() == [0.0, 2.0, 4.0]


def test_all_tables_of_a_device_share_its_streams() -> None:
    assert copies_of(CPU) is copies_of(torch.device("cpu"))


def test_without_a_copy_nothing_is_to_be_waited_for() -> None:
    CopyEnd().wait()
    CopyEnd().hold(CPU)
    assert CopyEnd().is_over()


def test_a_stream_is_left_before_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for torch's own: with the device outside no other one is touched at the end.

    A device that is current already is not entered: that takes as long as a copy's start.
    """
    done: list[str] = []

    @contextlib.contextmanager
    def entered(what: Any) -> Iterator[None]:
        done.append(f"enter {what}")
        yield
        done.append(f"leave {what}")

    stream = types.SimpleNamespace(device="cuda:1", device_index=1)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: entered("stream"))
    with on_stream(cast(Any, stream)):
        done.append("work")
    order = ["enter cuda:1", "enter stream", "work", "leave stream", "leave cuda:1"]
    assert done == order
    with on_stream(None):
        assert done == order
    done.clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with on_stream(cast(Any, stream)):
        done.append("work")
    assert done == ["enter stream", "work", "leave stream"]


def test_values_of_the_host_stay_as_they_are() -> None:
    values = torch.arange(3.0)
    assert on_host(values) is values
    assert on_device(values, CPU) is values


def test_values_of_a_device_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psworker.model.copies.is_on_device", lambda _: True)
    values = torch.arange(3.0)
    found = on_host(values)
    assert torch.equal(found, values)
    assert found is not values
