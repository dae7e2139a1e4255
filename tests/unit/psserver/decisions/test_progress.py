"""Progress of one worker on one slice, where steps were left out."""

from psserver.decisions.progress import Progress


def test_steps_that_were_left_out_are_not_counted_but_never_come() -> None:
    progress = Progress()
    for step in range(3):
        progress.add(step)
    progress.skip_to(9)
    assert (progress.clock, progress.num_counted) == (9, 3)
    assert 5 in progress
    progress.skip_to(9)
    progress.skip_to(4)
    assert (progress.clock, progress.num_counted) == (9, 3)
    progress.add(9)
    assert (progress.clock, progress.num_counted) == (10, 10)


def test_a_step_received_ahead_is_the_last_one_also_where_others_are_left_out() -> None:
    progress = Progress()
    progress.add(2)
    progress.skip_to(2)
    assert (progress.clock, progress.num_counted, progress.ahead) == (2, 2, set())
