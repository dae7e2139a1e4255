"""The faults of the kill loop: each breaks a part of the cluster and returns its consequences.

A fault names the processes that it ended and the pushes that must be acknowledged afterwards. Any
other process that ends meanwhile has died of a fault that was not its own: it is reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks import kit, measured
from benchmarks.survival.cluster import Cluster
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc

MODULE = "benchmarks.recovery"  # Runs the roles of this file.
STATUS_CLIENTS, STATUS_HZ = 8, 100.0
CROWD = 600  # Connections to each port: more than a shard here may have files open.


# ----- processes that faults need


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


ROLES: dict[str, Callable[..., None]] = {"crowd": crowd, "watchers": watchers}


# ----- faults


@dataclass(slots=True, kw_only=True)
class Fault:
    """One thing that went wrong on purpose."""

    kind: str
    what: str
    at_s: float  # When it was made, or ended if it lasts.
    recovery_s: float = float("nan")


@dataclass(slots=True, kw_only=True)
class Damage:
    """The consequences of a fault."""

    what: str  # Empty if there was nothing to break.
    wanted: set[tuple[int, int]]  # `(worker, slice)` that must be acknowledged afterwards.
    ended: Sequence[str] = ()  # Processes that it ended, as `Cluster.alive` names them.


@dataclass(slots=True)
class FaultInjector:
    """Breaks parts of a cluster as a seeded plan says."""

    cluster: Cluster
    rng: random.Random
    kinds: Sequence[str]
    faults: list[Fault] = field(default_factory=list)
    bystanders: list[str] = field(default_factory=list)  # Healthy processes that ended.
    num_status: int = 0  # Answers to `status` while it was polled.
    status_s: float = 0.0  # Seconds for which it was polled.

    def inject(self, kind: str) -> None:
        """Makes one fault, waits until it is over, and until the job has recovered from it."""
        before = self.cluster.alive()
        done = FAULTS[kind](self)
        if not done.what:
            return
        fault = Fault(kind=kind, what=done.what, at_s=self.cluster.progress.since_s)
        self.faults.append(fault)
        shards = {name: before[name] for name in done.ended if name.startswith("shard")}
        if shards:  # A worker may read what a shard has sent long after the shard's end.
            self.cluster.await_successors(shards)
            self.cluster.progress.forget()
        fault.recovery_s = self.cluster.await_all(done.wanted) - fault.at_s
        after = self.cluster.alive()
        for name, pid in before.items():
            if name not in done.ended and after.get(name) != pid:
                self.bystanders.append(f"{name} ended while {done.what} was under way ({kind})")

    def everything(self, ranks: Sequence[int] = (), shard: int = -1) -> set[tuple[int, int]]:
        """Returns what must continue: `(worker, slice)` of these workers and that shard, or all."""
        slices = (
            range(len(self.cluster.layout.slices)) if shard < 0 else self.cluster.slices_of(shard)
        )
        return {(r, s) for r in ranks or range(self.cluster.setup.workers) for s in slices}

    def _role(
        self, name: str, arguments: dict[str, Any]
    ) -> contextlib.AbstractContextManager[tuple[kit.Role, ...]]:
        """Runs a process of this file on the host of the shards."""
        return kit.roles(kit.Role(MODULE, name, arguments, {}, self.cluster.shards.prefix))

    def kill_worker(self) -> Damage:
        """SIGKILL of a worker."""
        rank = self.rng.randrange(self.cluster.setup.workers)
        self.cluster.progress.mark(time.monotonic())
        self.cluster.roles[rank].popen.kill()
        name = f"worker {rank}"
        return Damage(what=name, wanted=self.everything([rank]), ended=[name])

    def kill_shard(self, index: int = -1) -> Damage:
        """SIGKILL of a shard."""
        if index < 0:
            index = self.rng.randrange(1, self.cluster.setup.shards)
        self.cluster.progress.mark(time.monotonic())
        there, name = self.cluster.shards.signal(index, signal.SIGKILL), f"shard {index}"
        return Damage(what=name if there else "", wanted=self.everything(shard=index), ended=[name])

    def kill_coordinator(self) -> Damage:
        """SIGKILL of the first shard."""
        return self.kill_shard(0)

    def kill_both(self) -> Damage:
        """SIGKILL of a worker and of any shard, at once."""
        worker = self.kill_worker()
        shard = self.kill_shard(self.rng.randrange(self.cluster.setup.shards))
        return Damage(
            what=f"{worker.what}, {shard.what}",
            wanted=self.everything(),
            ended=[*worker.ended, *shard.ended],
        )

    def cut_power(self) -> Damage:
        """SIGKILL of everything at once, and another boot; all is started again as it was."""
        self.cluster.progress.mark(time.monotonic())
        ended = list(self.cluster.alive())
        self.cluster.cut_power()
        return Damage(what="all processes", wanted=self.everything(), ended=ended)

    def stop_worker(self) -> Damage:
        """SIGSTOP of a worker, perhaps beyond its lease, then SIGCONT."""
        rank = self.rng.randrange(self.cluster.setup.workers)
        process = self.cluster.roles[rank].popen
        process.send_signal(signal.SIGSTOP)
        self.cluster.watch(self.rng.uniform(0.2, 2.0 * self.cluster.setup.lease_s))
        self.cluster.progress.mark(time.monotonic())
        process.send_signal(signal.SIGCONT)
        return Damage(what=f"worker {rank}", wanted=self.everything([rank]))

    def stop_shard(self) -> Damage:
        """SIGSTOP of any shard, perhaps beyond the leases, then SIGCONT."""
        index = self.rng.randrange(self.cluster.setup.shards)
        if not self.cluster.shards.signal(index, signal.SIGSTOP):
            return Damage(what="", wanted=set())
        self.cluster.watch(self.rng.uniform(0.2, 1.5 * self.cluster.setup.lease_s))
        self.cluster.progress.mark(time.monotonic())
        self.cluster.shards.signal(index, signal.SIGCONT)
        return Damage(what=f"shard {index}", wanted=self.everything(shard=index))

    def cut_link(self) -> Damage:
        """Cuts the link of a host: of the shards, or of a third of the workers."""
        lab = self.cluster.lab
        assert lab is not None
        host = self.rng.randrange(lab.num_hosts)
        lab.cut(host)
        self.cluster.watch(self.rng.uniform(0.3, 1.5 * self.cluster.setup.lease_s))
        self.cluster.progress.mark(time.monotonic())
        lab.cut(host, restore=True)
        return Damage(what=f"host {host}", wanted=self.everything())

    def slow_link(self) -> Damage:
        """Gives the link of a host a hundredth of its rate for a while."""
        lab = self.cluster.lab
        assert lab is not None
        host = self.rng.randrange(lab.num_hosts)
        lab.slow(host, "100mbit")
        self.cluster.watch(self.rng.uniform(1.0, 3.0))
        self.cluster.progress.mark(time.monotonic())
        lab.slow(host)
        return Damage(what=f"host {host}", wanted=self.everything())

    def fill_disk(self) -> Damage:
        """Leaves no byte on the shards' disk for a while, in which a shard is killed."""
        free = os.statvfs(self.cluster.state)
        with self.cluster.filler.open("wb") as file:
            size, part = 0, free.f_bavail * free.f_frsize
            while part:  # Others write and delete meanwhile.
                try:
                    os.posix_fallocate(file.fileno(), size, part)
                    size += part
                except OSError:
                    part //= 2
        index = self.rng.randrange(self.cluster.setup.shards)
        self.cluster.watch(self.rng.uniform(0.5, 1.5))
        self.cluster.shards.signal(index, signal.SIGKILL)
        self.cluster.watch(self.rng.uniform(1.0, 3.0))
        self.cluster.progress.mark(time.monotonic())
        self.cluster.filler.unlink()
        name = f"shard {index}"
        return Damage(what=f"the disk, {name}", wanted=self.everything(), ended=[name])

    def use_up_descriptors(self) -> Damage:
        """Holds more connections than a shard may have open; a worker is killed meanwhile."""
        index = self.rng.randrange(self.cluster.setup.shards)
        rank = self.rng.randrange(self.cluster.setup.workers)
        arguments = {"host": self.cluster.shards.host, "ports": self.cluster.shards.ports(index)}
        if not arguments["ports"]:
            return Damage(what="", wanted=set())
        with self._role("crowd", arguments) as (role,):
            role.line()
            self.cluster.roles[rank].popen.kill()
            self.cluster.watch(self.rng.uniform(1.0, 3.0))
        self.cluster.progress.mark(time.monotonic())
        name = f"worker {rank}"
        return Damage(what=f"shard {index}, {name}", wanted=self.everything(), ended=[name])

    def poll_status(self) -> Damage:
        """Polls `status` from several clients for a while."""
        arguments = {"addresses": self.cluster.shards.addresses}
        with self._role("watchers", arguments) as (role,):
            role.line()
            began_s = time.monotonic()
            self.cluster.watch(self.rng.uniform(2.0, 4.0))
            self.cluster.progress.mark(time.monotonic())
            role.tell()
            told = role.result()
        self.num_status += int(told["answered"])
        self.status_s += time.monotonic() - began_s
        if told["failed"]:
            self.cluster.failures.append(f"status: {', '.join(told['failed'])}")
        return Damage(what="status", wanted=self.everything())


FAULTS: dict[str, Callable[[FaultInjector], Damage]] = {
    "worker": FaultInjector.kill_worker,
    "shard": FaultInjector.kill_shard,
    "coordinator": FaultInjector.kill_coordinator,
    "worker stopped": FaultInjector.stop_worker,
    "shard stopped": FaultInjector.stop_shard,
    "link cut": FaultInjector.cut_link,
    "link slow": FaultInjector.slow_link,
    "disk full": FaultInjector.fill_disk,
    "worker and shard": FaultInjector.kill_both,
    "descriptors": FaultInjector.use_up_descriptors,
    "status polled": FaultInjector.poll_status,
    "power cut": FaultInjector.cut_power,
}
KILLS = ("worker", "shard", "coordinator")


def possible(cluster: Cluster, wanted: Sequence[str]) -> list[str]:
    """Returns the kinds of faults that can be made here."""
    found = [kind for kind in FAULTS if not wanted or kind in wanted]
    if cluster.lab is None:
        found = [kind for kind in found if not kind.startswith("link")]
    if not cluster.has_small_disk:
        found = [kind for kind in found if kind != "disk full"]
    if cluster.setup.shards == 1:
        found = [kind for kind in found if kind != "shard"]
    return found
