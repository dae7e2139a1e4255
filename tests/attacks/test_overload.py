"""More than a shard can hold, through real sockets: refused or cut off, and others continue."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

import numpy as np

from pscore.net import sockets, wire
from pscore.net.budget import Budget
from pscore.net.listener import Listener
from pscore.partition import SLICES_PER_SHARD
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from psserver.service.data_socket import make_listener
from psserver.slices.store import SliceStore
from tests.unit.psserver.front import Front, played, pull_header, push_header, stores_of

NUMBERS = itertools.count()  # Of local sockets: a closed one's name is in use for a moment.

NUMEL = 1 << 20  # Of a slice, 4 MiB: the buffers of a socket do not hold several answers.
NBYTES = 4 * NUMEL
WAIT_S = 200.0


class Peer:
    """One connection to a shard."""

    def __init__(self, server: Listener) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), WAIT_S)
        self.data = np.zeros(NUMEL, np.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, version: int = 0) -> None:
        header = data_pb2.Envelope(id=7, pull=pull_header(0, version, version, wait_ms=9000))
        self.socket.sendall(wire.encode(header.SerializeToString()))

    def push(self, step: int, value: float = -1.0) -> None:
        header = data_pb2.Envelope(id=8, push=push_header(0, step))
        payload = wire.as_bytes(np.full(NUMEL, value, np.float32))
        sockets.send_all(self.socket, sockets.frame_parts(header.SerializeToString(), [payload]))

    def answer(self) -> data_pb2.Envelope:
        """Reads one answer; weights land in `data`."""
        incoming = sockets.read_header(self.socket)
        assert incoming is not None
        incoming.read_into(*[wire.as_bytes(self.data)] if incoming.payload_nbytes else ())
        return data_pb2.Envelope.FromString(incoming.header)

    def is_cut(self) -> bool:
        """Reads what there is to the end of the connection."""
        try:
            while self.socket.recv(1 << 20):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


@contextmanager
def listening(front: Front) -> Iterator[Listener]:
    server = make_listener(front.engine, "127.0.0.1", 0, f"test-{os.getpid()}-{next(NUMBERS)}")
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def ready(front: Front, budget_nbytes: int) -> None:
    front.engine.budget = Budget(budget_nbytes)
    await front.join(0, 1)
    await front.define(
        tensors=[pb.Tensor(name="w", shape=[SLICES_PER_SHARD * NUMEL], dtype="float32")]
    )
    header = push_header(0, 0, role=data_pb2.ROLE_WEIGHTS, hyper=[])
    await front.push(header, np.zeros(NUMEL, np.float32))


def eventually(front: Front, nbytes: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while front.engine.budget.left != nbytes:
        assert time.monotonic() < deadline_s, front.engine.budget.left
        time.sleep(0.01)


@played
async def test_a_slow_reader_stalls_nobody_and_reads_whole_versions(front: Front) -> None:
    await ready(front, 1 << 30)
    with listening(front) as server, Peer(server) as slow, Peer(server) as quick:
        for step in range(6):
            for _ in range(4):  # Of each version; none of them is read yet.
                slow.ask(step)
            quick.push(step)
            assert quick.answer().pushed.version <= step + 1
            quick.ask(step + 1)
            assert quick.answer().pulled.version == step + 1
            assert (quick.data == step + 1).all()
        assert front.engine.budget.left < 1 << 30
        for _ in range(24):
            version = slow.answer().pulled.version
            assert (slow.data == version).all()


@played
async def test_a_peer_that_does_not_read_is_disconnected(front: Front) -> None:
    nbytes = 16 * NBYTES
    await ready(front, nbytes)
    with listening(front) as server:
        with Peer(server) as greedy, Peer(server) as quick:
            with suppress(ConnectionError):  # It may be cut before it has asked 40 times.
                for _ in range(40):
                    greedy.ask()
            for step in range(3):
                quick.push(step)
                quick.answer()
                quick.ask(step + 1)
                assert quick.answer().pulled.version == step + 1
            assert greedy.is_cut()
        store = stores_of(front.running)[0]
        assert isinstance(store, SliceStore)
        deadline_s = time.monotonic() + WAIT_S
        while store.copies.num_leases:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    eventually(front, nbytes)


@played
async def test_a_push_beyond_the_budget_is_refused_with_what_is_left(front: Front) -> None:
    await ready(front, 2 * NBYTES - 4)
    with listening(front) as server, Peer(server) as first, Peer(server) as second:
        first.push(5)  # Too far ahead: it waits, and keeps its bytes.
        deadline_s = time.monotonic() + WAIT_S
        while front.engine.budget.left != NBYTES - 4:
            assert time.monotonic() < deadline_s
        second.push(6)
        failed = second.answer().failed
        assert failed.kind == "LimitError"
        assert f"a push wants {NBYTES} bytes under way, {NBYTES - 4} of" in failed.message
        second.ask()
        assert second.answer().pulled.ready  # The connection continues.


@played
async def test_many_connections_that_say_nothing_hold_nobody_up(front: Front) -> None:
    await ready(front, 1 << 30)
    before = set(threading.enumerate())
    with listening(front) as server, ExitStack() as peers:
        silent = [peers.enter_context(Peer(server)) for _ in range(100)]
        for peer in silent[:50]:
            peer.socket.sendall(wire.MAGIC)  # The begin of a frame that does not continue.
        quick = peers.enter_context(Peer(server))
        quick.push(0)
        assert quick.answer().pushed.version <= 1
    for name in ("data-accept", "data-read"):  # The first start the others.
        for thread in set(threading.enumerate()) - before:
            if thread.name == name:
                thread.join(WAIT_S)
