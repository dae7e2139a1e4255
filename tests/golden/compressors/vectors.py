"""Golden payloads of every compressor; `python -m tests.golden.compressors.vectors` writes them.

The inputs are made of integers, so that they are the same wherever NumPy runs. Two steps of 75
elements are kept in full, and of 5000 elements (three blocks, the last one short) their digests.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from pscore.compressors import COMPRESSORS, Compressor, parse_compressor
from pscore.types import FloatArray

FILE = Path(__file__).with_name("vectors.json")
SHORT, LONG = 75, 5000
KEPT = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
NEW = COMPRESSORS.own.keys() - {name.partition("(")[0] for name in KEPT}
NAMES = (
    *KEPT,
    *(name + arguments for name in sorted(NEW) for arguments in COMPRESSORS.own[name].examples),
)


def gradient(numel: int, step: int) -> FloatArray:
    """Returns numbers of both signs over some orders of magnitude, and a few zeros."""
    index = np.arange(numel, dtype=np.int64) + 7919 * step
    mantissa = (index * 2654435761 % 65521 - 32760).astype(np.float32) / np.float32(32768.0)
    exponent = np.ldexp(np.float32(1.0), (index * 40503 % 11 - 8).astype(np.int32))
    grad: FloatArray = mantissa * exponent.astype(np.float32)
    grad[index % 37 == 5] = 0.0
    return grad


def payloads(compressor: Compressor, numel: int, num_steps: int = 2) -> list[bytes]:
    """Returns the payloads of the first steps, seeds 2^40 + step, and then the state."""
    state = {name: np.zeros(numel, dtype=np.float32) for name in compressor.state_names}
    out = np.zeros(compressor.payload_nbytes_max(numel), dtype=np.uint8)
    made = []
    for step in range(num_steps):
        seed = (1 << 40) + step
        nbytes = compressor.encode(gradient(numel, step), state, out, seed=seed, step=step)
        made.append(out[:nbytes].tobytes())
    return made + [array.tobytes() for array in state.values()]


def vectors(name: str) -> dict[str, list[str]]:
    """Returns what `vectors.json` holds of one compressor."""
    compressor = parse_compressor(name)
    return {
        "payloads": [part.hex() for part in payloads(compressor, SHORT)],
        "sha256": [hashlib.sha256(part).hexdigest() for part in payloads(compressor, LONG)],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: vectors(name) for name in NAMES}, indent=1) + "\n")
