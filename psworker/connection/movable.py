"""A connection of gRPC whose other end may move to another address between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc


class MovableChannel:
    """Stands for a channel towards stubs, which keep their methods when it moves."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channels = [channel]

    def move(self, channel: grpc.Channel) -> None:
        """Makes the following calls on another channel; those under way are cancelled."""
        self._channels.append(channel)
        self._channels[-2].close()

    def unary_unary(self, method: str, *codecs: Any, **named: Any) -> Callable[..., Any]:
        """Returns a method that calls the shard where it is at that time."""
        made: dict[int, Callable[..., Any]] = {}  # By the number of moves before.

        def call(*request: Any, **options: Any) -> Any:
            number = len(self._channels)
            if number not in made:
                made[number] = self._channels[-1].unary_unary(method, *codecs, **named)
            try:
                return made[number](*request, **options)
            except ValueError:  # That channel has just been closed.
                if number == len(self._channels):
                    raise
                return call(*request, **options)

        return call

    def close(self) -> None:
        """Ends all connections."""
        for channel in self._channels:
            channel.close()
