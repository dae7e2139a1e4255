"""The faults of the kill loop: each breaks a part of the cluster and returns its consequences.

To add one, write a function with the decorator `fault`, here or in a file that recovery.py imports
(injector.py). A figure of it in the JSON begins in `FIGURES` and is added to `injector.figures`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Sequence

import grpc

from benchmarks import measured
from benchmarks.survival.cluster import Cluster
from benchmarks.survival.injector import FIGURES, Damage, FaultInjector, fault, role
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc

STATUS_CLIENTS, STATUS_HZ = 8, 100.0
CROWD = 600  # Connections to each port: more than a shard here may have files open.
KILLS = ("worker", "shard", "coordinator")
FIGURES |= {"status_answers": 0, "status_s": 0.0}  # While `status` was polled.


# ----- processes that faults need


@role
def crowd(host: str, ports: Sequence[int]) -> None:
    """Opens connections to each port and sends nothing on them, until standard input ends."""
    files = len(ports) * CROWD + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with contextlib.ExitStack() as held:
        opened = 0
        for _ in range(CROWD):
            for port in ports:
                with contextlib.suppress(OSError):  # A full shard may refuse.
                    held.enter_context(socket.create_connection((host, port), timeout=0.2))
                    opened += 1
        measured.report({"opened": opened})


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
                    stub.Status(pb.StatusRequest(), timeout=10.0)
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


# ----- what faults need of a cluster


def _has_more_shards(cluster: Cluster) -> bool:
    return cluster.setup.shards > 1


def _has_links(cluster: Cluster) -> bool:
    return cluster.lab is not None


def _has_small_disk(cluster: Cluster) -> bool:
    return cluster.has_small_disk


# ----- faults


@fault("worker", "a worker is killed")
def kill_worker(injector: FaultInjector) -> Damage:
    """SIGKILL of a worker."""
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


@fault("shard stopped", "a shard is stopped for up to 4.5 s")
def stop_shard(injector: FaultInjector) -> Damage:
    """SIGSTOP of any shard, perhaps beyond the leases, then SIGCONT."""
    index = injector.rng.randrange(injector.cluster.setup.shards)
    if not injector.cluster.shards.signal(index, signal.SIGSTOP):
        return Damage(what="", wanted=set())
    injector.cluster.watch(injector.rng.uniform(0.2, 1.5 * injector.cluster.setup.lease_s))
    injector.cluster.progress.mark(time.monotonic())
    injector.cluster.shards.signal(index, signal.SIGCONT)
    return Damage(what=f"shard {index}", wanted=injector.everything(shard=index))


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
    free = os.statvfs(injector.cluster.state)
    with injector.cluster.filler.open("wb") as file:
        size, part = 0, free.f_bavail * free.f_frsize
        while part:  # Others write and delete meanwhile.
            try:
                os.posix_fallocate(file.fileno(), size, part)
                size += part
            except OSError:
                part //= 2
    index = injector.rng.randrange(injector.cluster.setup.shards)
    injector.cluster.watch(injector.rng.uniform(0.5, 1.5))
    injector.cluster.shards.signal(index, signal.SIGKILL)
    injector.cluster.watch(injector.rng.uniform(1.0, 3.0))
    injector.cluster.progress.mark(time.monotonic())
    injector.cluster.filler.unlink()
    name = f"shard {index}"
    return Damage(what=f"the disk, {name}", wanted=injector.everything(), ended=[name])


@fault("descriptors", "a shard has 600 connections to each port, and a worker is killed meanwhile")
def use_up_descriptors(injector: FaultInjector) -> Damage:
    """Holds more connections than a shard may have open; a worker is killed meanwhile."""
    index = injector.rng.randrange(injector.cluster.setup.shards)
    rank = injector.rng.randrange(injector.cluster.setup.workers)
    arguments = {
        "host": injector.cluster.shards.host,
        "ports": injector.cluster.shards.ports(index),
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
