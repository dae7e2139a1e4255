"""Messages about a pipeline's stages, to and from the values of the server."""

from __future__ import annotations

from dataclasses import asdict

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.decisions.stages import StageReport


def stage_of(message: pb.StageReport) -> StageReport | None:
    """Returns the report of a worker; None if no worker can have sent it."""
    report = StageReport(
        stage=message.stage,
        replica=message.replica,
        minibatch=message.minibatch,
        version=message.version,
        in_flight=message.in_flight,
        activation_nbytes=message.activation_nbytes,
        versions_held=message.versions_held,
        waits_s=message.waits_s,
    )
    return report if report.is_valid else None


def stage_to_proto(report: StageReport) -> pb.StageReport:
    """Returns the message of a worker's report."""
    return pb.StageReport(**asdict(report))
