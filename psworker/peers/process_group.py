"""Sums over workers by torch.distributed, in a process group of the members of one epoch.

Gloo has no way to end an operation in which a member is silent, and a group is destroyed only
after its operations. So each group has a thread of its own. The training thread waits for it while
the members stay, and leaves it to itself otherwise; it ends with its connections, or in time.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pscore.types import FloatArray
from psworker.gossip.base import TorchSum
from psworker.transports.daemon_threads import DaemonExecutor

MAKE_S = 20.0  # Longest time in which all members, which are ready, connect to each other.
ADD_S = 120.0  # Longest time of a sum; then the members meet, and wait there for the slowest.


dist: Any = distributed  # It has no types for process groups by themselves.


class GroupSums:
    """The sums of one worker: its store, and the group of the members of the newest epoch."""

    def __init__(self, host: str, host_of: Callable[[int], str]) -> None:
        """Makes no group yet."""
        self._host, self._host_of = host, host_of
        self._store: PeerStore | None = None
        self._group: ProcessGroup | None = None

    @property
    def port(self) -> int:
        """Port of this worker's store, which listens from now on."""
        if self._store is None:
            self._store = PeerStore(self._host)
        return self._store.port

    def add(self, wanted: TorchSum, own: int, device: torch.device) -> Future[FloatArray | str]:
        """Begins a sum; the result is that of all members, or why there is none.

        Args:
            own: Rank of this worker.
        """
        group = self._group
        if group is None or group.epoch != wanted.epoch:
            self.leave()
            hosts = [self._host if rank == own else self._host_of(rank) for rank in wanted.members]
            place = wanted.members.index(own)
            group = self._group = ProcessGroup(wanted, hosts, place, device)
        return group.add(wanted)

    def leave(self) -> None:
        """Leaves the present group, if there is one."""
        if self._group is not None:
            self._group.leave()
            self._group = None


class PeerStore:
    """A key-value store of torch's on this worker, through which the members of groups connect."""

    def __init__(self, host: str) -> None:
        """Listens at a free port of `host` alone."""
        with contextlib.ExitStack() as undo:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = undo.enter_context(socket.create_server((host, 0), family=family))
            self.port: int = listener.getsockname()[1]
            self._store = dist.TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
            )
            undo.pop_all()
            listener.detach()  # The store closes it.


class ProcessGroup:
    """The members of one epoch, as torch.distributed adds over them."""

    def __init__(
        self, wanted: TorchSum, hosts: Sequence[str], place: int, device: torch.device
    ) -> None:
        """Begins to make the group.

        Args:
            wanted: The first sum in it.
            hosts: Address of each member, in the order of the members.
            place: Index of this worker among them.
        """
        self.epoch = wanted.epoch
        self._hosts, self._place, self._device = hosts, place, device
        self._is_nccl = wanted.backend == "nccl"
        self._backend: Any = None  # The group of torch's, which the thread makes and uses.
        self._thread = DaemonExecutor(1, "collective")
        self._made: Future[None] = Future()
        self._thread.submit(lambda: self._make(wanted), self._made)

    def add(self, wanted: TorchSum) -> Future[FloatArray | str]:
        """Begins a sum over all members; the result is the same bits for each, or a reason."""
        done: Future[FloatArray | str] = Future()
        values = torch.from_numpy(wanted.values.copy())  # It may stay in use beyond a failure.
        self._thread.submit(lambda: self._add(values), done)
        return done

    def leave(self) -> None:
        """Leaves the group to its thread, which drops it when its operations are over."""
        done: Future[None] = Future()
        if self._is_nccl and self._backend is not None:
            with contextlib.suppress(RuntimeError):
                self._backend.abort()
        self._thread.submit(self._drop, done)
        self._thread.close()

    # ----- on the thread

    def _make(self, wanted: TorchSum) -> None:
        limit = timedelta(seconds=MAKE_S)
        store = dist.TCPStore(
            self._hosts[0], wanted.port, is_master=False, wait_for_workers=False, timeout=limit
        )
        store = dist.PrefixStore(f"epoch {wanted.epoch}", store)
        make = _make_nccl if wanted.backend == "nccl" else _make_gloo
        self._backend = make(store, self._place, len(self._hosts), self._hosts[self._place])

    def _add(self, values: torch.Tensor) -> FloatArray | str:
        try:
            self._made.result()
            there = values.to(self._device) if self._is_nccl else values
            self._backend.allreduce([there]).wait()
            total: FloatArray = there.cpu().numpy()
        except RuntimeError as problem:  # All errors of torch.distributed are.
            return str(problem).partition("\n")[0]
        return total

    def _drop(self) -> None:
        self._backend = None


def _make_gloo(store: Any, place: int, num: int, host: str) -> Any:
    """Returns a group over TCP from the address at which this worker listens for others.

    The variable GLOO_SOCKET_IFNAME names another interface, as everywhere in torch.
    """
    kind = dist.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    where = {"interface": interface} if interface else {"hostname": host}
    options = kind._Options()
    options._devices = [kind.create_device(**where)]
    options._timeout = timedelta(seconds=MAKE_S)
    group = kind(store, place, num, options)
    group._set_default_timeout(timedelta(seconds=ADD_S))
    return group


def _make_nccl(store: Any, place: int, num: int, host: str) -> Any:
    """Returns a group over NCCL, whose failures end the sum and not the process."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    kind = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=ADD_S)
    return kind(store, place, num, options)
