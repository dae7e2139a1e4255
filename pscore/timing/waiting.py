"""One line about a running job: the time that its workers wait, and a mode that would take less.

It needs no probe: workers count the seconds of their steps, of their waits for shards, and of the
time in which pushes or pulls were under way. With T, c, w and R their means for a step, of
computing the largest and the others of the worker that waits most,

    a worker is slow     the largest c is most of T, and clearly above the others'
    od                   about max(c, R): transfers hide behind the next step
    local(steps=8)       about c + R / 8

`R` contains the waits for other workers, so that `od` may be better than this, and is not worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pscore.timing.shown import in_ms

STEPS_MIN = 20  # Steps of a worker before its means say anything.
WAITED_MIN = 0.2  # Share of a step: waits below it are not worth a line.
GAIN_MIN = 0.1  # Share of a step that another mode has to save.
SLOW = 1.3  # Times the median: a worker is slow.
ROUND_STEPS = 8
SYNCHRONOUS = "ssgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSums:
    """The sums of one worker since it joined."""

    rank: int
    num_steps: int
    steps_s: float  # Seconds of these steps.
    # Seconds in which it waited for answers of shards, or for other workers' arrays.
    waits_s: float
    requests_s: float  # Seconds in which pushes or pulls were under way.
    step_s: float  # Seconds of one step without its waits.

    @property
    def mean_s(self) -> float:
        """Seconds of a step."""
        return self.steps_s / self.num_steps

    @property
    def waited(self) -> float:
        """Share of its steps in which it waited, 0 to 1."""
        return min(1.0, self.waits_s / self.steps_s)


def advice_line(mode: str, paces: Sequence[PaceSums]) -> str:
    """Returns the waits of workers and a mode that would take less; empty: they hardly wait.

    Args:
        mode: The job's mode, as text: `ssgd(backup=0)`.
    """
    known = [pace for pace in paces if pace.num_steps >= STEPS_MIN and pace.steps_s > 0]
    if not known:
        return ""
    most = max(known, key=lambda pace: pace.waited)
    if most.waited < WAITED_MIN:
        return ""
    mean = sum(pace.waits_s for pace in known) / sum(pace.steps_s for pace in known)
    computing = sorted(pace.step_s for pace in known)
    slowest = max(known, key=lambda pace: pace.step_s)
    step_s = max(pace.mean_s for pace in known)
    if len(known) > 1 and slowest.step_s > SLOW * computing[(len(known) - 1) // 2]:
        return (
            f"workers waited {mean:.0%} of the time, most of it for worker {slowest.rank}, which "
            f"computes for {in_ms(slowest.step_s)} a step, others for {in_ms(computing[0])}: look "
            "at that worker, or try ssgd(backup=1)"
        )
    waited = f"workers waited {mean:.0%} of the time"
    if mode.partition("(")[0] != SYNCHRONOUS:
        return waited
    requests_s = most.requests_s / most.num_steps
    delayed_s = max(slowest.step_s, requests_s)
    rounds_s = slowest.step_s + requests_s / ROUND_STEPS
    ways = [
        f"`{name}` would take about {in_ms(seconds)}, not {in_ms(step_s)}"
        for name, seconds in (("od", delayed_s), (f"local(steps={ROUND_STEPS})", rounds_s))
        if seconds < (1 - GAIN_MIN) * step_s
    ]
    return "; ".join([f"{waited} for pulls", *ways])
