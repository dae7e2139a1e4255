"""The accuracy that modes lost where it was measured: rows of docs/convergence.md.

No theory gives this number for another model. A test compares each row with that page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DDP = "ddp"  # Its row: all-reduce by torch's DistributedDataParallel.
ALONE = "one process"  # The row of one worker: no job.
SAME = "same updates as one large batch"
SETTING = "LeNet on Fashion-MNIST, 4 workers"
LOW_POINTS = 0.5  # At `--risk low`: as much may have been lost.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The effect of a mode on accuracy where that was measured.

    Attributes:
        points: Percentage points of test accuracy from `ssgd`; 0 for the same updates; None: it was
            not measured.
        text: For people.
        source: The page, and the row in it.
    """

    points: float | None
    text: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return {"points": self.points, "text": self.text, "source": self.source}


def _measured(points: float, row: str, more: str = "", seeds: int = 3) -> Evidence:
    text = f"{points:+.1f} points ({SETTING}, {seeds} seeds){more}"
    return Evidence(points=points, text=text, source=f"docs/convergence.md, {row}")


EQUAL = Evidence(points=0.0, text=SAME, source="docs/rules/ssgd.md")
RATES = "; its rates have to be tuned"
# By the mode's row in the table of advice.
EVIDENCE = {
    "ssgd": EQUAL,
    "ssgd backup": _measured(-0.7, "row `ssgd backup=1`", ", one of four gradients dropped"),
    "od": _measured(-1.3, "row `od dc`"),
    "ssd k=1 kept": _measured(-0.3, "row k=1, `mirror kept`", seeds=2),
    "ssd k=5": _measured(-0.5, "row k=5, `mirror`"),
    "ssd k=5 kept": _measured(-0.6, "row k=5, `mirror kept`", seeds=2),
    "cd": _measured(-3.0, "row `cd k=5, 2-bit`"),
    "asgd": _measured(-3.2, "row `asgd`", "; the rate has to be divided by N"),
    "local H=8": _measured(-0.8, "row `local H=8`"),
    "diloco": _measured(-3.0, "row `diloco H=16`", f", H = 16{RATES}"),
    DDP: EQUAL,
    ALONE: EQUAL,
}
