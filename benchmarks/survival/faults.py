"""The faults of the kill loop: each breaks a part of the cluster and returns its consequences.

To add one, write a function with the decorator `fault`, here or in a file that recovery.py imports
(injector.py). A figure of it in the JSON begins in `FIGURES` and is added to `injector.figures`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import grpc

from benchmarks import kit, measured
from benchmarks.survival.cluster import Cluster
from benchmarks.survival.injector import DISK, FIGURES, Damage, FaultInjector, fault, role
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc

STATUS_CLIENTS, STATUS_HZ = 8, 100.0
CROWD = 600  # Connections to each port: more than a shard here may have files open.
IDLE = 10_000  # Connections to each port of all shards, if the limit of files allows.
OWN_FILES = 64  # Files of a process that holds connections, beside these.
JOURNALLED_S = 3.0  # In which a shard journals again all that had no room.
SILENT_S = 15.0  # Three intervals of the scheduled checkpoints.
OPEN_S_MAX = 10.0  # For connections that wait to be accepted.
KILLS = ("worker", "shard", "coordinator")
ANSWER_S = 60.0  # For one answer of a shard; one that has just started may be slow.
FIGURES |= {"status_answers": 0, "status_s": 0.0}  # While `status` was polled.
FIGURES |= {"idle_connections": 0}  # To each port, of the last time.


# ----- processes that faults need


@role
def crowd(host: str, ports: Sequence[int], number: int) -> None:
    """Opens connections to each port and sends nothing on them, until standard input ends.

    Each port has a process of its own, which may have only so many files open. The processes have
    a low priority, as strangers on other machines would not take the shards' CPU.

    Args:
        host: Address of the shards.
        ports: Their ports.
        number: Connections to each port.
    """
    context = multiprocessing.get_context("fork")
    lines = []
    for port in ports:
        line, child_line = context.Pipe()
        arguments = (child_line, host, port, number)
        context.Process(target=_hold, args=arguments, daemon=True).start()
        lines.append(line)
    measured.report({"opened": min(line.recv() for line in lines)})


def _hold(line: Connection, host: str, port: int, number: int) -> None:
    """Opens connections to a port, reports how many that were, and holds them."""
    kit.end_with_parent()
    os.nice(19)
    number = min(number, _raise_files(number + OWN_FILES) - OWN_FILES)
    sockets: dict[int, socket.socket] = {}
    with select.epoll() as poll:
        for _ in range(number):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex((host, port))
            sockets[one.fileno()] = one
            poll.register(one, select.EPOLLOUT | select.EPOLLONESHOT)
        waiting, end_s = set(sockets), time.monotonic() + OPEN_S_MAX
        while waiting and time.monotonic() < end_s:
            waiting.difference_update(fileno for fileno, _ in poll.poll(0.1))
    problems = [
        one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        for fileno, one in sockets.items()
        if fileno not in waiting
    ]
    line.send(sum(problem in (0, errno.ECONNRESET) for problem in problems))
    signal.pause()


def _raise_files(wanted: int) -> int:
    """Raises this process's limit of open files, as far as it may; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # Beyond the hard limit, or the system's.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@role
def watchers(addresses: Sequence[str]) -> None:
    """Asks the shards for their status from several clients, until a line of standard input."""
    over = threading.Event()
    answered, failed = [0] * STATUS_CLIENTS, [""] * STATUS_CLIENTS

    def watch(number: int) -> None:
        with grpc.insecure_channel(addresses[number % len(addresses)]) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            while not over.wait(1.0 / STATUS_HZ):
                try:
                    stub.Status(pb.StatusRequest(), timeout=ANSWER_S)
                    answered[number] += 1
                except grpc.RpcError as problem:
                    failed[number] = str(problem.code())

    threads = [threading.Thread(target=watch, args=(n,)) for n in range(STATUS_CLIENTS)]
    for thread in threads:
        thread.start()
    measured.await_go()
    over.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"answered": sum(answered), "failed": sorted({*failed} - {""})}), flush=True)


