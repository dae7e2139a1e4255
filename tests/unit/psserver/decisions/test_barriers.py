"""Rounds of barriers: the missing workers, open rounds, and the first round of a late worker."""

from psserver.decisions.barriers import BARRIERS_MAX, Barriers


def arrive(barriers: Barriers, name: str, number: int, rank: int, expected: list[int]) -> list[int]:
    """Returns who is missing."""
    barrier = barriers.arrive(name, number, rank)
    return [] if barrier is None else barrier.missing(expected)


def test_a_barrier_opens_when_all_expected_have_come() -> None:
    barriers = Barriers()
    assert arrive(barriers, "epoch", 0, 0, [0, 1, 2]) == [1, 2]
    assert arrive(barriers, "epoch", 0, 0, [0, 1, 2]) == [1, 2]
    assert arrive(barriers, "epoch", 0, 2, [0, 2]) == []
    assert arrive(barriers, "epoch", 0, 0, [0, 2]) == []


def test_rounds_and_names_are_apart() -> None:
    barriers = Barriers()
    arrive(barriers, "a", 0, 0, [0, 1])
    assert arrive(barriers, "b", 0, 1, [0, 1]) == [0]
    assert arrive(barriers, "a", 0, 1, [0, 1]) == []
    assert arrive(barriers, "a", 1, 1, [0, 1]) == [0]


def test_an_open_round_stays_open_for_late_workers() -> None:
    """Else who has come through would wait for them in the next round, and they in this one."""
    barriers = Barriers()
    arrive(barriers, "epoch", 0, 0, [0, 1])
    assert arrive(barriers, "epoch", 0, 1, [0, 1]) == []
    assert arrive(barriers, "epoch", 0, 0, [0, 1, 2]) == []
    assert arrive(barriers, "epoch", 1, 1, [0, 1, 2]) == [0, 2]
    assert arrive(barriers, "epoch", 0, 0, [0, 1, 2]) == []
    assert arrive(barriers, "epoch", 0, 2, [0, 1, 2]) == []


def test_a_later_worker_begins_at_the_next_round_of_the_others() -> None:
    barriers = Barriers()
    assert barriers.next_rounds() == {}
    arrive(barriers, "epoch", 0, 0, [0, 1])
    assert barriers.next_rounds() == {"epoch": 0}
    arrive(barriers, "epoch", 0, 1, [0, 1])
    assert barriers.next_rounds() == {"epoch": 1}
    arrive(barriers, "epoch", 1, 0, [0, 1])
    assert barriers.next_rounds() == {"epoch": 1}


def test_the_oldest_of_many_barriers_is_forgotten() -> None:
    barriers = Barriers()
    for number in range(BARRIERS_MAX + 1):
        assert arrive(barriers, f"epoch {number}", 0, 0, [0, 1]) == [1]
    assert len(barriers.by_name) == BARRIERS_MAX
    assert arrive(barriers, "epoch 1", 0, 1, [0, 1]) == []
    assert arrive(barriers, "epoch 0", 0, 1, [0, 1]) == [0]


def test_a_barrier_does_not_open_while_the_job_waits_for_more_workers() -> None:
    barrier = Barriers().arrive("epoch", 0, 0)
    assert barrier is not None
    assert barrier.missing([0], is_short=True) == []
    assert not barrier.is_open
    assert barrier.missing([0, 1]) == [1]
    assert barrier.missing([0]) == []
    assert barrier.is_open
    barrier.missing([0], is_short=True)
    assert barrier.is_open


def test_all_get_the_largest_number_that_one_has_brought() -> None:
    barriers = Barriers()
    for rank, value in ((0, 0.5), (1, 2.0), (2, 1.0)):
        barrier = barriers.arrive("b", 0, rank, value)
        assert barrier is not None
        is_open = not barrier.missing([0, 1, 2])
        assert is_open == (rank == 2)
    assert barriers.agreed("b", 0) == 2.0
    late = barriers.arrive("b", 0, 3, 9.0)  # Joins later: it was not meant.
    assert late is not None
    assert barriers.agreed("b", 0) == 2.0


def test_a_repeated_request_gets_the_number_when_others_are_one_round_ahead() -> None:
    barriers = Barriers()
    for rank, value in ((0, 1.0), (1, 0.0)):
        barrier = barriers.arrive("b", 4, rank, value)
        assert barrier is not None
        barrier.missing([0, 1])
    barriers.arrive("b", 5, 0, 3.0)
    assert barriers.arrive("b", 4, 1, 0.0) is None
    assert barriers.agreed("b", 4) == 1.0
    assert barriers.agreed("b", 5) == 3.0
    assert barriers.agreed("b", 3) == barriers.agreed("c", 0) == 0.0


def test_rounds_may_have_numbers_with_gaps() -> None:
    """Each number is that of the step that follows; one who comes late learns the newest."""
    barriers = Barriers()
    for number, value in ((4096, 1.0), (8192, 0.0)):
        for rank in (0, 1):
            barrier = barriers.arrive("b", number, rank, value)
            assert barrier is not None
            barrier.missing([0, 1])
    assert barriers.arrive("b", 4096, 2, 5.0) is None
    assert barriers.agreed("b", 4096) == 1.0
    assert barriers.agreed("b", 8192) == 0.0
    assert barriers.agreed("b", 8191) == 0.0
    assert barriers.newest("b") == 8192


def test_a_worker_that_withdraws_is_waited_for_again() -> None:
    barriers = Barriers()
    arrive(barriers, "epoch", 0, 0, [0, 1])
    assert not barriers.withdraw("epoch", 0, 0)
    assert arrive(barriers, "epoch", 0, 1, [0, 1]) == [0]
    assert arrive(barriers, "epoch", 0, 0, [0, 1]) == []
    assert barriers.withdraw("epoch", 0, 0)  # It is open by now.
    assert not barriers.withdraw("other", 0, 0)


def test_a_round_opens_without_those_that_are_excused_from_it() -> None:
    """Such a worker does not know of that round: its next number means the one after it."""
    barriers = Barriers()
    assert arrive(barriers, "epoch", 3, 0, [0, 1]) == [1]
    barriers.excuse("epoch", 3, 0, [1])
    barriers.excuse("epoch", 3, 0, [0, 1])  # Asked again; a worker that is there is not excused.
    assert arrive(barriers, "epoch", 3, 0, [0, 1]) == []
    assert arrive(barriers, "epoch", 3, 1, [0, 1]) == [0]
    assert arrive(barriers, "epoch", 4, 0, [0, 1]) == []
    assert arrive(barriers, "epoch", 4, 1, [0, 1]) == [0]
    barriers.forget(1)  # Another process has the rank.
    assert arrive(barriers, "epoch", 5, 0, [0, 1]) == [1]
    assert arrive(barriers, "epoch", 5, 1, [0, 1]) == []
