"""How much memory a table takes, by what it is declared as."""

from __future__ import annotations

from pscore.rules.base import Rule
from psserver.slices.pull_estimate import ESTIMATE_ARRAYS

SUMS_MAX = 2  # Counted of each slice; more are rare, and only for a while.


def num_changing(rule: Rule, num_state: int, *, is_kept: bool) -> int:
    """Returns how many arrays as long as its weights a table takes for state and sums.

    Args:
        rule: Its mode: each open step has a sum.
        num_state: Arrays of the optimizer's state.
        is_kept: Whether the table outlives the process: then none is written in place.
    """
    sums = min(rule.steps_open(), SUMS_MAX) if rule.by_step else 1
    return (num_state + sums) * (2 if is_kept else 1)


def num_arrays(rule: Rule, num_state: int, *, is_kept: bool, is_estimated: bool) -> int:
    """Returns how many arrays as long as its weights a table takes in all.

    Args:
        rule: Its mode.
        num_state: Arrays of the optimizer's state.
        is_kept: Whether the table outlives the process.
        is_estimated: Whether pulls are compressed.
    """
    estimates = ESTIMATE_ARRAYS if is_estimated else 0
    return 2 + num_changing(rule, num_state, is_kept=is_kept) + estimates
