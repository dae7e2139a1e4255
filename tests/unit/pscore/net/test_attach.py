"""Shared memory through a Unix socket: a listener that ends in the middle of it."""

import socket
import threading

import pytest

from pscore.errors import TransportError
from pscore.memory.segment import Segment
from pscore.net.attach import ATTACH_SUFFIX, attach
from pscore.net.endpoint import Endpoint
from pscore.pb.ps.v1 import data_pb2 as pb


def test_a_listener_that_ends_without_an_answer_is_asked_again_later() -> None:
    """A shard that is killed then is only away: the caller connects to its next process."""
    local = f"paceline-test-attach-{id(object()):x}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{local}{ATTACH_SUFFIX}")
        listener.listen()

        def end() -> None:
            connection, _ = listener.accept()
            connection.recv(1)
            connection.close()

        thread = threading.Thread(target=end)
        thread.start()
        endpoint = Endpoint(host="", port=0, local=local)
        with pytest.raises(TransportError, match="cannot share memory"):
            attach(endpoint, pb.Attach(), Segment.create(4096), 4096)
        thread.join()
