"""Copies between a device and the host, where the CPU stands for the device."""

import torch

from psworker.model.copies import Copies, Done, copies_of

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
    Done().wait()
    Done().hold(CPU)
    assert Done().is_over()
