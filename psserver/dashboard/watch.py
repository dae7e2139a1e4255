"""Asks shards for their status once a second, over connections that stay open."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import grpc

from pscore.errors import ThreadError
from pscore.net.credentials import Credentials
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc, publish_pb2, publish_pb2_grpc
from pscore.threads import OwnedThread
from psserver.dashboard.history import History
from psserver.exits import CommandError
from psserver.remote import readers
from psserver.remote.status import combine

POLL_S = 1.0
ANSWER_S_MAX = 5.0
SILENT_S_MAX = 1.0  # Limit for a shard that has never answered: the others must not wait.

Answer = pb.StatusReply | Exception


class Asker:
    """The connections to the shards of one cluster."""

    def __init__(self, addresses: Sequence[str], credentials: Credentials) -> None:
        """Connects when it is first asked.

        Args:
            addresses: Addresses of all shards, in their order.
        """
        self.addresses = list(addresses)
        self._credentials = credentials
        self._channels: list[grpc.Channel | None] = [None] * len(addresses)
        self._silent: set[int] = set()

    def ask(self) -> list[Answer]:
        """Returns the status of each shard, or the error in its place."""
        calls = [self._call(index) for index in range(len(self.addresses))]
        return [self._answer(index, call) for index, call in enumerate(calls)]

    def _call(self, index: int) -> grpc.CallFuture[pb.StatusReply]:
        channel = self._channels[index]
        if channel is None:
            channel = self._channels[index] = self._credentials.channel(self.addresses[index])
        stub = control_pb2_grpc.ControlStub(channel)
        timeout_s = SILENT_S_MAX if index in self._silent else ANSWER_S_MAX
        return stub.Status.future(pb.StatusRequest(), timeout=timeout_s)

    def _answer(self, index: int, call: grpc.CallFuture[pb.StatusReply]) -> Answer:
        try:
            reply = call.result()
        except grpc.RpcError as problem:
            # A new connection: gRPC would wait longer and longer before it tries again.
            self._silent.add(index)
            channel, self._channels[index] = self._channels[index], None
            if channel is not None:
                channel.close()
            return problem
        self._silent.discard(index)
        return reply

    def publications(self) -> list[publish_pb2.ListReply | CommandError]:
        """Returns what the shards publish that have answered `ask`."""
        calls = [
            publish_pb2_grpc.PublicationsStub(channel).List.future(
                publish_pb2.ListRequest(), timeout=ANSWER_S_MAX
            )
            for channel in self._channels
            if channel is not None
        ]
        found: list[publish_pb2.ListReply | CommandError] = []
        for call in calls:
            with contextlib.suppress(grpc.RpcError):  # It has ended since then, or has moved.
                found.append(call.result())
        return found

    def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels:
            if channel is not None:
                channel.close()
        self._channels = [None] * len(self.addresses)


class ShardWatch:
    """A thread that asks the shards, and keeps the history of their answers."""

    def __init__(self, asker: Asker, history: History) -> None:
        self.history = history  # The answers so far; guards itself.
        self._asker = asker
        self._end = threading.Event()
        self._thread = OwnedThread(self._run, "watch", self._show_silence)

    def start(self) -> None:
        """Asks once, and starts the thread."""
        self.look()
        self._thread.start()

    def look(self) -> None:
        """Asks once."""
        answers = self._asker.ask()
        addresses = self._asker.addresses
        status = None
        if any(isinstance(answer, pb.StatusReply) for answer in answers):
            status = combine(addresses, answers)
            readers.add(status, self._asker.publications())
        self.history.add(time.time(), status)

    def end(self) -> None:
        """Ends the thread and the connections."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER_S_MAX)
        self._asker.close()

    def _show_silence(self, error: ThreadError) -> None:
        """Shows that no shard answers, instead of old answers for ever."""
        self.history.add(time.time(), None)

    def _run(self) -> None:
        while not self._end.wait(POLL_S):
            self.look()
