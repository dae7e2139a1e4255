"""Shared memory through a Unix socket: a listener that ends in the middle of it."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pscore.errors import PacelineError, TransportError
from pscore.memory.segment import Segment
from pscore.net import wire
from pscore.net.attach import ATTACH_SUFFIX, attach
from pscore.net.endpoint import Endpoint
from pscore.pb.ps.v1 import data_pb2 as pb


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[Endpoint]:
    """Yields the endpoint of a listener that reads a request, and then does as `answer` says."""
    local = f"paceline-test-attach-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{local}{ATTACH_SUFFIX}")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Endpoint(host="", port=0, local=local)
        thread.join()


def test_a_listener_that_ends_without_an_answer_is_asked_again_later() -> None:
    """A shard that is killed then is only away: the caller connects to its next process."""
    with (
        listening(lambda connection: None) as endpoint,
        pytest.raises(TransportError, match="cannot share memory"),
    ):
        attach(endpoint, pb.Attach(), Segment.create(4096), 4096)


@pytest.mark.parametrize(
    "answer",
    [
        b"no frame of ours",
        wire.encode(pb.Envelope(failed=pb.Failure(message="no")).SerializeToString()),
        wire.encode(pb.Envelope(attached=pb.Attached(nbytes=1)).SerializeToString()),
    ],
)
def test_an_answer_that_is_of_no_use_leaves_no_descriptor_open(answer: bytes) -> None:
    own, other = Segment.create(4096), Segment.create(4096)
    before = len(os.listdir("/proc/self/fd"))
    with (
        listening(lambda connection: socket.send_fds(connection, [answer], [other.fd])) as where,
        pytest.raises(PacelineError),
    ):
        attach(where, pb.Attach(), own, 4096)
    assert len(os.listdir("/proc/self/fd")) <= before  # The listener's thread has ended by now.
