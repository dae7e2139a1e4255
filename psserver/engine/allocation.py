"""Makes the tables of a shard: their memory, and a store and a queue for each slice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

from pscore.errors import LimitError
from pscore.memory.segment import WeightsMap
from pscore.observe.timeline import Timeline
from psserver.decisions.shard import Address, Shard
from psserver.decisions.table import Table
from psserver.durability.recovery import TableMemory
from psserver.engine.host_memory import require_host_memory
from psserver.engine.job import RunningJob, RunningTable
from psserver.engine.placement import Placement
from psserver.engine.slice_queue import DeferringCompletion, SliceQueue
from psserver.engine.trace import Tracer
from psserver.slices.base import NO_OBSERVER
from psserver.stores import kind_of
from psserver.stores.base import SliceMemory


class Allocation:
    """Makes tables at run time; called under the engine's lock."""

    def __init__(
        self,
        shard: Shard,
        close_ended: Callable[[], None],
        completion: DeferringCompletion,
        executor: Executor | None,
        placement: Placement,
        timeline: Timeline | None,
        on_table: Callable[[RunningJob, RunningTable], None],
    ) -> None:
        """Starts without tables.

        Args:
            close_ended: Closes the jobs that the shard has replaced or freed.
            completion: Payloads and answers of requests.
            executor: Does the work of large slices; None: the calling thread does it.
            on_table: Called with each new table.
        """
        self._on_table = on_table
        self._shard = shard
        self._close_ended = close_ended
        self._completion = completion
        self._executor = executor
        self._placement = placement
        self._timeline = timeline

    def allocate(self, job: RunningJob, table: Table) -> None:
        """Makes a new table, if need be in memory of jobs that have ended.

        Raises:
            LimitError: There is no memory for it; the job no longer has the table.
        """
        self._close_ended()  # Jobs that had to make room for it.
        try:
            what = f"table {table.spec.name!r} on shard {self._shard.index}"
            require_host_memory(what, table.memory_nbytes, self._free_one)
            memory = job.recorder.make_memory(table, self._free_one)
        except LimitError:
            del job.job.tables[table.spec.name]
            raise
        self.add(job, table, memory)

    def add(self, job: RunningJob, table: Table, memory: TableMemory) -> None:
        """Makes the stores and queues of a table in `memory`, whose weights workers can map."""
        layout = WeightsMap(list(table.specs.values()))
        queues: dict[int, SliceQueue] = {}
        for index, part in table.specs.items():
            address, timeline = Address(job.name, table.index, index), self._timeline
            own = SliceMemory(
                buffers=layout.buffers(memory.weights, index),
                versions=layout.versions(memory.weights, index),
                stamps=memory.stamps.get(index),
                journal=memory.journals.get(index),
            )
            seen = NO_OBSERVER if timeline is None else Tracer(timeline, address, part.numel)
            store = kind_of(table.spec.content.name).make(table, part, own, seen)
            queues[index] = SliceQueue(store, self._completion, self._executor, self._placement)
        job.tables[table.index] = running = RunningTable(table, memory.weights, queues)
        self._on_table(job, running)

    def _free_one(self) -> bool:
        """Frees the memory of the job that ended first; returns whether any has ended."""
        is_freed = self._shard.lifetimes.free_one()
        self._close_ended()
        return is_freed