@role
def silent(addresses: Sequence[str]) -> None:
    """Makes a step of a job whose residuals it never sends, and waits for the end of the input."""
    import torch

    import psworker
    from psworker.connection.membership.heartbeats import Heartbeats

    Heartbeats._send_residuals = lambda self, requests: None  # type: ignore[method-assign]
    psworker.init(list(addresses), job="silent", rank=0, num_workers=1)
    weights = torch.nn.Parameter(torch.zeros(1 << 12))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weights], lr=1.0),
        [("w", weights)],
        compression="2bit",
        compress_min_nbytes=1024,  # Else it would have no residual to be asked for.
    )
    weights.grad = torch.ones(1 << 12)
    optimizer.step()
    measured.report({"step": optimizer.clock})
    measured.await_go()
    psworker.shutdown()


# ----- what faults need of a cluster


def _has_more_shards(cluster: Cluster) -> bool:
    return cluster.setup.shards > 1


def _has_links(cluster: Cluster) -> bool:
    return cluster.lab is not None


def _has_small_disk(cluster: Cluster) -> bool:
    return cluster.has_small_disk


# ----- faults


@fault("worker", "a worker is killed")
def kill_worker(injector: FaultInjector, rank: int = -1) -> Damage:
    """SIGKILL of a worker."""
    if rank < 0:
        rank = injector.rng.randrange(injector.cluster.setup.workers)
    injector.cluster.progress.mark(time.monotonic())
    injector.cluster.roles[rank].popen.kill()
    name = f"worker {rank}"
    return Damage(what=name, wanted=injector.everything([rank]), ended=[name])


@fault("shard", "a shard is killed", _has_more_shards)
def kill_shard(injector: FaultInjector, index: int = -1) -> Damage:
    """SIGKILL of a shard."""
    if index < 0:
        index = injector.rng.randrange(1, injector.cluster.setup.shards)
    injector.cluster.progress.mark(time.monotonic())
    there, name = injector.cluster.shards.signal(index, signal.SIGKILL), f"shard {index}"
    return Damage(what=name if there else "", wanted=injector.everything(shard=index), ended=[name])


@fault("coordinator", "the coordinator (shard 0) is killed")
def kill_coordinator(injector: FaultInjector) -> Damage:
    """SIGKILL of the first shard."""
    return kill_shard(injector, 0)


@fault("worker and shard", "a worker and a shard are killed at once")
def kill_both(injector: FaultInjector) -> Damage:
    """SIGKILL of a worker and of any shard, at once."""
    worker = kill_worker(injector)
    shard = kill_shard(injector, injector.rng.randrange(injector.cluster.setup.shards))
    return Damage(
        what=f"{worker.what}, {shard.what}",
        wanted=injector.everything(),
        ended=[*worker.ended, *shard.ended],
    )


@fault("power cut", "everything is killed at once, and the boot is another")
def cut_power(injector: FaultInjector) -> Damage:
    """SIGKILL of everything at once, and another boot; all is started again as it was."""
    injector.cluster.progress.mark(time.monotonic())
    ended = list(injector.cluster.alive())
    injector.cluster.cut_power()
    return Damage(what="all processes", wanted=injector.everything(), ended=ended)


@fault("worker stopped", "a worker is stopped for up to 6 s, twice its lease")
def stop_worker(injector: FaultInjector) -> Damage:
    """SIGSTOP of a worker, perhaps beyond its lease, then SIGCONT."""
    rank = injector.rng.randrange(injector.cluster.setup.workers)
    process = injector.cluster.roles[rank].popen
    process.send_signal(signal.SIGSTOP)
    injector.cluster.watch(injector.rng.uniform(0.2, 2.0 * injector.cluster.setup.lease_s))
    injector.cluster.progress.mark(time.monotonic())
    process.send_signal(signal.SIGCONT)
    return Damage(what=f"worker {rank}", wanted=injector.everything([rank]))


