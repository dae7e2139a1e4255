"""Processes forked from the measuring one: many workers start in the time of one import of torch.

Fork them before anything starts a thread. A process that raises tells the measuring one with its
traceback; none outlives it.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import kit

TIMEOUT_S = 300.0
CLONE_NEWNET = 0x40000000
FORK = multiprocessing.get_context("fork")


class Forked:
    """A process that runs one function, and the line to it."""

    def __init__(self, work: Callable[..., None], *args: Any, namespace: str | None = None) -> None:
        """Forks a process, which calls `work(line, *args)`.

        Args:
            work: Gets its end of the line, a `Connection`, and the arguments.
            args: Further arguments.
            namespace: Network namespace to enter first; None: this one's.
        """
        self._line, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_run, args=(work, theirs, namespace, args), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = int(self._process.pid or 0)  # Its process id.

    def tell(self, value: Any = None) -> None:
        """Sends something to the process; nothing happens if it is gone."""
        try:
            self._line.send(value)
        except OSError:
            return

    def hear(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Returns the next thing that the process sends.

        Raises:
            RuntimeError: It sends nothing in time, raises, or is gone.
        """
        if not self._line.poll(timeout_s):
            raise RuntimeError(f"process {self.pid} has sent nothing for {timeout_s:g} s")
        try:
            value = self._line.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"process {self.pid} has ended") from None
        if isinstance(value, _Failure):
            raise RuntimeError(f"process {self.pid} raised\n{value.text}")
        return value

    def has_told(self) -> bool:
        """Whether `hear` returns, or raises, at once."""
        return self._line.poll(0)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def end(self) -> None:
        """Kills the process in any case."""
        self._process.kill()
        self._process.join()
        self._line.close()


class _Failure:
    """The exception of a process."""

    def __init__(self, text: str) -> None:
        self.text = text


def prepare() -> None:
    """Imports what workers would each import in their first step; call it before the first fork."""
    torch.set_num_threads(1)  # A thread pool would not survive the fork.
    torch.optim.SGD([torch.zeros(1)], lr=0.1).zero_grad()  # Torch imports its compiler here.
    for name in ("psworker.training.optimizer", "psworker.peers.peers"):
        importlib.import_module(name)


def _run(
    work: Callable[..., None], line: Connection, namespace: str | None, args: Sequence[Any]
) -> None:
    kit.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if namespace is not None:
            enter(namespace)
        work(line, *args)
    except BaseException:  # noqa: BLE001 - whatever it is, the measuring process has to see it
        line.send(_Failure(traceback.format_exc()))
    finally:
        os._exit(0)


def enter(namespace: str) -> None:
    """Moves this process into a network namespace; it must have one thread.

    Raises:
        OSError: There is no such namespace, or it may not be entered.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)


@contextmanager
def ending(processes: Sequence[Forked]) -> Iterator[Sequence[Forked]]:
    """Ends processes in any case."""
    try:
        yield processes
    finally:
        for process in processes:
            process.end()
