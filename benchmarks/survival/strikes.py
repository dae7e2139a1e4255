"""The faults of the kill loop: each breaks a stage (`stage.py`) and returns its consequences.

A strike names the processes that it ended and the pushes that must be acknowledged afterwards. Any
other process that ends during a strike has died of a fault that was not its own: it is reported.
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

import grpc

from benchmarks import kit, measured
from benchmarks.survival.stage import Stage
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc

MODULE = "benchmarks.recovery"  # Runs the roles of this file.
STATUS_CLIENTS, STATUS_HZ = 8, 100.0
CROWD = 600  # Connections to each port: more than a shard of the stage may have files open.


# ----- processes that strikes need


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


# ----- strikes


@dataclass(slots=True, kw_only=True)
class Fault:
    """One thing that went wrong on purpose."""

    kind: str
    what: str
    at_s: float  # When it struck, or ended if it lasts.
    recovery_s: float = float("nan")


@dataclass(slots=True, kw_only=True)
class Strike:
    """The result of a strike."""

    what: str  # Empty if there was nothing to strike.
    wanted: set[tuple[int, int]]  # `(worker, slice)` that must be acknowledged afterwards.
    ended: Sequence[str] = ()  # Processes that it ended, as `Stage.alive` names them.


@dataclass(slots=True)
class Saboteur:
    """Breaks a stage as a seeded plan says."""

    stage: Stage
    rng: random.Random
    kinds: Sequence[str]
    faults: list[Fault] = field(default_factory=list)
    bystanders: list[str] = field(default_factory=list)  # Healthy processes that ended.
    num_status: int = 0  # Answers to `status` while it was polled.

    def strike(self, kind: str) -> None:
        """Makes one fault, waits until it is over, and until the job has recovered from it."""
        before = self.stage.alive()
        done = STRIKES[kind](self)
        if not done.what:
            return
        fault = Fault(kind=kind, what=done.what, at_s=self.stage.progress.since_s)
        self.faults.append(fault)
        shards = {name: before[name] for name in done.ended if name.startswith("shard")}
        if shards:  # A worker may read what a shard has sent long after the shard's end.
            self.stage.await_successors(shards)
            self.stage.progress.forget()
        fault.recovery_s = self.stage.await_all(done.wanted) - fault.at_s
        after = self.stage.alive()
        for name, pid in before.items():
            if name not in done.ended and after.get(name) != pid:
                self.bystanders.append(f"{name} ended while {done.what} was struck ({kind})")

    def everything(self, ranks: Sequence[int] = (), shard: int = -1) -> set[tuple[int, int]]:
        """Returns what must continue: `(worker, slice)` of these workers and that shard, or all."""
        slices = range(len(self.stage.layout.slices)) if shard < 0 else self.stage.slices_of(shard)
        return {(r, s) for r in ranks or range(self.stage.setup.workers) for s in slices}

    def kill_worker(self) -> Strike:
        """SIGKILL of a worker."""
        rank = self.rng.randrange(self.stage.setup.workers)
        self.stage.progress.mark(time.monotonic())
        self.stage.roles[rank].popen.kill()
        name = f"worker {rank}"
        return Strike(what=name, wanted=self.everything([rank]), ended=[name])

    def kill_shard(self, index: int = -1) -> Strike:
        """SIGKILL of a shard."""
        if index < 0:
            index = self.rng.randrange(1, self.stage.setup.shards)
        self.stage.progress.mark(time.monotonic())
        there, name = self.stage.signal_shard(index, signal.SIGKILL), f"shard {index}"
        return Strike(what=name if there else "", wanted=self.everything(shard=index), ended=[name])

    def kill_coordinator(self) -> Strike:
        """SIGKILL of the first shard."""
        return self.kill_shard(0)

    def kill_both(self) -> Strike:
        """SIGKILL of a worker and of any shard, at once."""
        worker = self.kill_worker()
        shard = self.kill_shard(self.rng.randrange(self.stage.setup.shards))
        return Strike(
            what=f"{worker.what}, {shard.what}",
            wanted=self.everything(),
            ended=[*worker.ended, *shard.ended],
        )

    def cut_power(self) -> Strike:
        """SIGKILL of everything at once, and another boot; all is started again as it was."""
        self.stage.progress.mark(time.monotonic())
        ended = list(self.stage.alive())
        self.stage.cut_power()
        return Strike(what="all processes", wanted=self.everything(), ended=ended)

    def stop_worker(self) -> Strike:
        """SIGSTOP of a worker, perhaps beyond its lease, then SIGCONT."""
        rank = self.rng.randrange(self.stage.setup.workers)
        process = self.stage.roles[rank].popen
        process.send_signal(signal.SIGSTOP)
        self.stage.watch(self.rng.uniform(0.2, 2.0 * self.stage.setup.lease_s))
        self.stage.progress.mark(time.monotonic())
        process.send_signal(signal.SIGCONT)
        return Strike(what=f"worker {rank}", wanted=self.everything([rank]))

    def stop_shard(self) -> Strike:
        """SIGSTOP of any shard, perhaps beyond the leases, then SIGCONT."""
        index = self.rng.randrange(self.stage.setup.shards)
        if not self.stage.signal_shard(index, signal.SIGSTOP):
            return Strike(what="", wanted=set())
        self.stage.watch(self.rng.uniform(0.2, 1.5 * self.stage.setup.lease_s))
        self.stage.progress.mark(time.monotonic())
        self.stage.signal_shard(index, signal.SIGCONT)
        return Strike(what=f"shard {index}", wanted=self.everything(shard=index))

    def cut_link(self) -> Strike:
        """Cuts the link of a host: of the shards, or of a third of the workers."""
        lab = self.stage.lab
        assert lab is not None
        host = self.rng.randrange(lab.num_hosts)
        lab.cut(host)
        self.stage.watch(self.rng.uniform(0.3, 1.5 * self.stage.setup.lease_s))
        self.stage.progress.mark(time.monotonic())
        lab.cut(host, restore=True)
        return Strike(what=f"host {host}", wanted=self.everything())

    def slow_link(self) -> Strike:
        """Gives the link of a host a hundredth of its rate for a while."""
        lab = self.stage.lab
        assert lab is not None
        host = self.rng.randrange(lab.num_hosts)
        lab.slow(host, "100mbit")
        self.stage.watch(self.rng.uniform(1.0, 3.0))
        self.stage.progress.mark(time.monotonic())
        lab.slow(host)
        return Strike(what=f"host {host}", wanted=self.everything())

    def fill_disk(self) -> Strike:
        """Leaves no byte on the shards' disk for a while, in which a shard is killed."""
        free = os.statvfs(self.stage.state)
        with self.stage.ballast.open("wb") as file:
            size, part = 0, free.f_bavail * free.f_frsize
            while part:  # Others write and delete meanwhile.
                try:
                    os.posix_fallocate(file.fileno(), size, part)
                    size += part
                except OSError:
                    part //= 2
        index = self.rng.randrange(self.stage.setup.shards)
        self.stage.watch(self.rng.uniform(0.5, 1.5))
        self.stage.signal_shard(index, signal.SIGKILL)
        self.stage.watch(self.rng.uniform(1.0, 3.0))
        self.stage.progress.mark(time.monotonic())
        self.stage.ballast.unlink()
        name = f"shard {index}"
        return Strike(what=f"the disk, {name}", wanted=self.everything(), ended=[name])

    def use_up_descriptors(self) -> Strike:
        """Holds more connections than a shard may have open; a worker is killed meanwhile."""
        index = self.rng.randrange(self.stage.setup.shards)
        rank = self.rng.randrange(self.stage.setup.workers)
        arguments = {"host": self.stage.host, "ports": self.stage.ports_of(index)}
        if not arguments["ports"]:
            return Strike(what="", wanted=set())
        with kit.roles(kit.Role(MODULE, "crowd", arguments, {}, self.stage.prefix)) as (role,):
            role.line()
            self.stage.roles[rank].popen.kill()
            self.stage.watch(self.rng.uniform(1.0, 3.0))
        self.stage.progress.mark(time.monotonic())
        name = f"worker {rank}"
        return Strike(what=f"shard {index}, {name}", wanted=self.everything(), ended=[name])

    def poll_status(self) -> Strike:
        """Polls `status` from several clients for a while."""
        arguments = {"addresses": self.stage.addresses}
        with kit.roles(kit.Role(MODULE, "watchers", arguments, {}, self.stage.prefix)) as (role,):
            role.line()
            self.stage.watch(self.rng.uniform(2.0, 4.0))
            self.stage.progress.mark(time.monotonic())
            role.tell()
            told = role.result()
        self.num_status += int(told["answered"])
        if told["failed"]:
            self.stage.failures.append(f"status: {', '.join(told['failed'])}")
        return Strike(what="status", wanted=self.everything())


STRIKES: dict[str, Callable[[Saboteur], Strike]] = {
    "worker": Saboteur.kill_worker,
    "shard": Saboteur.kill_shard,
    "coordinator": Saboteur.kill_coordinator,
    "worker stopped": Saboteur.stop_worker,
    "shard stopped": Saboteur.stop_shard,
    "link cut": Saboteur.cut_link,
    "link slow": Saboteur.slow_link,
    "disk full": Saboteur.fill_disk,
    "worker and shard": Saboteur.kill_both,
    "descriptors": Saboteur.use_up_descriptors,
    "status polled": Saboteur.poll_status,
    "power cut": Saboteur.cut_power,
}
KILLS = ("worker", "shard", "coordinator")


def possible(stage: Stage, wanted: Sequence[str]) -> list[str]:
    """Returns the kinds of faults that can be made here."""
    found = [kind for kind in STRIKES if not wanted or kind in wanted]
    if stage.lab is None:
        found = [kind for kind in found if not kind.startswith("link")]
    if not stage.has_small_disk:
        found = [kind for kind in found if kind != "disk full"]
    if stage.setup.shards == 1:
        found = [kind for kind in found if kind != "shard"]
    return found
