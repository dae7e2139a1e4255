"""A shard in time: the real decisions, and threads that execute them one slice after another."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pscore.net.wire import FLOAT_NBYTES
from pscore.table_spec import TableSpec
from pscore.timing.deployment import MachineRates
from pscore.types import Pull, Push, Role
from psserver.decisions.membership import Member
from psserver.decisions.orders import Acknowledge, Action, Add, Answer, Hold, Update
from psserver.decisions.shard import Actions, Address, Shard
from pssim.timing.links import Servers

JOB = "job"


@dataclass(eq=False, slots=True, kw_only=True)
class TimedRequest:
    """A push or pull that a shard has received."""

    payload_nbytes: int = 0  # Bytes of a push's payload.
    packed: bool = False  # Whether they are compressed.
    # Called with the action that answers it, when that has been executed.
    answer: Callable[[Acknowledge | Answer], None]
    # Returns the bytes of an answer, for its cost.
    answer_nbytes: Callable[[Answer], int] | None = None


class TimedShard:
    """One shard: messages are decided when they arrive, and executed when a thread is free."""

    def __init__(
        self,
        index: int,
        spec: TableSpec,
        numels: list[int],
        rates: MachineRates,
        *,
        num_workers: int,
        threads: Servers,
        secured: Callable[[int], bool],
    ) -> None:
        """Starts with all workers joined and the weights loaded.

        Args:
            spec: The table, whose slices have the shards of the deployment.
            numels: Elements of each slice of the deployment.
            secured: Returns whether the connection to a worker is encrypted.
        """
        self.threads = threads
        self._shard = Shard(index, spec.num_shards, math.inf)
        self._numels = numels
        self._rates = rates
        self._secured = secured
        self._queues: dict[int, deque[Action]] = {}  # Work of slices that have any.
        self._held: list[Callable[[], None]] | None = None  # Messages while it is stopped.
        self._num_workers = num_workers
        for rank in range(num_workers):
            self._job, _ = self._shard.decide_join(JOB, num_workers, _member(rank))
        table, _ = self._shard.define(self._job, spec)
        for slice_index in table.specs:
            loaded = Push(worker=0, step=0, base_version=0, role=Role.WEIGHTS)
            request = TimedRequest(answer=_ignore)
            self._shard.decide_push(self._job, self._address(slice_index), loaded, request)

    def stop(self) -> None:
        """Answers nothing until `resume`: another process continues from its journal."""
        self._held = []

    def resume(self) -> None:
        """Receives the messages that have come meanwhile: workers have sent them again."""
        held, self._held = self._held or [], None
        for message in held:
            message()

    def lose(self, rank: int) -> None:
        """Declares a worker lost: no step waits for it."""
        self._execute(self._shard.decide_leave(JOB, rank, 1 + rank, "killed", failed=True))

    def welcome(self, rank: int) -> None:
        """Adds another process at the rank of a lost worker."""
        member = _member(rank, restart=1)
        self._execute(self._shard.decide_join(JOB, self._num_workers, member)[1])

    def push(self, index: int, push: Push, request: TimedRequest) -> None:
        """Receives a push."""
        if self._held is not None:
            self._held.append(partial(self.push, index, push, request))
            return
        self._execute(self._shard.decide_push(self._job, self._address(index), push, request))

    def pull(self, index: int, pull: Pull, request: TimedRequest) -> None:
        """Receives a pull."""
        if self._held is not None:
            self._held.append(partial(self.pull, index, pull, request))
            return
        self._execute(self._shard.decide_pull(self._job, self._address(index), pull, request))

    def _address(self, index: int) -> Address:
        return Address(JOB, 0, index)

    def _execute(self, actions: Actions) -> None:
        for address, action in actions:
            queue = self._queues.get(address.slice)
            if queue is not None:
                queue.append(action)
            else:
                self._queues[address.slice] = deque([action])
                self._begin(address.slice)

    def _begin(self, index: int) -> None:
        """Schedules the next action of a slice on a thread."""
        action = self._queues[index][0]
        self.threads.work(self._cost_s(index, action), partial(self._end, index, action))

    def _end(self, index: int, action: Action) -> None:
        if isinstance(action, Acknowledge | Answer):
            request = action.token
            assert isinstance(request, TimedRequest)
            request.answer(action)
        queue = self._queues[index]
        queue.popleft()
        if queue:
            self._begin(index)
        else:
            del self._queues[index]

    def _cost_s(self, index: int, action: Action) -> float:
        """Returns the seconds of a thread that an action takes."""
        rates, raw_nbytes = self._rates, FLOAT_NBYTES * self._numels[index]
        if isinstance(action, Update):
            return raw_nbytes / rates.update
        if isinstance(action, Hold):
            return raw_nbytes / rates.memory
        if isinstance(action, Add):
            request = action.token
            assert isinstance(request, TimedRequest)
            nbytes = request.payload_nbytes
            seconds = raw_nbytes / rates.decode if request.packed else nbytes / rates.receive
            return rates.message_s + seconds + self._tls_s(action.worker, nbytes)
        if isinstance(action, Answer):
            request = action.token
            assert isinstance(request, TimedRequest)
            nbytes = 0 if request.answer_nbytes is None else request.answer_nbytes(action)
            return rates.message_s + nbytes / rates.send + self._tls_s(action.worker, nbytes)
        return 0.0

    def _tls_s(self, worker: int, nbytes: int) -> float:
        return nbytes / self._rates.tls if self._secured(worker) else 0.0


def _member(rank: int, restart: int = 0) -> Member:
    """Returns the process that takes a rank at first, or after a number of restarts."""
    return Member(
        rank=rank,
        incarnation=1 + rank + (restart << 32),
        restart=restart,
        host="",
        pid=rank,
        heard_s=0.0,
    )


def _ignore(action: Acknowledge | Answer) -> None:
    """Does nothing with the answer to the load of the first weights."""
