"""Shared memory between two workers of one host: arrays lie in it, and frames tell where.

It is attached as between workers and shards (pscore/net/attach.py). The sender of arrays passes a
segment of slots, each of which one message uses until it is answered; the receiver returns a
segment of the same layout, in which the answer to an offer lies at the slot of the offer.

A message may come twice, over two connections. Numbers of messages only grow, so one that is not
the newest of its slot is late, has been answered, and neither reads nor writes the slot.
"""

from __future__ import annotations

import os
import threading
from collections import deque

import numpy as np

from pscore.errors import PacelineError, RemoteProtocolError, TransportError
from pscore.memory.segment import Segment
from pscore.memory.slots import Slots
from pscore.net.attach import attach
from pscore.net.endpoint import Endpoint
from pscore.net.wire import FLOAT_NBYTES
from pscore.pb.ps.v1 import data_pb2 as pb
from pscore.types import FloatArray

SHARED_NBYTES_MIN = 512 << 10  # Shorter arrays are faster in their frames.
MEMORY_NBYTES_MAX = 64 << 20  # That a sender may pass.
FORMER_MAX = 2  # Memories of one rank that are kept: the present one, and that before.


class SharedSender:
    """The sending half: one worker's arrays for one other worker of its host."""

    def __init__(self, endpoint: Endpoint, sender: pb.Sender, nbytes: int) -> None:
        """Reserves memory and passes it to the other worker.

        Args:
            nbytes: Length of the longest array.

        Raises:
            PacelineError: The other worker refuses, or does not answer.
            OSError: There is too little memory.
        """
        self._slots = Slots(nbytes)
        request = pb.Attach(
            sender=sender, memory=self._slots.number, slot_nbytes=self._slots.nbytes
        )
        own = self._slots.segment
        try:
            self._answers = attach(endpoint, request, own, own.nbytes)
        except PacelineError:
            own.close()
            raise

    def put(self, values: FloatArray) -> pb.Slot | None:
        """Copies an array into a slot; returns the place, or None if none is free."""
        number = self._slots.put(values)
        if number is None:
            return None
        return pb.Slot(memory=self._slots.number, number=number, nbytes=values.nbytes)

    def answer(self, slot: pb.Slot, nbytes: int) -> FloatArray:
        """Returns a copy of the answer at a slot, `(nbytes / 4,) float32`."""
        return _floats(self._answers, self._slots.nbytes, slot.number, nbytes).copy()

    def free(self, slot: pb.Slot) -> None:
        """Ends the use of a slot."""
        self._slots.free(slot.number)


class SharedReceiver:
    """The receiving half: the memory of one other worker, and that of the answers to it."""

    def __init__(self, request: pb.Attach, segment: Segment) -> None:
        """Reserves memory for answers.

        Args:
            request: Number of the other worker's memory, and length of a slot.

        Raises:
            OSError: There is too little memory.
        """
        self.memory = request.memory
        self.answers = Segment.create(segment.nbytes)
        self._segment, self._stride = segment, request.slot_nbytes
        self._newest: dict[int, int] = {}  # Number of the newest message, by slot.
        self._lock = threading.Lock()

    def take(self, message: int, slot: pb.Slot) -> FloatArray:
        """Returns a copy of the array at a slot, for the message of this number.

        Raises:
            RemoteProtocolError: The message is late, or the place is not in the memory.
        """
        with self._lock:
            self._require_newest(message, slot.number)
            return _floats(self._segment, self._stride, slot.number, slot.nbytes).copy()

    def answer(self, message: int, slot: pb.Slot, values: FloatArray) -> None:
        """Copies the answer to a message to its slot.

        Raises:
            RemoteProtocolError: The message is late, or the answer is longer than a slot.
        """
        with self._lock:
            self._require_newest(message, slot.number)
            place = _floats(self.answers, self._stride, slot.number, values.nbytes)
            np.copyto(place, values)

    def _require_newest(self, message: int, number: int) -> None:
        if message < self._newest.get(number, 0):
            raise RemoteProtocolError(f"message {message} of a worker of this host comes late")
        self._newest[number] = message


class SharedReceivers:
    """The memories of the other workers of this host."""

    def __init__(self) -> None:
        self._receivers: dict[int, deque[SharedReceiver]] = {}  # By rank.

    def attach(self, request: pb.Attach, fd: int) -> Segment:
        """Maps the memory of another worker; returns that of the answers to it.

        Args:
            request: The sender, and length and number of its memory.
            fd: The memory, which stays the caller's.

        Raises:
            TransportError: It cannot be mapped, or there is too little memory.
        """
        try:
            segment = Segment.attach(os.dup(fd), min(request.nbytes, MEMORY_NBYTES_MAX))
            receiver = SharedReceiver(request, segment)
        except (OSError, ValueError) as problem:
            raise TransportError(f"cannot share memory with another worker: {problem}") from None
        segment.close()
        former = self._receivers.setdefault(request.sender.worker, deque(maxlen=FORMER_MAX))
        former.append(receiver)
        return receiver.answers

    def of(self, sender: pb.Sender, slot: pb.Slot) -> SharedReceiver:
        """Returns the memory that a message names.

        Raises:
            RemoteProtocolError: Its sender has not passed it, or others since.
        """
        for receiver in list(self._receivers.get(sender.worker, ())):
            if receiver.memory == slot.memory:
                return receiver
        raise RemoteProtocolError(
            f"worker {sender.worker} names shared memory that it has not passed"
        )


def _floats(segment: Segment, stride: int, number: int, nbytes: int) -> FloatArray:
    """Returns the array of `nbytes` at a slot, as a view.

    Raises:
        RemoteProtocolError: The slot is not in the segment.
    """
    is_within = nbytes <= stride and (number + 1) * stride <= segment.nbytes
    if not is_within or nbytes % FLOAT_NBYTES:
        raise RemoteProtocolError(
            f"{nbytes} bytes at slot {number} of shared memory of {segment.nbytes} bytes"
        )
    return segment.floats(number * stride, nbytes // FLOAT_NBYTES)
