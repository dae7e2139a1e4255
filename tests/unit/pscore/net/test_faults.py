"""The fault switch: its values, and the effect of each fault on a frame."""

from __future__ import annotations

import random
import socket
import threading

import pytest

from pscore.errors import ConfigError, DamagedError, TransportError
from pscore.net import faults, sockets, wire
from pscore.net.faults import Fault, Faults, FaultyLine

FRAME = wire.encode(b"header", b"payload")


def line(text: str, point: str = "push") -> FaultyLine:
    found = faults.parse(text).at(point)
    assert found is not None
    return found


def sent(text: str, frame: bytes = FRAME) -> tuple[list[bytes], int]:
    """Returns what arrives of a frame, and how often the connection was cut."""
    frames: list[bytes] = []
    cuts: list[None] = []
    line(text).send(frame, frames.append, lambda: cuts.append(None))
    return frames, len(cuts)


def test_every_part_is_read() -> None:
    text = "drop=0.01@pushed, delay=5ms@push,delay=0.5s:0.2@pull,corrupt=1,seed=3"
    assert faults.parse(text) == Faults(
        seed=3,
        faults=(
            Fault(kind="drop", chance=0.01, point="pushed"),
            Fault(kind="delay", chance=1.0, point="push", delay_s=0.005),
            Fault(kind="delay", chance=0.2, point="pull", delay_s=0.5),
            Fault(kind="corrupt", chance=1.0),
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop", "'drop' must look like"),
        ("drop=0.1,", "'' must look like"),
        ("lose=0.1", "'lose=0.1' must be one of drop, disconnect"),
        ("drop=", "must have a probability in 0..1"),
        ("drop=-0.1", "must have a probability in 0..1"),
        ("drop=1.1", "must have a probability in 0..1"),
        ("drop=nan", "must have a probability in 0..1"),
        ("drop=1%", "must have a probability in 0..1"),
        ("drop=0.1@", "'drop=0.1@' must be at one of push, pull, pushed, pulled"),
        ("drop=0.1@lane", "must be at one of push, pull, pushed, pulled"),
        ("delay=5", "must be a time such as 5ms or 0.5s"),
        ("delay=-5ms", "must be a time such as 5ms or 0.5s"),
        ("delay=0ms", r"must be in 0\.\.60 s"),
        ("delay=61s", r"must be in 0\.\.60 s"),
        ("delay=5ms:2", "must have a probability in 0..1"),
        ("seed=x", "'seed=x' must be a whole number"),
        ("drop=0.1,drop=0.2@push", "has 'drop' twice at one point"),
    ],
)
def test_an_unknown_fault_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^PACELINE_FAULTS: .*{message}"):
        faults.parse(text)


def test_without_faults_what_sends_is_the_plain_function() -> None:
    assert faults.from_environment({}).at("push") is None
    assert faults.from_environment({faults.VARIABLE: "drop=1@pull"}).at("push") is None
    assert faults.sender(None, sockets.send_all) is sockets.send_all


@pytest.mark.parametrize(
    ("text", "arriving", "cuts"),
    [
        ("drop=0", 1, 0),
        ("drop=1", 0, 1),
        ("disconnect=1", 1, 1),
        ("duplicate=1", 2, 0),
        ("duplicate=1,disconnect=1", 2, 1),
        ("drop=1,duplicate=1", 0, 1),
    ],
)
def test_each_fault_does_what_it_says(text: str, arriving: int, cuts: int) -> None:
    assert sent(text) == ([FRAME] * arriving, cuts)


def test_one_bit_is_flipped_and_the_checksum_tells() -> None:
    for seed in range(50):
        (broken,), _ = sent(f"corrupt=1,seed={seed}")
        differs = int.from_bytes(broken, "big") ^ int.from_bytes(FRAME, "big")
        assert differs.bit_count() == 1
        with pytest.raises(DamagedError):
            wire.decode(broken)


@pytest.mark.parametrize("text", ["delay=1ms", "reorder=1"])
def test_a_late_frame_arrives(text: str) -> None:
    arrived = threading.Event()
    line(text).send(FRAME, lambda frame: arrived.set(), lambda: None)
    assert arrived.wait(200.0)


def test_a_seed_draws_the_same_faults_again() -> None:
    many = faults.parse("drop=0.5,corrupt=0.5,seed=7").faults
    draws = []
    for _ in range(2):
        rng = FaultyLine(many, random.Random("7/push/0"))
        draws.append([sorted(rng.draw()) for _ in range(100)])
    assert draws[0] == draws[1]
    assert len({tuple(drawn) for drawn in draws[0]}) == 4


@pytest.mark.parametrize(
    ("text", "calls", "fails"),
    [("drop=1", 0, True), ("disconnect=1", 1, True), ("duplicate=1", 2, False)],
)
def test_calls_fail_as_a_network_does(text: str, calls: int, fails: bool) -> None:
    made: list[bytes] = []

    def call(frame: bytes, timeout: float) -> bytes:
        made.append(frame)
        return b"answer"

    make = faults.caller(line(text), call)
    if fails:
        with pytest.raises(TransportError, match="on purpose"):
            make(FRAME, timeout=1.0)
    else:
        assert make(FRAME, timeout=1.0) == b"answer"
    assert made == [FRAME] * calls


def test_a_stream_is_cut_and_a_late_frame_for_it_is_forgotten() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        faults.sender(line("drop=1"), sockets.send_all)(ours, [memoryview(FRAME)])
        assert theirs.recv(1) == b""
    late = faults.sender(line("delay=1ms"), sockets.send_all)
    late(ours, [memoryview(FRAME)])  # Its connection is closed: nobody is told.
    with pytest.raises(TransportError):
        faults.sender(line("duplicate=1"), sockets.send_all)(ours, [memoryview(FRAME)])
