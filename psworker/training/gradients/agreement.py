"""Parts of a step that every process of a group makes, or none.

A part that fails in one process of a group fails in all: each then raises an error of the same
kind, so that a script which catches it does the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pscore.errors import LOST, ConfigError, GradientError, GroupError, PacelineError, ReplacedError
from psworker.group.local_group import LocalGroup

NONE, OWN, REJOIN, OTHER = range(4)  # Kinds of errors; the largest one of a group counts.


def run_in_group(
    group: LocalGroup, part: Callable[[], Sequence[float]], count: int, has_left: Callable[[], bool]
) -> list[list[float]]:
    """Runs a part of a step in each process of a group.

    Args:
        group: The processes; all of them call it.
        part: The part; returns numbers for the other processes.
        has_left: Returns whether a gradient of the step has left this process.

    Returns:
        The numbers of each process, by local rank.

    Raises:
        GroupError: A process of the group has ended.
        GradientError: A process refuses its gradient, and nothing of the step has left.
        ReplacedError: The worker has to rejoin.
        PacelineError: Another error, of this process or another.
    """
    problem: PacelineError | None = None
    numbers: Sequence[float] = [0.0] * count
    try:
        numbers = part()
    except GroupError:
        raise
    except PacelineError as error:
        problem = error
    rows = group.gather([kind_of(problem), float(has_left()), *numbers])
    worst = max(int(row[0]) for row in rows)
    if worst == NONE:
        return [row[2:] for row in rows]
    if worst == OWN and any(row[1] for row in rows):
        worst = OTHER
    first = next(rank for rank, row in enumerate(rows) if row[0])
    text = f"process {first} of this worker's group raised an error in this step, which says why"
    if worst == REJOIN:
        raise ReplacedError(str(problem or text)) from problem
    if worst == OWN:
        raise problem or GradientError(text)
    if problem is not None and kind_of(problem) == OTHER:
        raise problem
    raise PacelineError(
        f"{problem or text}; a part of the step has left, so the worker rejoins at the next one"
    ) from problem


def kind_of(problem: PacelineError | None) -> int:
    """Returns the kind of an error: whether its worker may continue, and how."""
    if problem is None:
        return NONE
    if isinstance(problem, GradientError | ConfigError):
        return OWN
    return REJOIN if isinstance(problem, LOST) else OTHER
