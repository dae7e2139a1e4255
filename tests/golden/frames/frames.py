"""Golden frames and a golden layout; `python -m tests.golden.frames.frames` writes them again.

A frame that changes is a protocol that changes: old workers and new shards no longer understand
each other, and `wire.PROTOCOL` has to be raised with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pscore.net import wire
from pscore.partition import Layout, make_layout
from pscore.pb.ps.v1 import data_pb2
from pscore.types import TensorSpec

FOLDER = Path(__file__).parent
HEX, LAYOUT = FOLDER / "frames.json", FOLDER / "layout.json"
SENDER = data_pb2.Sender(job="run-7", table=2, worker=3, incarnation=0x1122334455667788)
VALUES = np.array([1.0, -2.5, 0.15625, 3.4028235e38], dtype="<f4")
STATE = np.array([0.5, 0.25, 0.125, 0.0625], dtype="<f4")

# LeNet's tensors, in half and whole precision and two groups, and one that spans slices.
MODEL = (
    TensorSpec(name="conv1.weight", shape=(6, 1, 5, 5), dtype="float32"),
    TensorSpec(name="conv1.bias", shape=(6,), dtype="float32", group=1),
    TensorSpec(name="fc1.weight", shape=(120, 400), dtype="bfloat16"),
    TensorSpec(name="fc1.bias", shape=(120,), dtype="float16", group=1),
    TensorSpec(name="embedding.weight", shape=(2500, 1000), dtype="float32"),
    TensorSpec(name="scale", shape=(), dtype="float32", group=1),
)


def frames() -> dict[str, bytes]:
    """Returns one frame of each kind, as the product's own code makes it."""
    push = data_pb2.PushHeader(
        sender=SENDER,
        slice=5,
        step=41,
        base_version=40,
        samples=32.0,
        present=wire.pack_bits(0b101, 3),
        hyper=[0.1, 0.9, 0.0, 5e-4, 1.0, 0.0],
    )
    compressed = data_pb2.PushHeader(
        sender=SENDER, slice=5, step=42, compressor="2bit", samples=1.0, shared=True
    )
    state = data_pb2.PushHeader(
        sender=SENDER, slice=5, role=data_pb2.ROLE_STATE, counts=[7, 0, 1 << 40]
    )
    pull = data_pb2.PullHeader(
        sender=SENDER, slice=5, clock=42, min_version=42, with_state=True, wait_ms=10_000
    )
    ready = data_pb2.PullReply(ready=True, version=42, counts=[42, 42, 17], clock=42)
    waiting = data_pb2.PullReply(waiting_for="step 41 of worker 1 (process 7 on gpu0)")
    refused = data_pb2.PushReply(verdict=data_pb2.VERDICT_TOO_LATE, version=43)
    sent = data_pb2.Envelope(id=9, push=compressed)
    both = data_pb2.Envelope(
        id=10,
        push=data_pb2.PushHeader(
            sender=SENDER,
            slice=5,
            step=42,
            shared=True,
            may_wait=True,
            pull=data_pb2.PullHeader(clock=43, min_version=43, wait_ms=5_000, shared=True),
        ),
    )
    answered = data_pb2.PullReply(
        ready=True, version=43, buffer=2, pushed=data_pb2.PushReply(version=42)
    )
    attach = data_pb2.Envelope(id=1, attach=data_pb2.Attach(sender=SENDER, nbytes=1 << 20))
    failure = data_pb2.Failure(kind="DecodeError", message="frame of 3 bytes, 24 wanted")
    failed = data_pb2.Envelope(id=9, failed=failure)
    values, moments = wire.as_bytes(VALUES), wire.as_bytes(STATE)
    return {
        "push": wire.encode(push.SerializeToString(), values),
        "push_compressed": wire.encode(compressed.SerializeToString(), b"\x1b\xe4\x00"),
        "push_state": wire.encode(state.SerializeToString(), values, moments),
        "push_reply": wire.encode(refused.SerializeToString()),
        "pull": wire.encode(pull.SerializeToString()),
        "pull_reply": wire.encode(ready.SerializeToString(), values, moments),
        "pull_reply_waiting": wire.encode(waiting.SerializeToString()),
        "socket_push": wire.encode(sent.SerializeToString(), b"\x1b\xe4\x00"),
        "socket_push_and_pull": wire.encode(both.SerializeToString()),
        "socket_both_answered": wire.encode(
            data_pb2.Envelope(id=10, pulled=answered).SerializeToString()
        ),
        "socket_attach": wire.encode(attach.SerializeToString()),
        "socket_failed": wire.encode(failed.SerializeToString()),
        "empty": wire.encode(b""),
    }


def layout() -> dict[str, Any]:
    """Returns where everything of `MODEL` lies on three shards."""
    return describe(make_layout(MODEL, 3))


def describe(made: Layout) -> dict[str, Any]:
    """Returns a layout as lists and numbers."""
    return {
        "fingerprint": made.fingerprint,
        "numel": made.numel,
        "offsets": list(made.offsets),
        "slices": [
            {
                "shard": part.shard,
                "start": part.start,
                "stop": part.stop,
                "segments": [
                    [s.tensor, s.group, s.start, s.stop, s.tensor_start] for s in part.segments
                ],
            }
            for part in made.slices
        ],
    }


def record() -> None:
    """Writes both files."""
    dumped = {name: frame.hex() for name, frame in frames().items()}
    HEX.write_text(json.dumps(dumped, indent=1) + "\n", encoding="ascii")
    LAYOUT.write_text(json.dumps(layout(), indent=1) + "\n", encoding="ascii")


def recorded() -> dict[str, bytes]:
    """Returns the frames as they were recorded."""
    loaded: dict[str, str] = json.loads(HEX.read_text(encoding="ascii"))
    return {name: bytes.fromhex(text) for name, text in loaded.items()}


if __name__ == "__main__":
    record()
