"""A worker of one process is a group of one, without torch.distributed and without a thread."""

import threading

import pytest
import torch

from pscore.errors import GroupError
from psworker.group.worker_group import WorkerGroup


def test_a_group_of_one_returns_what_it_got() -> None:
    group, tensor = WorkerGroup(), torch.tensor([1.0, 2.0])
    assert (group.rank, group.size, group.is_leader, group.is_alone) == (0, 1, True, True)
    assert group.sum([1.0, 2.0]) == [1.0, 2.0]
    assert group.gather([1.0, 2.0]) == [[1.0, 2.0]]
    assert group.largest(3.0) == 3.0
    assert group.sum_on_host(tensor) is tensor
    group.share([tensor], [0])
    assert tensor.tolist() == [1.0, 2.0]
    result = object()  # Not through JSON, as among several processes.
    assert group.led(lambda: result) is result


def test_the_errors_of_a_group_of_one_are_the_calls_own() -> None:
    problem = GroupError("x")

    def fail() -> None:
        raise problem

    with pytest.raises(GroupError) as caught:
        WorkerGroup().led(fail)
    assert caught.value is problem


def test_a_group_of_one_starts_and_ends_without_a_thread_and_without_torch_distributed() -> None:
    before = set(threading.enumerate())
    group = WorkerGroup()
    group.barrier()
    group.watch.check()
    group.watch.leave("finished", failed=True)
    group.watch.check()  # Nobody else has to end.
    assert set(threading.enumerate()) <= before
    assert not torch.distributed.is_initialized()
