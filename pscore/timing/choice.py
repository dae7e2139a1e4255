"""Ways to train with their times and evidence, and the choice among them at a risk.

`psworker advise` chooses with it before a run, and `mode="auto"` during one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pscore.compressors import parse_compressor
from pscore.errors import ConfigError
from pscore.rules import parse_mode
from pscore.timing.closed import StepTime, closed_form
from pscore.timing.deployment import Deployment
from pscore.timing.evidence import ALONE, DDP, EVIDENCE, LOW_POINTS, Evidence
from pscore.timing.plans import warmup_of

RISKS = ("none", "low", "any")
NEARLY = 1.05  # Modes within 5 % are equal: the one that changes nothing else is advised.
WORTH = 1.1  # A mode has to be so much faster than one with the same updates to be advised.
MEASURED_MODES = ("ssgd", "od", "ssd", "cd", DDP)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode that advice considers."""

    mode: str  # The argument `mode=`.
    evidence: str  # Its key in `EVIDENCE`.
    compression: str = "none"  # The argument `compression=`.
    least: int = 1  # Workers that it needs.
    is_kin: bool = True  # Whether a learning rate means the same in it as in `ssgd`.


CANDIDATES = (
    Candidate("ssgd", "ssgd"),
    Candidate("od", "od"),
    Candidate("ssd(steps=1, mirror=kept)", "ssd k=1 kept"),
    Candidate("ssd(steps=5)", "ssd k=5"),
    Candidate("ssd(steps=5, mirror=kept)", "ssd k=5 kept"),
    Candidate("cd", "cd", "2bit"),
    Candidate("local(steps=8)", "local H=8", is_kin=False),
    Candidate("diloco(steps=100)", "diloco", is_kin=False),
    Candidate("asgd", "asgd", is_kin=False),
)


def backup_candidate(num_workers: int) -> Candidate:
    """Returns synchronous SGD with an eighth of the workers as backup, of which one is slow."""
    few = max(1, num_workers // 8)
    return Candidate(f"ssgd(backup={few})", "ssgd backup", least=few + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRow:
    """One way to train: its time, limit and evidence."""

    mode: str  # The argument `mode=`, `ddp`, or `one process`.
    compression: str  # The argument `compression=`.
    grouped: bool  # Whether the processes of a host are one worker.
    time: StepTime  # Its time in closed form.
    evidence: Evidence  # Its effect on accuracy where that was measured.
    num_shards: int  # Its shards; 0: none.

    @property
    def is_measured(self) -> bool:
        """Whether committed runs on shaped links had its mode."""
        return self.mode.partition("(")[0] in MEASURED_MODES

    @property
    def warmup(self) -> int:
        """Steps at the beginning that take as long as those of `ssgd`; 0: there are none."""
        return warmup_of(parse_mode(self.mode)) if self.num_shards else 0

    @property
    def name(self) -> str:
        """Its name in tables."""
        packed = "" if self.compression == "none" else f" + {self.compression}"
        return f"{self.mode}{packed}" + (", a host is a worker" if self.grouped else "")

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON can hold it."""
        return {
            "mode": self.mode,
            "compression": self.compression,
            "host_is_a_worker": self.grouped,
            "step_ms": round(1e3 * self.time.step_s, 1),
            "warmup_steps": self.warmup,
            "limit": self.time.limit,
            "waited": round(self.time.waited, 3),
            "parts_ms": {name: round(1e3 * s, 2) for name, s in self.time.parts_s.items()},
            "pushed_nbytes": round(self.time.pushed_nbytes),
            "pulled_nbytes": round(self.time.pulled_nbytes),
            "accuracy": self.evidence.as_json(),
        }


def choose(rows: Sequence[AdviceRow], risk: str, worth: float = WORTH) -> AdviceRow:
    """Returns the row to use: the one that changes least among those that are about as fast.

    Args:
        worth: A mode has to be so much faster than one with the same updates.
    """
    allowed = [row for row in rows if _is_allowed(row, risk)]
    fastest = min(allowed, key=lambda row: row.time.step_s)
    same = [row for row in allowed if row.evidence.points == 0]
    first = min(same, key=lambda row: row.time.step_s)
    if first.time.step_s <= worth * fastest.time.step_s:
        nearly = [row for row in same if row.time.step_s <= NEARLY * first.time.step_s]
        return next((row for row in nearly if row.mode in (ALONE, DDP)), first)
    nearly = [row for row in allowed if row.time.step_s <= NEARLY * fastest.time.step_s]
    return max(nearly, key=lambda row: row.evidence.points or 0.0)


def _is_allowed(row: AdviceRow, risk: str) -> bool:
    points = row.evidence.points
    if risk == "any":
        return True
    return points is not None and -points <= (LOW_POINTS if risk == "low" else 0.0)


def row_of(
    deployment: Deployment, candidate: Candidate, *, grouped: bool = False
) -> AdviceRow | None:
    """Returns the row of a mode; None: it does not fit the number of workers."""
    try:
        rule, compressor = parse_mode(candidate.mode), parse_compressor(candidate.compression)
        time = closed_form(deployment, rule, compressor)
    except ConfigError:
        return None
    return AdviceRow(
        mode=candidate.mode,
        compression=candidate.compression,
        grouped=grouped,
        time=time,
        evidence=EVIDENCE[candidate.evidence],
        num_shards=deployment.num_shards,
    )
