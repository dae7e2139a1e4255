"""Messages about a worker's pace, to and from the values of the decisions."""

from __future__ import annotations

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.decisions.pace import NO_PACE, ReportedPace


def pace_of(message: pb.Pace) -> ReportedPace:
    """Returns the pace that a worker reports; zeros if no worker can have it."""
    pace = ReportedPace(
        num_steps=message.num_steps,
        steps_s=message.steps_s,
        waits_s=message.waits_s,
        requests_s=message.requests_s,
        step_s=message.step_s,
        round_steps=message.round_steps,
    )
    return pace if pace.is_valid else NO_PACE


def pace_to_proto(pace: ReportedPace) -> pb.Pace:
    """Returns the message of a worker's pace."""
    return pb.Pace(
        num_steps=pace.num_steps,
        steps_s=pace.steps_s,
        waits_s=pace.waits_s,
        requests_s=pace.requests_s,
        step_s=pace.step_s,
        round_steps=pace.round_steps,
    )
