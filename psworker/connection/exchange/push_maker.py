"""Makes the headers and payloads of one table's pushes, and counts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pscore.errors import GradientError
from pscore.net import wire
from pscore.observe.timeline import Timeline
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Push, SliceSpec
from psworker.connection.accounts.trace import note_payload
from psworker.connection.accounts.traffic import Traffic
from psworker.connection.exchange.headers import push_header
from psworker.connection.exchange.payloads import Payloads

Made = tuple[data_pb2.PushHeader, Sequence[memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushMaker:
    """Makes what leaves in a push; several threads use it at once.

    Attributes:
        payloads: The table's payloads; a gradient refused late is recorded there.
        traffic: Counts the pushes and their payload bytes.
        timeline: Records the time of each compression; None: nothing is recorded.
    """

    payloads: Payloads
    traffic: Traffic
    timeline: Timeline | None
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def make(
        self,
        spec: SliceSpec,
        push: Push,
        sender: data_pb2.Sender,
        payload: Callable[[], memoryview],
        compressor: str,
        *,
        shared: bool,
        minibatch: int,
    ) -> Made:
        """Returns header and payload of one push; without a payload where the shard maps it.

        A gradient that is refused only now, after its copy from a GPU, is sent as absent, so that
        the step still ends.

        Args:
            spec: The slice.
            push: The push, for the shard's decision.
            sender: This worker and the table.
            payload: Returns the payload's bytes (`Payloads.prepare`).
            compressor: Name of the compressor; empty: the payload is uncompressed.
            shared: Whether the shard reads the payload in shared memory.
            minibatch: Number of the gradient's minibatch; -1: it names none.
        """
        header = push_header(spec, push, sender, compressor, shared=shared, minibatch=minibatch)
        begin_ns = 0 if self.timeline is None else self.timeline.now_ns()
        try:
            data = payload()
        except GradientError as problem:
            self.payloads.refuse(problem)
            header.present, header.compressor = wire.pack_bits(0, len(spec.segments)), ""
            header.shared = header.may_wait = False
            return header, ()
        if self.timeline is not None and compressor:
            note_payload(self.timeline, begin_ns, spec.index, push, data.nbytes, compressor)
        with self._counting:
            self.traffic.num_pushes += 1
            self.traffic.pushed_nbytes += data.nbytes if push.present else 0
        return header, () if shared or push.present == 0 else (data,)
