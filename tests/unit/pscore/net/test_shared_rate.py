"""A limit of bytes per second that several connections share."""

import pytest

from pscore.net.shared_rate import LATE_S, TURN_NBYTES_MAX, TURN_NBYTES_MIN, SharedRate


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def end_s(rate: SharedRate, clock: Clock, nbytes: list[int], turn: int) -> list[float]:
    """Returns when the last turn begins for each of some senders that begin together."""
    wakes, left = [clock.now_s] * len(nbytes), list(nbytes)
    while any(left):
        at = min((wake, i) for i, (wake, rest) in enumerate(zip(wakes, left, strict=True)) if rest)
        clock.now_s = max(clock.now_s, at[0])
        part = min(turn, left[at[1]])
        left[at[1]] -= part
        wakes[at[1]] = clock.now_s + rate.reserve(part)
    return wakes


def test_one_sender_has_the_whole_rate_and_several_have_equal_parts() -> None:
    clock = Clock()
    rate = SharedRate(1_000_000, clock)
    (alone,) = end_s(rate, clock, [1_000_000], 10_000)
    assert alone - 100.0 == pytest.approx(1.0, abs=0.1)
    clock.now_s = begin_s = 200.0
    ends = end_s(rate, clock, [500_000] * 4, 10_000)
    assert max(ends) - begin_s == pytest.approx(2.0, abs=0.1)
    assert max(ends) - min(ends) < 0.2
    clock.now_s = begin_s = 300.0
    short, long = end_s(rate, clock, [100_000, 900_000], 10_000)
    assert short - begin_s == pytest.approx(0.2, abs=0.1)  # Half of the rate while both send.
    assert long - begin_s == pytest.approx(1.0, abs=0.1)


def test_time_in_which_nobody_sends_is_not_made_good() -> None:
    clock = Clock()
    rate = SharedRate(1000, clock)
    assert rate.reserve(1000) == 0.0
    clock.now_s += 50.0
    waits = [rate.reserve(1000) for _ in range(3)]
    assert waits == pytest.approx([0.0, 1.0 - LATE_S, 2.0 - LATE_S])


def test_without_a_limit_nobody_waits_and_turns_are_neither_tiny_nor_huge() -> None:
    free = SharedRate(0)
    assert [free.reserve(1 << 40) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert SharedRate(1).turn_nbytes == TURN_NBYTES_MIN
    assert SharedRate(1 << 40).turn_nbytes == TURN_NBYTES_MAX
