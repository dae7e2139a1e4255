"""The requesting half of a connection, at moments that a test of both halves does not meet."""

import threading
from typing import Any

from pscore.errors import TransportError
from pscore.net import tls
from pscore.net.channel import FrameChannel
from pscore.pb.ps.v1 import data_pb2 as pb
from tests.unit.pscore.peers import Tensor


def refuse() -> tls.Stream:
    raise TransportError("nothing listens there")


class EndingLock:
    """A lock; when it is released first, its channel ends, as it may do on another thread."""

    def __init__(self, channel: FrameChannel[Any]) -> None:
        self.lock = threading.Lock()
        self.channels = [channel]

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if self.channels:
            channel = self.channels.pop()
            channel.start()
            channel.close()


def test_a_request_that_is_made_as_the_channel_ends_fails_once() -> None:
    channel = FrameChannel[Tensor](refuse, lambda *_: None, "push")
    name = "_lock"
    setattr(channel, name, EndingLock(channel))
    call = Tensor(0)
    channel.request(call, pb.Envelope())
    assert isinstance(call.done.exception(timeout=200.0), TransportError)
