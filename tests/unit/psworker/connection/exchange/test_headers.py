"""Prepared headers equal those that are made anew, and no request changes another's."""

from collections.abc import Callable

from pscore.pb.ps.v1 import data_pb2
from psworker.connection.exchange.headers import PreparedHeaders

SENDER = data_pb2.Sender(job="job", table=1, worker=2, incarnation=3)


def make(index: int, samples: float) -> Callable[[], data_pb2.PushHeader]:
    return lambda: data_pb2.PushHeader(sender=SENDER, slice=index, samples=samples)


def test_a_header_is_made_once_for_each_slice_and_content() -> None:
    headers = PreparedHeaders(data_pb2.PushHeader)
    made: list[tuple[int, float]] = []
    for index, samples in ((0, 1.0), (1, 1.0), (0, 1.0), (0, 2.0), (0, 2.0), (0, 1.0)):

        def noted(index: int = index, samples: float = samples) -> data_pb2.PushHeader:
            made.append((index, samples))
            return make(index, samples)()

        header = headers.copy(index, (SENDER, samples), noted)
        assert header == make(index, samples)()
    assert made == [(0, 1.0), (1, 1.0), (0, 2.0), (0, 1.0)]


def test_a_change_of_a_header_reaches_no_later_one() -> None:
    headers = PreparedHeaders(data_pb2.PushHeader)
    first = headers.copy(0, "same", make(0, 1.0))
    first.step, first.shared, first.sender.worker = 7, True, 9
    assert headers.copy(0, "same", make(0, 5.0)) == make(0, 1.0)()
