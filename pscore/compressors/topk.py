"""Top-k: the elements that are largest, by index and value; the others wait in the residual.

Sebastian Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599; Alham Fikri
Aji and Kenneth Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021.

    u = g + r;  S = the k largest |u|;  send (i, u[i]) for i in S;  r = u, and 0 in S

The payload is that of `sparse.py`. k is `ratio` of the slice's elements, rounded up. With
`select="sampled"` the threshold is estimated from a sample, and up to 2 k elements are sent.

Differs from the papers: the k largest of each slice and not of each tensor or of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.compressors import blocks, sparse
from pscore.compressors.base import RESIDUAL, Compressor, State, note_largest
from pscore.memory.kernels import read_only
from pscore.plugins import require_one_of, require_range
from pscore.types import ByteArray, FloatArray

RATIO_MIN = 1e-6


@dataclass(frozen=True)
class TopK(Compressor):
    """The largest elements.

    Attributes:
        ratio: Share of the elements that are sent.
        select: `exact`, or `sampled`, which is faster and sends about as many.
    """

    name = "topk"
    source = "Stich et al., arXiv:1809.07599"
    examples = ("(ratio=0.03)", "(ratio=0.03, select=sampled)")

    ratio: float = 0.01
    select: str = "exact"

    def __post_init__(self) -> None:
        require_range("topk.ratio", self.ratio, RATIO_MIN, 1.0)
        require_one_of("topk.select", self.select, dict.fromkeys(sparse.SELECTS))

    def payload_nbytes_max(self, numel: int) -> int:
        """Eight bytes per element that is sent."""
        return sparse.payload_nbytes(sparse.limit(self.ratio, numel, self.select))

    def payload_nbytes(self, buffer: ByteArray, numel: int) -> int:
        """Returns the length that follows from the count at the start."""
        return sparse.payload_nbytes(sparse.count_in(buffer))

    def check(self, payload: ByteArray, numel: int) -> None:
        """The exact length, indices in range and increasing, values that are numbers."""
        sparse.check(self.name, payload, numel, sparse.limit(self.ratio, numel, self.select))

    def encode(
        self, grad: FloatArray, state: State, out: ByteArray, *, seed: int = 0, step: int = 0
    ) -> int:
        """Selects and clears."""
        residual = state[RESIDUAL]
        self.require_room(grad, state)
        note_largest(state, blocks.take_max(read_only(grad), residual), self.name)
        nbytes, _ = sparse.encode(
            residual, sparse.num_sent(self.ratio, len(grad)), self.select, out
        )
        return nbytes

    def decode_add(
        self, payload: ByteArray, out: FloatArray, scale: float, *, assign: bool
    ) -> None:
        """Scatters."""
        sparse.decode_add(payload, out, scale, assign=assign)
