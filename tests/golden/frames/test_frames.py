"""The bytes on the wire and the plan of a model are those that were recorded."""

import json

import numpy as np
import pytest

from pscore.net import wire
from pscore.net.wire import decode, floats
from pscore.pb.ps.v1 import data_pb2
from tests.golden.frames.frames import LAYOUT, STATE, VALUES, frames, layout, recorded

AGAIN = "record them again: python -m tests.golden.frames.frames (and raise wire.PROTOCOL)"


@pytest.mark.parametrize("name", sorted(frames()))
def test_a_frame_has_the_bytes_that_were_recorded(name: str) -> None:
    assert frames()[name].hex() == recorded()[name].hex(), AGAIN


def test_every_recording_has_a_frame() -> None:
    assert recorded().keys() == frames().keys(), AGAIN


def test_a_layout_is_the_one_that_was_recorded() -> None:
    """Workers and shards of two releases plan the same, or tell each other that they do not."""
    assert layout() == json.loads(LAYOUT.read_text(encoding="ascii")), AGAIN


def test_a_recorded_push_is_understood() -> None:
    raw, payload = decode(recorded()["push"])
    header = data_pb2.PushHeader.FromString(bytes(raw))
    assert (header.sender.job, header.sender.worker, header.slice) == ("run-7", 3, 5)
    assert (header.step, header.base_version, header.samples) == (41, 40, 32.0)
    assert wire.unpack_bits(header.present, 3) == 0b101
    assert list(header.hyper) == [0.1, 0.9, 0.0, 5e-4, 1.0, 0.0]
    assert np.array_equal(floats(payload, 1, 4)[0], VALUES)


def test_a_recorded_answer_with_state_is_understood() -> None:
    raw, payload = decode(recorded()["pull_reply"])
    reply = data_pb2.PullReply.FromString(bytes(raw))
    weights, moments = floats(payload, 2, 4)
    assert (reply.ready, reply.version, reply.clock) == (True, 42, 42)
    assert list(reply.counts) == [42, 42, 17]
    assert np.array_equal(weights, VALUES)
    assert np.array_equal(moments, STATE)


def test_a_recorded_refusal_is_understood() -> None:
    raw, payload = decode(recorded()["push_reply"])
    reply = data_pb2.PushReply.FromString(bytes(raw))
    assert (reply.verdict, reply.version, len(payload)) == (data_pb2.VERDICT_TOO_LATE, 43, 0)
