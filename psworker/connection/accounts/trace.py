"""Spans of pushes, pulls, rounds and exchanges in the timeline of a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from pscore.observe.timeline import Timeline
from pscore.pb.ps.v1 import control_pb2, data_pb2
from pscore.types import Role
from psworker.transports import OutgoingPush, PullCall


class RoundSpans:
    """Records the rounds of a mode with local steps: from the end of the one before to the push."""

    def __init__(self, timeline: Timeline) -> None:
        """Begins the first rounds now."""
        self._timeline = timeline
        self._first_ns = timeline.now_ns()
        self._begins_ns: dict[int, int] = {}  # By fragment.
        self._num_steps: dict[int, int] = {}  # Likewise: steps of its open round.

    def end_step(self, step: int, num_made: Sequence[int]) -> None:
        """Records the rounds that a step has ended.

        Args:
            num_made: Steps of each fragment's open round; 0: the step has ended a round.
        """
        for fragment, num in enumerate(num_made):
            self._num_steps[fragment] = self._num_steps.get(fragment, 0) + 1
            if num == 0:
                begin_ns = self._begins_ns.get(fragment, self._first_ns)
                self._timeline.span(
                    "round",
                    begin_ns,
                    track="round",
                    fragment=fragment,
                    step=step,
                    steps=self._num_steps.pop(fragment),
                )
                self._begins_ns[fragment] = self._timeline.now_ns()


def note_exchange(
    timeline: Timeline, call: Future[None], partner: int, envelope: data_pb2.Envelope, nbytes: int
) -> None:
    """Records what is sent to another worker, from now until it is acknowledged or answered."""
    begin_ns, kind = timeline.now_ns(), envelope.WhichOneof("body")

    def end(_: Future[None]) -> None:
        timeline.span(f"{kind}", begin_ns, track="peers", partner=partner, nbytes=nbytes)

    call.add_done_callback(end)


@contextlib.contextmanager
def peer_step(
    timeline: Timeline | None, report: Callable[[], control_pb2.PeerReport]
) -> Iterator[None]:
    """Records the body of a `with` block as a step with other workers; None records nothing.

    Args:
        report: Returns the worker's last exchanges, at the end of the step.
    """
    begin_ns = 0 if timeline is None else timeline.now_ns()
    yield
    if timeline is not None:
        found = report()
        timeline.span(
            "exchange",
            begin_ns,
            step=found.step,
            partner=found.partner,
            age_s=round(found.age_s, 6),
            staleness=found.staleness,
            distance=found.distance,
        )


def note_push(timeline: Timeline, push: OutgoingPush, nbytes: int) -> None:
    """Records a push from now until it is acknowledged; `nbytes` are those of its gradient."""
    begin_ns, header = timeline.now_ns(), push.header

    def end(_: Future[data_pb2.PushReply]) -> None:
        timeline.span(
            "push",
            begin_ns,
            track="push",
            job=header.sender.job,
            table=header.sender.table,
            slice=header.slice,
            worker=header.sender.worker,
            step=header.step,
            role=Role(int(header.role)).name.lower(),
            nbytes=nbytes,
        )

    push.done.add_done_callback(end)


def note_payload(
    timeline: Timeline, begin_ns: int, header: data_pb2.PushHeader, nbytes: int
) -> None:
    """Records the compression of a push's payload, from `begin_ns` until now."""
    timeline.span(
        "compress",
        begin_ns,
        slice=header.slice,
        step=header.step,
        nbytes=nbytes,
        compressor=header.compressor,
    )


def note_pull(timeline: Timeline, call: PullCall) -> None:
    """Records a pull from now until its answer has arrived."""
    begin_ns, header = timeline.now_ns(), call.header

    def end(future: Future[data_pb2.PullReply]) -> None:
        version = -1 if future.cancelled() or future.exception() else future.result().version
        timeline.span(
            "pull",
            begin_ns,
            track="pull",
            job=header.sender.job,
            table=header.sender.table,
            slice=header.slice,
            worker=header.sender.worker,
            min_version=header.min_version,
            version=version,
            nbytes=call.weights.nbytes,
        )

    call.done.add_done_callback(end)
