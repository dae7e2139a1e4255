"""The protocol of a data plane: it carries slices to one shard and weights back.

Neither call waits. A push is repeated until it is acknowledged, over broken connections and
restarts, so its payload must not change until then. A pull is repeated until its weights are here.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from pscore.errors import DecodeError
from pscore.net.wire import FLOAT_NBYTES
from pscore.pb.ps.v1 import data_pb2
from pscore.types import FloatArray
from psworker.compression.pull_estimate import PulledEstimate
from psworker.transports.request_future import RequestFuture

log = logging.getLogger("paceline")
SAY_AFTER_S = 5.0  # A wait is logged after this time, and then each time it has doubled.


@dataclass(slots=True, kw_only=True, eq=False)
class OutgoingPush:
    """One push on its way to a shard.

    Attributes:
        header: Sent after `payload` has returned, which may find that the gradient is refused and
            then marks it as absent here.
        payload: Returns the parts of the payload. A transport calls it once, on the thread that
            sends, because it compresses or waits for a device.
        waits: Whether `payload` waits for a copy from a device.
        done: The shard's answer, or the error.
        pull: The pull that leaves with it and is not answered yet; None: there is none.
    """

    header: data_pb2.PushHeader
    payload: Callable[[], Sequence[memoryview]]
    waits: bool = False
    done: RequestFuture[data_pb2.PushReply] = field(default_factory=RequestFuture)
    pull: PullCall | None = None

    def carry(self, pull: PullCall) -> None:
        """Sends the pull of the same slice along; an error of the push is one of the pull too."""
        self.pull = pull
        self.done.add_done_callback(self._pass_error)

    def _pass_error(self, done: Future[data_pb2.PushReply]) -> None:
        error = done.exception()
        if error is not None and self.pull is not None and not self.pull.done.done():
            self.pull.done.set_exception(error)


@dataclass(slots=True, kw_only=True, eq=False)
class PullCall:
    """One pull, and the memory for its answer."""

    header: data_pb2.PullHeader
    weights: FloatArray  # (numel,)
    state: list[FloatArray]  # (numel,) each; may be unused.
    request: Sequence[memoryview] = ()  # Sent behind the header; unchanged until `done` is set.
    held: PulledEstimate | None = None  # The estimate that a compressed answer updates.
    copy_on_wait: bool = False  # Weights in shared memory are copied only when they are waited for.
    fetch: Callable[[], bool] | None = None  # The late copy; False: they changed, pull again.
    done: RequestFuture[data_pb2.PullReply] = field(default_factory=RequestFuture)
    started_s: float = field(default_factory=time.monotonic)
    say_s: float = SAY_AFTER_S

    def targets(self, reply: data_pb2.PullReply, nbytes: int) -> list[memoryview]:
        """Returns the memory for a payload of `nbytes`.

        Raises:
            DecodeError: The payload has another length than this pull's.
        """
        if self.held is not None and reply.fingerprint:
            return [self.held.room(reply, nbytes)]
        arrays = [self.weights, *(self.state if reply.counts else [])]
        if nbytes != sum(array.nbytes for array in arrays):
            raise DecodeError(
                f"payload of {nbytes} bytes for slice {self.header.slice}, "
                f"{len(arrays)} x {len(self.weights) * FLOAT_NBYTES} wanted"
            )
        return [memoryview(array).cast("B") for array in arrays]

    def land(self, reply: data_pb2.PullReply, payload: memoryview) -> None:
        """Copies a payload to its memory."""
        for target in self.targets(reply, payload.nbytes):
            target[:] = payload[: target.nbytes]
            payload = payload[target.nbytes :]

    def settle(self, reply: data_pb2.PullReply) -> bool:
        """Completes an answer; returns False if the pull must be repeated with the changed header.

        Raises:
            DecodeError: The answer is not for this pull.
        """
        if self.held is None or not reply.fingerprint:
            return True
        try:
            if self.held.take(reply):
                assert self.held.values is not None
                np.copyto(self.weights, self.held.values)
                return True
        finally:
            self.header.held = self.held.fingerprint
        return False

    def put_off(self, reply: data_pb2.PullReply) -> None:
        """Logs the reason why the shard cannot answer yet, less and less often."""
        waited_s = time.monotonic() - self.started_s
        if waited_s >= self.say_s - 1.0:
            self.say_s *= 2
            log.warning(
                "worker %d has waited %.0f s for %s",
                self.header.sender.worker,
                waited_s,
                reply.waiting_for,
            )


class Transport(ABC):
    """A data plane to one shard.

    Attributes:
        name: Its name in logs and in `PACELINE_DATA_PLANE`.
        shares_memory: Whether tables can be attached as shared memory.
    """

    name: ClassVar[str]
    shares_memory: bool = False

    @property
    def is_near(self) -> bool:
        """Whether the shard is known to be on this host."""
        return self.shares_memory

    @abstractmethod
    def push(self, push: OutgoingPush) -> None:
        """Sends one slice; `push.done` gets the reply or the error."""

    @abstractmethod
    def pull(self, call: PullCall) -> None:
        """Requests one slice; `call.done` gets the reply when the weights are in place."""

    def hold(self) -> None:  # noqa: B027 - not every data plane has something to hold
        """Keeps requests without a payload where several can leave together faster."""

    def renew(self) -> None:  # noqa: B027
        """Connects again, since the shard is at another address."""

    def let_go(self) -> None:  # noqa: B027
        """Sends the requests that `hold` has kept; further ones leave at once."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections; calls under way fail."""
