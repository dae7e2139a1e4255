"""The whole answer of `psworker advise`: numbers with sources, table, shards, lines, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pscore.timing.choice import AdviceRow
from pscore.timing.deployment import RATE_SOURCES
from psworker.advice.choices import (
    ERROR,
    AdviceVerdict,
    ShardPlaces,
    beyond_measured,
    choose_row,
    plan_shards,
    rows_of,
)
from psworker.advice.situation import Situation
from psworker.advice.written import lines_to_write

ERROR_SOURCE = (
    "docs/results/predictions.json: the worst of 12 runs on shaped links, all predicted first; "
    "`python -m benchmarks.predictions` makes new ones"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceReport:
    """The result of `psworker advise`."""

    situation: Situation
    rows: Sequence[AdviceRow]
    shards: ShardPlaces
    verdict: AdviceVerdict
    risk: str
    beyond: Sequence[str]  # How far the situation lies from every measured run.
    lines: Sequence[str]  # Lines to write.

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON can hold it."""
        shards = self.shards
        return {
            "verdict": self.verdict.text,
            "also": self.verdict.also,
            "use": self.verdict.row.mode,
            "limit": self.verdict.row.time.limit,
            "risk": self.risk,
            "table": [row.as_json() | {"error": self.error_of(row)} for row in self.rows],
            "error_source": ERROR_SOURCE,
            "beyond_measured": list(self.beyond),
            "shards": {
                "number": len(shards.hosts),
                "hosts": list(shards.hosts),
                "memory_nbytes": round(shards.nbytes),
                "cpu_share": round(shards.cpu_share, 3),
            },
            "lines": list(self.lines),
            "given": self.situation.as_json(),
            "rates": RATE_SOURCES,
        }

    def error_of(self, row: AdviceRow) -> float | None:
        """Returns the share by which a time may be wrong; None: nothing like it was measured."""
        return None if self.beyond or not row.is_measured else ERROR


def advise(situation: Situation, risk: str = "low") -> AdviceReport:
    """Returns the advice for a situation.

    Args:
        risk: One of `choices.RISKS`.

    Raises:
        ConfigError: There is no such risk.
    """
    shards = plan_shards(situation)
    rows = rows_of(situation, shards)
    verdict = choose_row(rows, risk)
    return AdviceReport(
        situation=situation,
        rows=rows,
        shards=shards,
        verdict=verdict,
        risk=risk,
        beyond=beyond_measured(situation),
        lines=lines_to_write(situation, shards.hosts, verdict.row),
    )
