"""The memory of a table on its shards, in arrays that are as long as the weights."""

from __future__ import annotations

from pscore.estimate import ESTIMATE_ARRAYS
from pscore.rules.base import Rule

SUMS_MAX = 2  # Open sums of a slice that are provided for; more are rare and do not last.


def num_changing(rule: Rule, num_state: int, *, is_kept: bool) -> int:
    """Returns the arrays, each as long as the weights, that a table needs for state and sums.

    Args:
        rule: The table's mode: each open step has a sum.
        is_kept: Whether the table outlives the process: then no array is written in place.
    """
    sums = min(rule.steps_open(), SUMS_MAX) if rule.by_step else 1
    return (num_state + sums) * (2 if is_kept else 1)


def num_arrays(rule: Rule, num_state: int, *, is_kept: bool, is_estimated: bool) -> int:
    """Returns all arrays, each as long as the weights, that a table needs."""
    estimates = ESTIMATE_ARRAYS if is_estimated else 0
    return 2 + num_changing(rule, num_state, is_kept=is_kept) + estimates
