"""The file of a pipeline's plan: `psworker plan --save-plan` writes it, and workers read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pscore.errors import ConfigError
from pscore.json_text import to_json

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """A stage of a plan."""

    last: str  # Name of its last block.
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan, and its prediction."""

    model: str
    stages: tuple[PlanStage, ...]  # Stages, in order.
    predicted_ms: float  # Milliseconds between two minibatches.
    verdict: str  # `pipeline` or `do not pipeline`.
    reason: str

    @property
    def name(self) -> str:
        """The numbers of replicas, as in `3-1`."""
        return "-".join(str(stage.replicas) for stage in self.stages)

    @property
    def workers(self) -> int:
        """Workers of all stages."""
        return sum(stage.replicas for stage in self.stages)

    @property
    def cuts(self) -> list[tuple[str, int]]:
        """Each stage's last block and replicas, as `psworker.Pipeline` takes them."""
        return [(stage.last, stage.replicas) for stage in self.stages]

    def places(self) -> str:
        """Returns the ranks of each stage, for people."""
        found, rank = [], 0
        for number, stage in enumerate(self.stages):
            last = rank + stage.replicas - 1
            ranks = f"rank {rank} is" if last == rank else f"ranks {rank} to {last} are"
            found.append(f"{ranks} stage {number} (to {stage.last})")
            rank = last + 1
        return ", ".join(found)

    def write(self, path: Path) -> None:
        """Writes the file; raises ConfigError if it cannot be written."""
        text = to_json({"version": VERSION, **asdict(self)}, indent=1)
        try:
            path.write_text(f"{text}\n", encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"the plan cannot be written: {problem}") from problem


def read_plan(path: str | Path) -> PlanFile:
    """Returns the plan in a file.

    Raises:
        ConfigError: It cannot be read, or is no plan of this version.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"the plan cannot be read: {problem}") from problem
    except ValueError as problem:
        raise ConfigError(f"{path} is no plan of a pipeline ({problem}); {_HOW}") from problem
    try:
        version = fields.pop("version")
        if version != VERSION:
            raise ConfigError(f"the plan {path} has version {version!r}, must be {VERSION}; {_HOW}")
        return PlanFile(stages=tuple(_stage(path, row) for row in _rows(fields)), **fields)
    except (TypeError, KeyError, AttributeError) as problem:
        what = f"{type(problem).__name__}: {problem}"
        raise ConfigError(f"{path} is no plan of a pipeline ({what}); {_HOW}") from problem


_HOW = "psworker plan MODEL --pipeline --save-plan FILE writes one"


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = found.pop("stages")
    if not isinstance(rows, list) or not rows:
        raise TypeError(f"stages is {rows!r}")
    return rows


def _stage(path: str | Path, row: dict[str, Any]) -> PlanStage:
    stage, replicas = PlanStage(**row), row["replicas"]
    if type(replicas) is not int or replicas < 1:
        raise ConfigError(f"the plan {path} has a stage {row}: replicas must be 1 or more; {_HOW}")
    return stage
