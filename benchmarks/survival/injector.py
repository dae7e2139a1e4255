"""The injector of the kill loop: makes faults of known kinds, and awaits the job's recovery.

A kind is a function with the decorator `fault`, in `faults.py` or in a file beside it. It breaks a
part of the cluster and returns the consequences: the processes that it ended, and the pushes that
must be acknowledged afterwards. Any other process that ends meanwhile has died of a fault that was
not its own: it is reported. A `monitor` observes the whole run beside the faults.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from benchmarks import kit
from benchmarks.survival.cluster import Cluster

MODULE = "benchmarks.recovery"  # Runs the roles.
DISK = "the disk"  # Its name among the absences.
Role = TypeVar("Role", bound=Callable[..., Any])


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
    away: Sequence[str] = ()  # Processes that it stopped for a while, and the disk (`DISK`).


class Absence(NamedTuple):
    """A time in which a fault had taken a process or the disk away, until the job's recovery."""

    name: str  # As `Cluster.alive` names it, or `DISK`.
    from_s: float
    to_s: float


@dataclass(slots=True)
class FaultInjector:
    """Breaks parts of a cluster as a seeded plan says."""

    cluster: Cluster  # The cluster whose parts are broken.
    rng: random.Random  # Draws the parts that are broken.
    kinds: Sequence[str]  # Names of the kinds of faults that are made.
    faults: list[Fault] = field(default_factory=list)  # The faults made so far.
    bystanders: list[str] = field(default_factory=list)  # Healthy processes that ended.
    # Times in which the faults had taken something away.
    absences: list[Absence] = field(default_factory=list)
    # Sums of the run, by their names in the JSON (`FIGURES`).
    figures: dict[str, float] = field(default_factory=lambda: dict(FIGURES))

    def inject(self, kind: str) -> None:
        """Makes one fault, waits until it is over, and until the job has recovered from it."""
        before, began_s = self.cluster.alive(), time.monotonic()
        done = FAULTS[kind].make(self)
        if not done.what:
            return
        fault = Fault(kind=kind, what=done.what, at_s=self.cluster.progress.since_s)
        self.faults.append(fault)
        shards = {name: before[name] for name in done.ended if name.startswith("shard")}
        if shards:  # A worker may read what a shard has sent long after the shard's end.
            self.cluster.await_successors(shards)
            self.cluster.progress.forget()
        fault.recovery_s = self.cluster.await_all(done.wanted) - fault.at_s
        over_s = time.monotonic()
        self.absences += [Absence(name, began_s, over_s) for name in (*done.ended, *done.away)]
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

    def role(
        self, name: str, arguments: dict[str, Any]
    ) -> contextlib.AbstractContextManager[tuple[kit.Role, ...]]:
        """Runs a process of `ROLES` on the host of the shards."""
        return kit.roles(kit.Role(MODULE, name, arguments, {}, self.cluster.shards.prefix))


# ----- the kinds

Make = Callable[[FaultInjector], Damage]
Made = TypeVar("Made", bound=Make)
Monitor = Callable[[FaultInjector], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    make: Make
    label: str  # Its row in the pages.
    is_possible: Callable[[Cluster], bool]


FAULTS: dict[str, Kind] = {}  # By name; each is made in this order once, and then at random.
ROLES: dict[str, Callable[..., Any]] = {}  # Processes that faults need.
MONITORS: list[Monitor] = []
FIGURES: dict[str, float] = {}  # The sums of a run before it begins.


def fault(
    name: str, label: str, is_possible: Callable[[Cluster], bool] = lambda cluster: True
) -> Callable[[Made], Made]:
    """Decorator: makes a function one of the kinds of faults.

    Args:
        name: Name of the kind, for `--kinds` and the JSON.
        label: Name of its row in the pages.
        is_possible: Returns whether it can be made in a cluster.
    """

    def add(make: Made) -> Made:
        FAULTS[name] = Kind(make, label, is_possible)
        return make

    return add


def role(function: Role) -> Role:
    """Decorator: makes a function a process that faults may start by its name."""
    ROLES[function.__name__] = function
    return function


def monitor(function: Monitor) -> Monitor:
    """Decorator: makes a context manager observe the whole run; it may add to the figures."""
    MONITORS.append(function)
    return function


def possible(cluster: Cluster, wanted: Sequence[str]) -> list[str]:
    """Returns the kinds of faults that can be made here, of those wanted, or of all."""
    return [
        name
        for name, kind in FAULTS.items()
        if (not wanted or name in wanted) and kind.is_possible(cluster)
    ]
