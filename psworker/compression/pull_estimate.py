"""This worker's copy of one slice of the estimate, in jobs whose pulls are compressed.

The shard's side is psserver/slices/pull_estimate.py; the equations are in pscore/estimate.py. The
copy changes only with a complete answer, on the receiving thread. If its fingerprint then differs
from the shard's, it is invalid, and the next pull requests the whole estimate.
"""

from __future__ import annotations

import logging

import numpy as np

from pscore.compressors.base import Compressor
from pscore.errors import DecodeError
from pscore.estimate import DELTAS_MAX, fingerprint
from pscore.net.wire import as_bytes
from pscore.pb.ps.v1 import data_pb2
from pscore.types import ByteArray, FloatArray

log = logging.getLogger("paceline")


class PulledEstimate:
    """The estimate of one slice."""

    def __init__(self, compressor: Compressor, numel: int, name: str) -> None:
        """Starts without values."""
        self._compressor = compressor
        self._numel = numel
        self._name = name
        self._payload: ByteArray = np.empty(0, dtype=np.uint8)
        # The estimate X, `(numel,) float32`; None before the first answer.
        self.values: FloatArray | None = None
        self.fingerprint = 0  # The fingerprint of `values`; 0: they are invalid.
        self.num_resyncs = 0  # Number of answers after which X differed from the shard's.

    def forget(self) -> None:
        """Makes the next pull request the whole estimate."""
        self.fingerprint = 0

    def room(self, reply: data_pb2.PullReply, nbytes: int) -> memoryview:
        """Returns memory for the payload of an answer, `nbytes` bytes.

        Raises:
            DecodeError: The answer declares another length, or more than the estimate has.
        """
        whole_nbytes = 4 * self._numel
        declared = whole_nbytes if reply.whole else sum(reply.deltas)
        if nbytes != declared or nbytes > whole_nbytes or len(reply.deltas) > DELTAS_MAX:
            self.forget()
            raise DecodeError(
                f"{nbytes} bytes of {len(reply.deltas)} deltas for {self._name}, {declared} "
                f"declared, at most {whole_nbytes} wanted"
            )
        self._payload = np.empty(nbytes, dtype=np.uint8)
        return as_bytes(self._payload)

    def take(self, reply: data_pb2.PullReply) -> bool:
        """Applies an answer whose payload has arrived; returns False if it must be pulled again.

        Raises:
            DecodeError: A delta is not one of this slice.
        """
        payload, self._payload = self._payload, np.empty(0, dtype=np.uint8)
        self.forget()
        if reply.whole:
            self.values = payload.view("<f4")
        elif self.values is None:
            raise DecodeError(f"deltas for {self._name}, but there is no estimate to add them to")
        else:
            start = 0
            for nbytes in reply.deltas:
                delta = payload[start : start + nbytes]
                self._compressor.check(delta, self._numel)
                self._compressor.decode_add(delta, self.values, 1.0, assign=False)
                start += nbytes
        found = fingerprint(self.values)
        if found == reply.fingerprint:
            self.fingerprint = found
            return True
        if reply.whole:
            raise DecodeError(f"the estimate of {self._name} does not match its fingerprint")
        self.num_resyncs += 1
        log.warning(
            "%s: the estimate of version %d is not the shard's after %d deltas; it is sent whole",
            self._name,
            reply.version,
            len(reply.deltas),
        )
        return False
