"""The publication of one table: every K updates a version, of the same number on all shards.

In a mode by step version p is bfloat16 of the weights after update p * K, so the shards agree on
all versions without a message. In an asynchronous mode the updates of slices have no step in
common: a version is published every K seconds, its number is the time divided by K, and it is not
exact.

A lineage is a line of versions whose numbers only rise: it ends when the shards go back to a
checkpoint or a worker loads a state, and the next one has a larger number. A state that is loaded
is published when workers have begun to read it: then the slices of all shards have it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from pscore.errors import ConfigError
from pscore.optimizers.base import Optimizer
from pscore.publish.possible import require_weights
from pscore.table_spec import TableSpec
from psserver.decisions.orders import Answer, Load, Skip, Update
from psserver.engine.job import RunningTable
from psserver.engine.slice_queue import ShowStore, Work
from psserver.publish.ring import FoundVersion, PublishedVersion, VersionRing
from psserver.slices.base import Store
from psserver.slices.store import SliceStore


def require_published(running: RunningTable) -> None:
    """Raises ConfigError for a table whose value on the shards is not the model."""
    table = running.table
    name = table.spec.name
    if not all(isinstance(queue.store, SliceStore) for queue in running.queues.values()):
        raise ConfigError(f"table {name!r} cannot be published: it is not a dense vector")
    assert isinstance(table.optimizer, Optimizer)
    require_weights(name, table.spec.rule, table.optimizer)


class Publication:
    """The versions of one table on this shard; an observer of its updates."""

    def __init__(
        self,
        running: RunningTable,
        every: int,
        lineage: int,
        *,
        on_version: Callable[[], None],
        new_lineage: Callable[[], int],
        on_lineage: Callable[[], None],
    ) -> None:
        """Publishes nothing yet; called under the engine's lock.

        Args:
            every: Updates from one version to the next; seconds in an asynchronous mode.
            on_version: Called from any thread when all slices have a new version.
            on_lineage: Called when that has begun, before it has a version.

        Raises:
            ConfigError: The table's value is not the weights of a model.
        """
        require_published(running)
        self.running = running  # The table.
        self.every = every  # Updates from one version to the next; seconds in an asynchronous mode.
        self.lineage = lineage  # Number of the lineage.
        # Whether all slices of a version are of one step.
        self.exact = running.table.spec.rule.by_step
        self._on_version = on_version
        self._new_lineage, self._on_lineage = new_lineage, on_lineage
        self._rings = {index: VersionRing() for index in running.queues}
        self._loaded: set[int] = set()  # Slices with weights of this lineage.
        # Slices of a state that others may lack: no worker has read them since it was loaded.
        self._awaited: set[int] = set()
        self._slot = -1  # Number of the last version by time.
        self._lock = threading.Lock()
        self._newest: PublishedVersion | None = None  # That all slices have.
        self._reached: Counter[int] = Counter()  # Slices with a version, by its number.

    # ----- when weights change; under the engine's lock

    def after(self, index: int, action: Load | Update | Skip | Answer) -> Work | None:
        """Returns the publication that an action on a slice leads to."""
        if isinstance(action, Load):
            return self._after_load(index, action.version)
        if isinstance(action, Answer):
            if action.is_look or not self._is_awaited(index) or not self.exact:
                return None
            return self._show(index, action.version // self.every, action.version)
        self._is_awaited(index)
        self._loaded.add(index)  # `begin` comes too late: other shards may have begun before.
        if not self.exact:
            return None
        former = action.former if isinstance(action, Skip) else action.version - 1
        number = action.version // self.every
        if former // self.every == number:
            return None
        return self._show(index, number, action.version)

    def _after_load(self, index: int, version: int) -> Work | None:
        if index in self._loaded:  # A worker loads a state into weights that are trained.
            self.begin_lineage(is_awaited=True)
        if index in self._awaited:
            return None
        self._loaded.add(index)
        return self._show(index, version // self.every, version)

    def _is_awaited(self, index: int) -> bool:
        """Returns whether a slice has a state that was not published; it is awaited no more."""
        if index not in self._awaited:
            return False
        self._awaited.remove(index)
        self._loaded.add(index)
        return True

    @property
    def kept_lineage(self) -> int:
        """Number of the lineage for the process after this one; 0: it has to begin another.

        While a state is awaited, that process cannot know which slices have it.
        """
        return 0 if self._awaited else self.lineage

    def resume(self, lineage: int) -> None:
        """Continues the lineage of a former process; 0: its state is awaited."""
        if lineage:
            self.lineage = lineage
        else:
            self._awaited = set(self._rings)

    def begin_lineage(self, *, is_awaited: bool = False) -> None:
        """Ends the lineage: the weights are no longer those that follow from it.

        Args:
            is_awaited: Whether they are a state that other slices may lack.
        """
        with self._lock:
            self.lineage = self._new_lineage()
            self._newest = None
            self._reached.clear()
        self._loaded.clear()
        self._awaited = set(self._rings) if is_awaited else set()
        self._slot = -1
        self._on_lineage()

    def begin(self, *, at_multiples: bool) -> None:
        """Publishes weights that the table has already.

        Args:
            at_multiples: Only those of a slice whose version is a multiple of `every`: other
                shards have published no other ones under that number.
        """
        for index, clock in self.running.table.clocks.items():
            if clock.version < 0 or index in self._loaded | self._awaited:
                continue
            self._loaded.add(index)
            if at_multiples and (clock.version % self.every or not self.exact):
                continue
            work = self._show(index, clock.version // self.every, clock.version)
            self.running.queues[index].submit([work])

    def tick(self, time_s: float) -> None:
        """Publishes a version by time where updates have no step in common.

        Args:
            time_s: Seconds since 1970.
        """
        by_step = self.running.table.spec.rule.by_step
        if by_step != self.exact:  # The mode has changed: numbers would fall.
            self.begin_lineage()
            self.exact = by_step
            self.begin(at_multiples=True)
        slot = int(time_s) // self.every
        is_due = not self.exact and slot > self._slot and not self._awaited
        if not (is_due and self.running.table.has_weights):
            return
        self._slot = slot
        for index, clock in self.running.table.clocks.items():
            self.running.queues[index].submit([self._show(index, slot, clock.version)])

    def _show(self, index: int, number: int, version: int) -> ShowStore:
        step = self.running.table.spec.step_at(version)
        return ShowStore(see=partial(self._publish, index, self.lineage, number, step))

    # ----- on the queues

    def _publish(self, index: int, lineage: int, number: int, step: int, store: Store) -> None:
        assert isinstance(store, SliceStore)
        version = self._rings[index].publish(lineage, number, step, store.weights)
        with self._lock:
            if lineage != self.lineage:
                return
            self._reached[number] += 1
            is_whole = self._reached[number] == len(self._rings)
            if is_whole:
                self._newest = version
                for passed in [one for one in self._reached if one <= number]:
                    del self._reached[passed]
        if is_whole:
            self._on_version()

    # ----- for readers, on any thread

    @property
    def spec(self) -> TableSpec:
        """The declaration of the table."""
        return self.running.table.spec

    @property
    def newest(self) -> PublishedVersion | None:
        """The newest version that all slices have; its fingerprint is that of one slice."""
        with self._lock:
            return self._newest

    @property
    def has_slices(self) -> bool:
        """Whether slices of the table are on this shard."""
        return bool(self._rings)

    @property
    def nbytes(self) -> int:
        """Bytes of all versions that are kept."""
        return sum(ring.nbytes for ring in self._rings.values())

    def find(
        self, index: int, lineage: int, target: int, held: int, known: int
    ) -> FoundVersion | None:
        """Returns a version of a slice for a reader, as `VersionRing.find` describes."""
        ring = self._rings.get(index)
        return None if ring is None else ring.find(lineage, target, held, known)
