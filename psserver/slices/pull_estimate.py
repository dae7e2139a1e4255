"""The estimate of one slice's weights that workers hold where pulls are compressed.

The equations stand in pscore/estimate.py. The estimate moves when a worker asks for it, at most
once for each version of the weights, and all workers share it. The last deltas are kept, as many as
are smaller than the estimate itself: a worker that is no further behind gets the deltas that it has
not seen, any other the whole estimate. Nothing of this outlives the process: afterwards the whole
estimate is sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from pscore.compressors.base import ORIGIN, RESIDUAL, Compressor
from pscore.errors import GradientError
from pscore.estimate import DELTAS_MAX, fingerprint
from pscore.pb.ps.v1 import data_pb2
from pscore.types import ByteArray, FloatArray


class Estimate:
    """The estimate of one slice; only the slice's queue uses it."""

    def __init__(self, compressor: Compressor, weights: FloatArray, version: int) -> None:
        """Starts at the weights themselves.

        Args:
            weights: `(numel,) float32`; copied.
            version: Version of these weights, in updates.
        """
        self.values = weights.copy()  # `(numel,) float32`, X.
        self.fingerprint = fingerprint(self.values)  # Fingerprint of `values`.
        self._compressor = compressor
        self._version = version
        self._difference = np.empty_like(self.values)
        self._buffer = np.zeros(compressor.payload_nbytes_max(len(weights)), dtype=np.uint8)
        # Each with the fingerprint that it leads on from, oldest first.
        # Invariant: together smaller than `values`.
        self._deltas: deque[tuple[int, ByteArray]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        kept = sum(payload.nbytes for _, payload in self._deltas)
        return self.values.nbytes + self._difference.nbytes + self._buffer.nbytes + kept

    def follow(self, weights: FloatArray, version: int) -> None:
        """Moves towards newer weights, by one delta.

        Args:
            weights: `(numel,) float32`.
            version: Version of these weights: at one that it has followed already it stays as it
                is.
        """
        if version == self._version:
            return
        self._version = version
        # So that encoding makes W - X in its first pass.
        np.negative(self.values, out=self._difference)
        state = {RESIDUAL: self._difference}
        if self._compressor.needs_origin:  # X + u is far from X as -X - u is from -X.
            state[ORIGIN] = self._difference.copy()
        try:
            nbytes = self._compressor.encode(
                weights, state, self._buffer, seed=self.fingerprint, step=version
            )
        except GradientError:  # Weights that diverge, beyond float32: they are shown as they are.
            np.copyto(self.values, weights)
            self._deltas.clear()
        else:
            payload = self._buffer[:nbytes].copy()
            self._compressor.decode_add(payload, self.values, 1.0, assign=False)
            self._keep(payload)
        self.fingerprint = fingerprint(self.values)

    def since(self, held: int) -> Sequence[ByteArray] | None:
        """Returns the deltas from the estimate with fingerprint `held` to this one.

        Returns:
            None if there is no such way: then the whole has to be sent.
        """
        if held == self.fingerprint:
            return ()
        found: list[ByteArray] = []
        for start, payload in reversed(self._deltas):
            found.append(payload)
            if start == held:
                return found[::-1]
        return None

    def answer(
        self, held: int, reply: data_pb2.PullReply
    ) -> Sequence[ByteArray] | Sequence[FloatArray]:
        """Returns what a worker with the estimate `held` lacks, and describes it in `reply`.

        Deltas stay as they are; the whole is a view, until the next `follow`.
        """
        reply.fingerprint = self.fingerprint
        deltas = self.since(held)
        reply.whole = deltas is None
        if deltas is None:
            return [self.values]
        reply.deltas.extend(delta.nbytes for delta in deltas)
        return deltas

    def _keep(self, payload: ByteArray) -> None:
        self._deltas.append((self.fingerprint, payload))
        kept = sum(payload.nbytes for _, payload in self._deltas)
        while self._deltas and (kept >= self.values.nbytes or len(self._deltas) > DELTAS_MAX):
            kept -= self._deltas.popleft()[1].nbytes
