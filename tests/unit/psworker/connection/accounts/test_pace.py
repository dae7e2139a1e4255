"""The sums of a worker's steps, requests and waits."""

from concurrent.futures import Future

from psworker.connection.accounts.pace import Pace


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.end_step()
    assert pace.message().num_steps == 0
    for seconds in (2.0, 3.0):
        clock.now_s += seconds
        pace.end_step()
    message = pace.message()
    assert (message.num_steps, message.steps_s) == (2, 5.0)


def test_the_first_step_has_no_waits_and_no_requests_either() -> None:
    """Its kernels are made in it: of 30 s that one waits, the share of later steps says nothing."""
    clock = Clock()
    pace, first, under_way = Pace(clock), Future[int](), Future[int]()
    pace.follow(first)
    clock.now_s += 30.0
    pace.follow(under_way)
    first.set_result(0)
    pace.waited(30.0)
    pace.end_step()
    clock.now_s += 2.0
    under_way.set_result(0)
    pace.waited(1.0)
    pace.end_step()
    message = pace.message()
    assert (message.steps_s, message.waits_s, message.requests_s) == (2.0, 1.0, 2.0)


def test_requests_that_overlap_count_once_and_one_under_way_until_now() -> None:
    clock = Clock()
    pace, push, pull, late = Pace(clock), Future[int](), Future[int](), Future[int]()
    pace.follow(push)
    clock.now_s += 1.0
    pace.follow(pull)
    clock.now_s += 1.0
    push.set_result(0)
    clock.now_s += 1.0
    pull.set_exception(OSError())
    assert pace.message().requests_s == 3.0
    clock.now_s += 5.0
    pace.follow(late)
    clock.now_s += 2.0
    assert pace.message().requests_s == 5.0


def test_requests_that_are_never_answered_are_forgotten() -> None:
    clock = Clock()
    pace, lost = Pace(clock), Future[int]()
    pace.follow(lost)
    clock.now_s += 1.0
    pace.forget()
    clock.now_s += 10.0
    lost.cancel()
    assert pace.message().requests_s == 1.0
    pace.forget()


def test_an_answer_that_is_there_already_takes_no_time() -> None:
    pace, done = Pace(Clock()), Future[int]()
    done.set_result(1)
    pace.follow(done)
    assert pace.message().requests_s == 0.0


def test_waits_are_a_part_of_the_requests() -> None:
    clock = Clock()
    pace, push = Pace(clock), Future[int]()
    pace.end_step()
    pace.follow(push)
    clock.now_s += 4.0
    push.set_result(0)
    pace.waited(1.0)
    assert pace.message().waits_s == 0.0, "the step that it is a part of has no time yet"
    pace.end_step()
    assert (pace.message().waits_s, pace.message().requests_s) == (1.0, 4.0)
    pace.waited(1.0)
    pace.waited_for_peer(1.0)
    assert pace.message().waits_s == 1.0, "behind the last step"


def test_the_speed_is_that_of_computing_beside_the_fastest_worker() -> None:
    """Two steps of 2 s of which 1 s is a wait, then one of 3 s: 1 + 0.1 * (3 - 1)."""
    clock = Clock()
    pace = Pace(clock)
    pace.end_step()
    for took_s, waited_s in ((2.0, 1.0), (2.0, 1.0), (3.0, 0.0)):
        assert pace.share == 1.0  # Nothing is known of the others.
        clock.now_s += took_s
        pace.waited(waited_s)
        pace.end_step()
    assert pace.message().step_s == 1.2
    pace.fastest_s = 0.3
    assert pace.share == 0.25
    pace.fastest_s = 2.0  # It is this worker, which has become faster since.
    assert pace.share == 1.0


def test_a_wait_for_another_worker_is_a_wait_and_a_request() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.waited_for_peer(9.0)
    pace.end_step()
    clock.now_s += 4.0
    pace.waited_for_peer(3.0)
    pace.end_step()
    message = pace.message()
    assert (message.steps_s, message.waits_s, message.requests_s) == (4.0, 3.0, 3.0)


def test_a_pause_between_two_steps_belongs_to_neither() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.pause(9.0)
    pace.end_step()
    clock.now_s += 5.0
    pace.pause(5.0)
    clock.now_s += 2.0
    pace.end_step()
    assert pace.message().steps_s == 2.0
