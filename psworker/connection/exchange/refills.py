"""A table's part in filling a shard that has come back empty (membership/refilling.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from pscore.errors import LOST, PacelineError
from pscore.net import wire
from pscore.partition import Layout
from pscore.pb.ps.v1 import data_pb2
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, Origin, Role
from psworker.connection.exchange.shared_grads import SharedGrads
from psworker.connection.membership.session import Session
from psworker.replica.ports import PullBuffer
from psworker.transports import OutgoingPush, PullCall, RequestFuture

# Version of a slice, its weights and optimizer state, and optimizer steps of each segment.
Held = Callable[[int], tuple[int, Sequence[FloatArray], Sequence[int]]]


class KeptPayload:
    """A payload that is made once, and kept for a shard that comes back empty."""

    def __init__(self, make: Callable[[], Sequence[memoryview]]) -> None:
        self._make = make
        self._parts: Sequence[memoryview] | None = None

    def __call__(self) -> Sequence[memoryview]:
        """Returns the parts of the payload."""
        if self._parts is None:
            self._parts = self._make()
        return self._parts


class TableRequests(Protocol):
    """The requests of one table."""

    spec: TableSpec
    origin: Origin
    table: int
    session: Session
    layout: Layout


class Refills:
    """Brings the slices of one table, and sends the requests of the step under way again."""

    def __init__(
        self,
        requests: TableRequests,
        sender: Callable[[], data_pb2.Sender],
        shared: SharedGrads | None,
        pushes: dict[int, Future[data_pb2.PushReply]],
        pulls: dict[int, tuple[PullCall, PullBuffer]],
        push: Callable[[int, OutgoingPush], None],
        pull: Callable[[int, PullCall, PullBuffer], None],
    ) -> None:
        """Brings nothing until `start`.

        Args:
            sender: Returns the table and this worker as they stand in messages; not to be changed.
            shared: Memory of the gradients that shards of this host map; None: there is none.
            pushes: Answers to the pushes, by slice; a push is removed once its answer was handled.
            pull: Sends a pull of a slice, in the place of the last one.
        """
        self._requests = requests
        self._sender = sender
        self._shared = shared
        self._pushes, self._pulls = pushes, pulls
        self._push, self._pull = push, pull
        self._last: dict[int, OutgoingPush] = {}  # The last push of each slice.
        self._held: Held | None = None

    @property
    def spec(self) -> TableSpec:
        """The table's declaration."""
        return self._requests.spec

    @property
    def origin(self) -> Origin:
        """The push and the step from which steps are counted."""
        return self._requests.origin

    def start(self, held: Held | None) -> None:
        """Fills shards again from now on, and keeps what is pushed until the step ends.

        Args:
            held: Returns a slice as this worker has it; None: it has not all that the shards have.
        """
        was_held, self._held = self._held is not None, held
        if held is not None:
            self._requests.session.refilling.held[self._requests.table] = self
        elif was_held:
            self._requests.session.refilling.held.pop(self._requests.table, None)

    def restart(self) -> None:
        """Forgets all pushes: this worker has joined again."""
        self._last.clear()
        if self._held is not None:
            self.start(self._held)

    def keep(self, index: int, push: OutgoingPush) -> None:
        """Keeps a push that is about to leave."""
        if self._held is not None:
            push.payload = KeptPayload(push.payload)
            self._last[index] = push

    def fill(self, shard: int) -> None:
        """Brings the slices of a shard as this worker has them, and waits until it has them.

        In an asynchronous mode versions say nothing: those of the first worker count.

        Raises:
            PacelineError: The shard refuses one, or does not answer.
        """
        assert self._held is not None
        if self._shared is not None:
            self._shared.attach(shard)
        transport = self._requests.session.links[shard].transport
        role = Role.REFILL if self.spec.rule.by_step else Role.WEIGHTS
        filled: list[OutgoingPush] = []
        for index in self._on(shard):
            version, arrays, counts = self._held(index)
            if version >= 0:
                header = data_pb2.PushHeader(
                    sender=self._sender(),
                    slice=index,
                    role=data_pb2.Role.Name(int(role)),
                    base_version=version,
                    counts=counts,
                )
                parts = [wire.as_bytes(np.ascontiguousarray(array)) for array in arrays]
                filled.append(OutgoingPush(header=header, payload=partial(tuple, parts)))
                transport.push(filled[-1])
        for push in filled:
            push.done.result()

    def send_again(self, shard: int) -> None:
        """Sends the pushes and pulls of the step under way to a shard again.

        A push of an earlier step is in the numbers that this worker has.
        """
        assert self._held is not None
        for index in self._on(shard):
            last, (version, *_) = self._last.get(index), self._held(index)
            if last is not None and last.header.step >= version:
                self._push(index, self._again(index, last))
            elif index in self._pushes:
                self._pushes[index] = counted = RequestFuture[data_pb2.PushReply]()
                counted.set_result(data_pb2.PushReply())
            call, pull_buffer = self._pulls.get(index, (None, None))
            if call is not None and pull_buffer is not None and pull_buffer.version < 0:
                self._pull(index, replace(call, done=RequestFuture(), fetch=None), pull_buffer)

    def mend(self, problem: PacelineError) -> None:
        """Fills shards that have come back empty; raises `problem` where it has another cause."""
        if self._held is None:
            raise problem
        self._requests.session.refilling.mend(problem)

    def require_whole(self, index: int) -> None:
        """Fills the shard of a slice first, if it has come back empty."""
        if self._held is None:
            return
        try:
            shard = self._requests.layout.slices[index].shard
            self._requests.session.links[shard].require_whole()
        except LOST as problem:
            self.mend(problem)

    def _on(self, shard: int) -> list[int]:
        return [spec.index for spec in self._requests.layout.of_shard(shard)]

    def _again(self, index: int, last: OutgoingPush) -> OutgoingPush:
        """Returns a push once more; where the shard no longer shares memory, with its payload."""
        header, payload = data_pb2.PushHeader(), last.payload
        header.CopyFrom(last.header)
        header.ClearField("pull")
        if header.shared and self._shared is not None and not self._shared.is_mapped(index):
            part = self._shared.part(index)
            header.shared, header.may_wait = False, False

            def payload() -> Sequence[memoryview]:
                last.payload()  # It may have to wait for a device.
                return (wire.as_bytes(part),)

        return OutgoingPush(header=header, payload=payload, waits=last.waits)
