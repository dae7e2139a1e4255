"""A simulated job, its faults and its mode."""

from dataclasses import dataclass

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.overlaps import Overlap
from pscore.rules.base import Rule
from pssim.network import NO_FAULTS, Cut, MessageFaults

STEPS_MAX = 8
RAW = NoCompression()
NUMEL = 64  # Elements of a slice: one element for each worker and step, and more.
ONE_SLICE = ((NUMEL,),)
TWO_SLICES = ((NUMEL,), (NUMEL,))
# Four slices: with two segments, with one, with parts of two tensors, and the rest of a tensor.
SHAPES = ((96,), (4, 8), (64,), (16,), (48,))
HALF = 0.5  # A probability.
GRADIENT = 5040.0  # Divided by every number of samples up to ten it is a whole number.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulated job."""

    seed: int  # Seed of the network.
    rule: Rule
    compressor: Compressor = RAW
    pull_compressor: Compressor = RAW
    num_shards: int = 2
    steps: tuple[int, ...]  # Steps of each worker; one with fewer leaves early.
    compute_s: tuple[float, ...]  # Computing time of each worker and step.
    begins_s: float = 0.0  # No worker computes before.
    is_steady: bool = False  # Steps take exactly that, not half of it to one and a half.
    dies_s: tuple[float | None, ...]  # When each worker falls silent, after its first step began.
    back_s: tuple[float | None, ...]  # How long after that it is started again.
    samples: tuple[float, ...]
    faults: MessageFaults = NO_FAULTS
    cuts: tuple[Cut, ...] = ()
    crashes: tuple[tuple[int, float], ...] = ()  # Which shard is killed, and when in seconds.
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    min_workers: int = 0  # Minimum of an elastic job.
    comes_s: tuple[float, ...] = ()  # When each worker starts; empty: all at once.
    shares: tuple[bool, ...] = ()  # Whether a worker's gradients are in memory that the shards map.
    captures_s: tuple[float, ...] = ()  # When a checkpoint of all shards is begun.
    quadratic: bool = False  # Gradients depend on the weights; else each has an element of its own.

    @property
    def has_units(self) -> bool:
        """Whether what each push moves can be read from its own element of the weights."""
        local = self.rule.local_update()
        return not (self.quadratic or (isinstance(local, Overlap) and local.mixes))

    @property
    def num_workers(self) -> int:
        """Workers that take part at some time."""
        return len(self.steps)

    def __str__(self) -> str:
        return f"{self.rule}, {self.compressor}, {self.num_workers}x{self.num_shards}"
