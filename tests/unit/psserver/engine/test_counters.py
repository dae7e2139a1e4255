"""Counting: bounds are inclusive, and times move into the histogram once."""

from psserver.engine.counters import STALENESS_BOUNDS, Counters, Histogram


def test_a_value_at_a_bound_counts_below_it() -> None:
    histogram = Histogram((1, 2))
    for value in (0, 1, 1.5, 2, 2.1):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 6.6


def test_times_are_settled_once() -> None:
    counters = Counters()
    counters.times_s.extend([2e-5, 0.5])
    counters.settle()
    counters.settle()
    assert sum(counters.apply_s.counts) == 2
    assert counters.apply_s.total == 0.5 + 2e-5


def test_no_staleness_has_a_bucket_of_its_own() -> None:
    histogram = Histogram(STALENESS_BOUNDS)
    histogram.observe(0)
    histogram.observe(1)
    assert histogram.counts[:2] == [1, 1]
