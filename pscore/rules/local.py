"""Local SGD: H steps of the user's own optimizer on each worker, then the mean of the weights.

Sebastian Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767;
the warm-up is that of post-local SGD: Tao Lin et al., "Don't Use Large Mini-Batches, Use Local
SGD", ICLR 2020, arXiv:1808.07217.

    worker, each step:       w_i <- inner(w_i, g_i)
    each H-th step:          push w_ref - w_i;  pull W;  w_ref = w_i = W
    shard:                   W <- W - (1/N) sum_i (w_ref - w_i)              the mean of the w_i

Nothing is sent between rounds. The inner optimizer is the wrapped torch optimizer, whichever it is,
and its state stays on the worker. In the warm-up every step is a round: with plain SGD, with or
without momentum, that is synchronous SGD up to rounding; with Adam each worker keeps its own
moments.

Differs from the paper: workers send the difference to the weights of the last pull and not the
weights, so that a round can be weighed, compressed, or given to another outer optimizer. The
warm-up is no different program, as it is in post-local SGD, but rounds of one step. With `backup`
a round takes the first N of N + b workers (as arXiv:1604.00981 does for single steps); a later
push is dropped, and its worker continues from the newest weights. With `quorum` such a push enters
the round that is open (pscore/rules/quorum.py). With `overlap` a worker starts
its next round without the answer to the last one, which lands `delay` steps into it
(pscore/overlaps); nothing changes for the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pscore.compressors.base import RESIDUAL, Compressor
from pscore.errors import ConfigError
from pscore.fragments import PATTERNS, SEQUENTIAL, Schedule
from pscore.overlaps import NONE, OVERLAPS, make_overlap
from pscore.plugins import require_one_of, require_range
from pscore.rules.base import Plan
from pscore.rules.quorum import ADAPTIVE, WithQuorum
from pscore.rules.speed import WithSpeed, round_length
from pscore.types import Role

AUTOMATIC = -1  # A delay that follows the length of a round.
AUTOMATIC_PART = 5
SAMPLE_NUMEL = 1 << 20  # Elements for which a compressor's bits are counted.
CAREFUL_BITS = 4.0  # An element: with fewer, most of a move waits in the residual.


@dataclass(frozen=True)
class LocalSGD(WithSpeed, WithQuorum):
    """Local SGD.

    Attributes:
        steps: H, steps from one round to the next, 1 or more.
        warmup: Steps that are rounds of their own, of which the shards take the plain mean,
            before rounds of H steps begin.
        backup: b, workers that a round need not wait for, 0 to the number of workers less one.
        overlap: The start of a round without the answer to the one before: `mirror`, `blend`,
            `eager`, `late`; `none` waits for it.
        delay: Steps of the next round after which that answer lands, 0..H: a worker then waits for
            it if it has not come. 0 waits at the end of the round; -1 is a fifth of H, 1 or more.
        mix: `blend`: weight of the worker's own weights when the answer lands, 0 to 1.
        control: `mirror`: part of the lasting difference between a worker's moves and their mean
            that is taken out of its guess, 0 to 1; for unlike data.
        quorum: K, workers with which a round may close once its window is over; a later move
            enters the next round. 0: a round waits for all of them.
        window: Seconds that a round with its quorum waits for the others; -1 follows the spread
            of their arrivals, up to a quarter of a round.
        fragments: p, parts of the model whose rounds end in turn, 1 to `steps`; 1: all at once.
        pattern: The division into fragments: `sequential`, neighbouring layers with about as many
            bytes each; `strided`, each p-th slice.
        steps_min: Least steps of a round of a worker that is slower than the fastest one: each
            makes as many as its speed allows. 0: each makes `steps`. `steps="speed"` is 1.
    """

    steps: int = round_length(8)
    warmup: int = 0
    backup: int = 0
    overlap: str = NONE
    delay: int = AUTOMATIC
    mix: float = 0.5
    control: float = 0.0
    quorum: int = 0
    window: float = ADAPTIVE
    fragments: int = 1
    pattern: str = SEQUENTIAL
    steps_min: int = 0

    name = "local"
    source = "Stich, arXiv:1805.09767"
    examples = ("(steps=4, warmup=5)",)
    outer_optimizer = "sgd"

    def __post_init__(self) -> None:
        self.read_steps()
        super().__post_init__()
        require_range(f"{self.name}.warmup", self.warmup, 0, 1 << 40)
        require_one_of(f"{self.name}.overlap", self.overlap, {NONE: None, **OVERLAPS})
        require_range(f"{self.name}.delay", self.delay, AUTOMATIC, self.steps)
        require_range(f"{self.name}.mix", self.mix, 0.0, 1.0)
        require_range(f"{self.name}.control", self.control, 0.0, 1.0)
        require_range(f"{self.name}.fragments", self.fragments, 1, self.steps)
        require_one_of(f"{self.name}.pattern", self.pattern, PATTERNS)
        overlap = self.local_update()
        if overlap is not None and overlap.takes_all and self.backup:
            raise ConfigError(
                f"{self.name}.overlap is {self.overlap!r}, which needs every worker's move in "
                f"every round: {self.name}.backup must be 0, is {self.backup}"
            )
        if overlap is not None and overlap.takes_all and self.quorum:
            raise ConfigError(
                f"{self.name}.overlap is {self.overlap!r}, which needs every worker's move in "
                f"every round: {self.name}.quorum must be 0, is {self.quorum}"
            )

        if self.steps_min and self.fragments > 1:
            raise ConfigError(
                f"{self.name}.steps_min is {self.steps_min} and {self.name}.fragments is "
                f"{self.fragments}: the rounds of fragments end at the same steps on all workers, "
                "those by speed do not; give one of them"
            )

    @property
    def landing(self) -> int:
        """Steps of a round before the answer to the one before lands; 0: rounds wait for it."""
        if self.overlap == NONE:
            return 0
        if self.delay == AUTOMATIC:
            return max(1, self.steps // AUTOMATIC_PART)
        return self.delay

    def local_update(self) -> Any:
        """Returns the overlap of rounds, or None where the end of a round waits."""
        return make_overlap(self.overlap, self.arguments()) if self.landing else None

    @property
    def schedule(self) -> Schedule:
        """One round of each fragment every H steps; by speed, each behind the last landing."""
        least = min(self.steps, max(self.steps_min, self.landing + 1)) if self.steps_min else 0
        return Schedule(self.fragments, self.steps, self.warmup, self.pattern, least)

    def plan(self, step: int) -> Plan:
        """That of the fragment with a round that ends now, or an answer that lands."""
        plans = [self.plan_of(step, fragment) for fragment in range(self.fragments)]
        return max(plans, key=lambda plan: (plan.push is not None, plan.lands))

    def plan_of(self, step: int, fragment: int) -> Plan:
        """The user's optimizer at every step; a push and a pull at the end of a round."""
        if step < self.warmup:
            return Plan(push=Role.DELTA, inner=True)
        place = (self.schedule.own_step(step, fragment) - self.warmup) % self.steps
        landing = self.landing
        if place < self.steps - 1:
            is_here = place + 1 == landing
            return Plan(push=None, inner=True, pull=False, block=False, lands=is_here)
        if not landing:
            return Plan(push=Role.DELTA, inner=True)
        return Plan(
            push=Role.DELTA, inner=True, local=True, block=False, lands=landing == self.steps
        )

    @property
    def momentum(self) -> float:
        """The momentum over the rounds."""
        return 0.0

    def caution(self, compressor: Compressor) -> str:
        """Error feedback and momentum over the rounds count the same past twice."""
        return momentum_caution(self.name, self.momentum, compressor)

    def step_after(self, step: int, num_pushes: int) -> int:
        """The step behind so many rounds of every fragment; those of the warm-up have one step."""
        return self.schedule.step_of(step, [num_pushes] * self.fragments)

    def outer_group(
        self, step: int, group: Mapping[str, Any], num_workers: int
    ) -> Mapping[str, Any]:
        """The mean: a step of plain SGD with learning rate 1."""
        return {
            "lr": 1.0,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        }


def momentum_caution(mode: str, momentum: float, compressor: Compressor) -> str:
    """Returns the reason not to use a compressor with momentum over rounds; empty: none."""
    bits = 8 * compressor.payload_nbytes_max(SAMPLE_NUMEL) / SAMPLE_NUMEL
    if not momentum or RESIDUAL not in compressor.state_names or bits > CAREFUL_BITS:
        return ""
    return (
        f"{mode} with momentum {momentum:g} over the rounds, and compression {compressor.name}: "
        "most of a move waits in the residual of error feedback, and momentum counts it again, "
        "which may diverge; use no momentum over the rounds, or a compressor that sends more, "
        "such as int8"
    )