@fault("workers stopped", "half of the workers are stopped for longer than their lease")
def stop_workers(injector: FaultInjector) -> Damage:
    """SIGSTOP of half of the workers beyond their lease, then SIGCONT."""
    setup = injector.cluster.setup
    ranks = sorted(injector.rng.sample(range(setup.workers), max(1, setup.workers // 2)))
    processes = [injector.cluster.roles[rank].popen for rank in ranks]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    injector.cluster.watch(injector.rng.uniform(1.5, 2.5) * setup.lease_s)
    injector.cluster.progress.mark(time.monotonic())
    for process in processes:
        process.send_signal(signal.SIGCONT)
    return Damage(what=f"workers {ranks}", wanted=injector.everything(ranks))


@fault("shard stopped", "a shard is stopped for up to 4.5 s")
def stop_shard(injector: FaultInjector) -> Damage:
    """SIGSTOP of any shard, perhaps beyond the leases, then SIGCONT."""
    index = injector.rng.randrange(injector.cluster.setup.shards)
    if not injector.cluster.shards.signal(index, signal.SIGSTOP):
        return Damage(what="", wanted=set())
    injector.cluster.watch(injector.rng.uniform(0.2, 1.5 * injector.cluster.setup.lease_s))
    injector.cluster.progress.mark(time.monotonic())
    injector.cluster.shards.signal(index, signal.SIGCONT)
    name = f"shard {index}"
    return Damage(what=name, wanted=injector.everything(shard=index), away=[name])


@fault("link cut", "a link is cut for up to 4.5 s", _has_links)
def cut_link(injector: FaultInjector) -> Damage:
    """Cuts the link of a host: of the shards, or of a third of the workers."""
    lab = injector.cluster.lab
    assert lab is not None
    host = injector.rng.randrange(lab.num_hosts)
    lab.cut(host)
    injector.cluster.watch(injector.rng.uniform(0.3, 1.5 * injector.cluster.setup.lease_s))
    injector.cluster.progress.mark(time.monotonic())
    lab.cut(host, restore=True)
    return Damage(what=f"host {host}", wanted=injector.everything())


@fault("link slow", "a link has a hundredth of its rate", _has_links)
def slow_link(injector: FaultInjector) -> Damage:
    """Gives the link of a host a hundredth of its rate for a while."""
    lab = injector.cluster.lab
    assert lab is not None
    host = injector.rng.randrange(lab.num_hosts)
    lab.slow(host, "100mbit")
    injector.cluster.watch(injector.rng.uniform(1.0, 3.0))
    injector.cluster.progress.mark(time.monotonic())
    lab.slow(host)
    return Damage(what=f"host {host}", wanted=injector.everything())


@fault(
    "disk full",
    "the shards' disk is full for up to 4.5 s, and a shard is killed meanwhile",
    _has_small_disk,
)
def fill_disk(injector: FaultInjector) -> Damage:
    """Leaves no byte on the shards' disk for a while, in which a shard is killed."""
    _fill(injector.cluster)
    index = injector.rng.randrange(injector.cluster.setup.shards)
    injector.cluster.watch(injector.rng.uniform(0.5, 1.5))
    injector.cluster.shards.signal(index, signal.SIGKILL)
    injector.cluster.watch(injector.rng.uniform(1.0, 3.0))
    injector.cluster.progress.mark(time.monotonic())
    injector.cluster.filler.unlink()
    name = f"shard {index}"
    return Damage(what=f"{DISK}, {name}", wanted=injector.everything(), ended=[name], away=[DISK])


@fault(
    "disk freed",
    "the shards' disk is full for up to 3 s, and a shard is killed when there is room again",
    _has_small_disk,
)
def free_disk(injector: FaultInjector) -> Damage:
    """Leaves no byte on the shards' disk for a while, and kills a shard after it."""
    _fill(injector.cluster)
    injector.cluster.watch(injector.rng.uniform(1.0, 3.0))
    injector.cluster.filler.unlink()
    injector.cluster.watch(JOURNALLED_S)
    killed = kill_shard(injector, injector.rng.randrange(injector.cluster.setup.shards))
    return Damage(
        what=f"{DISK}, {killed.what}", wanted=killed.wanted, ended=killed.ended, away=[DISK]
    )


def _fill(cluster: Cluster) -> None:
    """Leaves no byte on the shards' disk."""
    free = os.statvfs(cluster.state)
    with cluster.filler.open("wb") as file:
        size, part = 0, free.f_bavail * free.f_frsize
        while part:  # Others write and delete meanwhile.
            try:
                os.posix_fallocate(file.fileno(), size, part)
                size += part
            except OSError:
                part //= 2


@fault("silent job", "the worker of another job never answers a checkpoint")
def be_silent(injector: FaultInjector) -> Damage:
    """Runs a job that answers no checkpoint, while the others' checkpoints go on."""
    with injector.role("silent", {"addresses": injector.cluster.shards.addresses}) as (process,):
        process.line()
        injector.cluster.watch(SILENT_S)
        injector.cluster.progress.mark(time.monotonic())
        process.tell()
    return Damage(what="another job", wanted=injector.everything())


@fault("descriptors", "a shard has 600 connections to each port, and a worker is killed meanwhile")
def use_up_descriptors(injector: FaultInjector) -> Damage:
    """Holds more connections than a shard may have open; a worker is killed meanwhile."""
    index = injector.rng.randrange(injector.cluster.setup.shards)
    rank = injector.rng.randrange(injector.cluster.setup.workers)
    arguments = {
        "host": injector.cluster.shards.host,
        "ports": injector.cluster.shards.ports(index),
        "number": CROWD,
    }
    if not arguments["ports"]:
        return Damage(what="", wanted=set())
    with injector.role("crowd", arguments) as (process,):
        process.line()
        injector.cluster.roles[rank].popen.kill()
        injector.cluster.watch(injector.rng.uniform(1.0, 3.0))
    injector.cluster.progress.mark(time.monotonic())
    name = f"worker {rank}"
    return Damage(what=f"shard {index}, {name}", wanted=injector.everything(), ended=[name])


@fault(
    "idle connections",
    "all shards have 10,000 idle connections to each port, and a worker is killed and joins again",
)
def hold_idle_connections(injector: FaultInjector) -> Damage:
    """Holds idle connections to every port until a worker that is killed has joined again."""
    shards = injector.cluster.shards
    ports = [port for index in range(injector.cluster.setup.shards) for port in shards.ports(index)]
    rank = injector.rng.randrange(injector.cluster.setup.workers)
    arguments = {"host": shards.host, "ports": ports, "number": IDLE}
    with injector.role("crowd", arguments) as (process,):
        injector.figures["idle_connections"] = process.line()["opened"]
        injector.cluster.progress.mark(time.monotonic())
        injector.cluster.roles[rank].popen.kill()
        injector.cluster.await_all(injector.everything())
    name = f"worker {rank}"
    return Damage(what=f"all ports, {name}", wanted=injector.everything(), ended=[name])


@fault("status polled", "`status` is polled from 8 clients")
def poll_status(injector: FaultInjector) -> Damage:
    """Polls `status` from several clients for a while."""
    arguments = {"addresses": injector.cluster.shards.addresses}
    with injector.role("watchers", arguments) as (process,):
        process.line()
        began_s = time.monotonic()
        injector.cluster.watch(injector.rng.uniform(2.0, 4.0))
        injector.cluster.progress.mark(time.monotonic())
        process.tell()
        told = process.result()
    injector.figures["status_answers"] += int(told["answered"])
    injector.figures["status_s"] += time.monotonic() - began_s
    if told["failed"]:
        injector.cluster.failures.append(f"status: {', '.join(told['failed'])}")
    return Damage(what="status", wanted=injector.everything())
