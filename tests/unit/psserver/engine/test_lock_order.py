"""No thread of a shard takes an earlier lock while it holds a later one."""

import ast
import itertools
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from pscore.net import sockets, wire
from pscore.net.listener import Listener
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import data_pb2
from psserver.engine import reading
from psserver.service.data_socket import make_listener
from tests.house.source import PACKAGES, modules_or_skip, name
from tests.unit.psserver.front import Context, Front, play, pull_header, push_header, sender
from tests.unit.psserver.ordered import RANKS, ordered

NUMBERS = itertools.count()  # Of local sockets.
NUMELS = (32, 1 << 17)  # A slice stepped where it arrives, and one left to the executor.
NUM_WORKERS = 3
NUM_STEPS = 6
WAIT_S = 200.0

# Locks that no other code of a shard runs under.
ELSEWHERE = {
    "pscore.net.channel",  # Of the requesting side.
    "pscore.net.faults",  # Of tests.
    "pscore.net.followed",  # Made when the module is imported; system calls only run under it.
    "psserver.dashboard.history",  # Of the dashboard's process.
    "psserver.publish.relayed",  # Of a relay.
    "pscore.subscription.reader",  # Of a reader.
    "psserver.copies.copier",  # Of the process that takes checkpoints.
    "psserver.process.checkpoint_keeper",  # Of the supervisor.
    "psserver.logs.setup",  # Made when the module is imported; guards lines of the log.
}


class Worker:
    """One connection of a worker."""

    def __init__(self, server: Listener, rank: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), WAIT_S)
        self.rank = rank

    def train(self) -> None:
        with self.socket:
            for step in range(NUM_STEPS):
                for table, numel in enumerate(NUMELS):
                    owner = sender(self.rank, table=table)
                    push = push_header(self.rank, step, sender=owner)
                    self.send(data_pb2.Envelope(id=1, push=push), np.ones(numel, np.float32))
                    pull = pull_header(self.rank, step + 1, step + 1, sender=owner, wait_ms=9000)
                    self.send(data_pb2.Envelope(id=2, pull=pull))
                for _ in range(2 * len(NUMELS)):
                    self.receive()

    def send(self, envelope: data_pb2.Envelope, *arrays: np.ndarray) -> None:
        parts = [wire.as_bytes(array) for array in arrays]
        sockets.send_all(self.socket, sockets.frame_parts(envelope.SerializeToString(), parts))

    def receive(self) -> None:
        incoming = sockets.read_header(self.socket)
        assert incoming is not None
        incoming.skip()
        assert not data_pb2.Envelope.FromString(incoming.header).HasField("failed")


async def train_and_look(front: Front) -> None:
    """Trains through sockets while the status and the metrics are read."""
    for rank in range(NUM_WORKERS):
        await front.join(rank, NUM_WORKERS)
    for index, numel in enumerate(NUMELS):
        tensors = [pb.Tensor(name="w", shape=[numel], dtype="float32")]
        await front.define(name=f"t{index}", tensors=tensors)
        owner = sender(0, table=index)
        header = push_header(0, 0, role=data_pb2.ROLE_WEIGHTS, hyper=[], sender=owner)
        await front.push(header, np.zeros(numel, np.float32))
    local = f"test-order-{os.getpid()}-{next(NUMBERS)}"
    server = make_listener(front.engine, "127.0.0.1", 0, local)
    server.start()
    failed: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            worker.train()
        except (AssertionError, OSError) as problem:
            failed.append(problem)

    threads = [
        threading.Thread(target=run, args=(Worker(server, rank),)) for rank in range(NUM_WORKERS)
    ]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await front.control.Status(pb.StatusRequest(), Context())
            reading.figures(front.engine)
            front.engine.tick()
            assert front.engine.jobs
            threads[0].join(0.01)
    finally:
        server.stop()
    assert not failed, failed


def test_the_locks_of_a_shard_are_taken_in_their_order() -> None:
    with ordered() as record:
        play(train_and_look)
    assert not record.found, sorted(set(record.found))
    wanted = {("engine", "slice queue"), ("engine", "weights"), ("connection", "budget")}
    assert wanted <= record.nested, "the order was hardly exercised"


def test_a_wrong_order_is_found() -> None:
    async def scene(front: Front) -> None:
        await front.ready()
        with front.engine.budget._lock:
            reading.figures(front.engine)

    with ordered() as record:
        play(scene)
    (found,) = set(record.found)
    assert found.startswith("engine taken under ['budget'] at reading.py:")


def test_two_locks_of_one_kind_are_never_held_together() -> None:
    async def scene(front: Front) -> None:
        await front.ready()
        await front.define(name="other")
        (first, second) = (
            queue for table in front.running.tables.values() for queue in table.queues.values()
        )
        with first._lock:
            assert not second.append([])

    with ordered() as record:
        play(scene)
    (found,) = set(record.found)
    assert found.startswith("slice queue taken under ['slice queue'] at slice_queue.py:")


def makes_lock(path: Path) -> bool:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(ast.unparse(c.func) in ("threading.Lock", "threading.RLock") for c in calls)


@pytest.mark.slow
def test_every_lock_of_a_shard_has_a_place_in_the_order() -> None:
    paths = [path for path in modules_or_skip(*PACKAGES) if makes_lock(path)]
    modules = {name(path).removesuffix(".py").replace("/", ".") for path in paths}
    of_shards = {module for module in modules if not module.startswith("psworker.")}
    assert of_shards - ELSEWHERE == set(RANKS)
