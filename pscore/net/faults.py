"""Faults on purpose: frames that are lost, late, doubled, out of order or damaged.

    PACELINE_FAULTS="drop=0.01,delay=5ms@push,corrupt=0.001@pulled,seed=3"

Off unless that variable is set, and for tests only. Faults are chosen when a connection is made;
without faults the plain function sends, so the switch costs nothing. A fault strikes at one of four
points, or at all of them if none is named:

    push, pull       a worker sends a push, or asks for weights
    pushed, pulled   a shard answers one

| fault | what happens to a frame |
|---|---|
| `drop=P` | it is lost, and with it the connection: a stream loses nothing by itself |
| `disconnect=P` | it arrives, then the connection is cut, so that its answer is lost |
| `duplicate=P` | it arrives twice |
| `corrupt=P` | one of its bits is flipped, but none of its lengths, which mark its end |
| `reorder=P` | it waits a moment in which others pass it |
| `delay=5ms`, `delay=5ms:P` | it waits that long (s or ms), with probability P or always |

P is a probability, 0 to 1. Each connection draws from a generator of its own, seeded by `seed`, its
point and its number in this process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pscore.errors import ConfigError, TransportError
from pscore.net.tls import Stream
from pscore.threads import OwnedThread

VARIABLE = "PACELINE_FAULTS"
REPLY_POINTS = ("pushed", "pulled")
POINTS = ("push", "pull", *REPLY_POINTS)
KINDS = ("drop", "disconnect", "duplicate", "corrupt", "reorder", "delay")
REORDER_S = 0.01
DELAY_S_MAX = 60.0
LENGTHS_NBYTES = 16  # Magic and lengths, at the start of a frame.
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")

Send = Callable[[bytes], None]
Cut = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault."""

    kind: str
    chance: float
    point: str = ""  # Empty: everywhere.
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The parsed value of PACELINE_FAULTS."""

    faults: tuple[Fault, ...]
    seed: int = 0

    def at(self, point: str) -> FaultyLine | None:
        """Returns the faults of a new connection at a point, or None if it has none there."""
        found = tuple(fault for fault in self.faults if fault.point in ("", point))
        name = f"{self.seed}/{point}/{next(_numbers)}"
        return FaultyLine(found, random.Random(name)) if found else None

    def at_each(self, points: Iterable[str]) -> dict[str, FaultyLine]:
        """Returns the faults of a new connection at several points, where it has some."""
        lines = {point: self.at(point) for point in points}
        return {point: line for point, line in lines.items() if line is not None}


_numbers = itertools.count()
NONE = Faults(faults=())


class FaultyLine:
    """The faults of one connection at one point."""

    def __init__(self, faults: tuple[Fault, ...], rng: random.Random) -> None:
        """Draws from `rng`."""
        self._faults = faults
        self._rng = rng
        self._lock = threading.Lock()

    def draw(self) -> dict[str, Fault]:
        """Returns the faults of the next frame, by kind."""
        with self._lock:
            return {f.kind: f for f in self._faults if self._rng.random() < f.chance}

    def send(self, frame: bytes, send: Send, cut: Cut) -> None:
        """Sends a frame on a stream, with the faults that are drawn for it.

        Args:
            send: Sends bytes; may be called later, from another thread, and more than once.
            cut: Breaks the connection.
        """
        drawn = self.draw()
        if "drop" in drawn:
            cut()
            return
        frame = self.damaged(frame, drawn)
        wait_s = self.wait_s(drawn)

        def deliver() -> None:
            for _ in range(1 + ("duplicate" in drawn)):
                send(frame)
            if "disconnect" in drawn:
                cut()

        if wait_s:

            def deliver_late() -> None:
                time.sleep(wait_s)
                deliver()

            OwnedThread(deliver_late, "late-frame", lambda _: cut()).start()
        else:
            deliver()

    def call(self, make: Callable[[bytes], bytes], frame: bytes) -> bytes:
        """Makes a call that answers a frame with a frame, with the faults that are drawn for it.

        Raises:
            TransportError: The frame, or its answer, was lost on purpose.
        """
        drawn = self.draw()
        if "drop" in drawn:
            raise TransportError("a frame was dropped on purpose")
        threading.Event().wait(self.wait_s(drawn))
        frame = self.damaged(frame, drawn)
        for _ in range("duplicate" in drawn):
            make(frame)
        answer = make(frame)
        if "disconnect" in drawn:
            raise TransportError("an answer was lost on purpose")
        return answer

    def wait_s(self, drawn: Mapping[str, Fault]) -> float:
        """Returns the delay of a frame, in seconds."""
        wait_s = drawn["delay"].delay_s if "delay" in drawn else 0.0
        return wait_s + (REORDER_S if "reorder" in drawn else 0.0)

    def damaged(self, frame: bytes, drawn: Mapping[str, Fault]) -> bytes:
        """Returns a frame, with a bit flipped if that was drawn."""
        if "corrupt" not in drawn:
            return frame
        broken = bytearray(frame)
        with self._lock:
            bit = self._rng.randrange(8 * LENGTHS_NBYTES, 8 * len(broken))
        broken[bit // 8] ^= 1 << bit % 8
        return bytes(broken)


SendAll = Callable[[Stream, Sequence[memoryview]], None]
Call = Callable[..., bytes]


def sender(line: FaultyLine | None, send_all: SendAll) -> SendAll:
    """Returns a function that sends frames on a stream: `send_all`, with the faults of `line`."""
    if line is None:
        return send_all
    one_by_one = threading.Lock()

    def send(connection: Stream, parts: Sequence[memoryview]) -> None:
        here = threading.get_ident()

        def send_now(frame: bytes) -> None:
            try:
                with one_by_one:
                    send_all(connection, [memoryview(frame)])
            except TransportError:
                if threading.get_ident() == here:
                    raise  # Else no caller waits: it is sent again on the next connection.

        def cut() -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        line.send(b"".join(parts), send_now, cut)

    return send


def caller(line: FaultyLine | None, call: Call) -> Call:
    """Returns a function that makes calls of frames: `call`, with the faults of `line`."""
    if line is None:
        return call

    def make(frame: bytes, **options: object) -> bytes:
        return line.call(lambda sent: call(sent, **options), frame)

    return make


def from_environment(variables: Mapping[str, str] = os.environ) -> Faults:
    """Returns the faults of PACELINE_FAULTS; none if it is not set.

    Raises:
        ConfigError: The value is malformed; the message says what is wrong.
    """
    text = variables.get(VARIABLE, "")
    return parse(text) if text else NONE


def parse(text: str) -> Faults:
    """Returns the faults that `text` describes; raises ConfigError if a part of it is malformed."""
    faults: list[Fault] = []
    seed = 0
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise _refusal(part, "must look like drop=0.01 or delay=5ms@push")
        if name == "seed":
            if not value.isdecimal():
                raise _refusal(part, "must be a whole number")
            seed = int(value)
            continue
        faults.append(_fault(part, name, *value.partition("@")))
    for one, other in itertools.combinations(faults, 2):
        if one.kind == other.kind and (one.point == other.point or "" in (one.point, other.point)):
            raise _refusal(text, f"has {one.kind!r} twice at one point")
    return Faults(faults=tuple(faults), seed=seed)


def _fault(part: str, kind: str, value: str, at: str, point: str) -> Fault:
    """Returns one fault; raises ConfigError if it is malformed."""
    if kind not in KINDS:
        raise _refusal(part, f"must be one of {', '.join(KINDS)}, or seed")
    if at and point not in POINTS:
        raise _refusal(part, f"must be at one of {', '.join(POINTS)}")
    delay_s = 0.0
    if kind == "delay":
        duration, colon, value = value.partition(":")
        matched = DURATION.fullmatch(duration)
        if matched is None:
            raise _refusal(part, "must be a time such as 5ms or 0.5s")
        delay_s = float(matched[1]) / (1e3 if matched[2] == "ms" else 1.0)
        if not 0.0 < delay_s <= DELAY_S_MAX:
            raise _refusal(part, f"must be in 0..{DELAY_S_MAX:g} s")
        value = value if colon else "1"
    try:
        chance = float(value)
    except ValueError:
        chance = -1.0
    if not 0.0 <= chance <= 1.0:
        raise _refusal(part, "must have a probability in 0..1")
    return Fault(kind=kind, chance=chance, point=point, delay_s=delay_s)


def _refusal(part: str, wanted: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {part.strip()!r} {wanted}")
