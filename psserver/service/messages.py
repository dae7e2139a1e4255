"""Messages of the control service, to and from the values of decisions and views.

A field of a message has the name of the field of the value that it carries, so that a new one is
added to both and to nothing here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.text import printable
from psserver.decisions.auto_mode import ModeReport
from psserver.decisions.directory import Peer
from psserver.decisions.worker_reports import NO_PACE, ReportedPace, StageReport
from psserver.engine.views import JobView, WorkerView

TEXT_LENGTH_MAX = 256  # Longest text in a worker's description of itself.
M = TypeVar("M", bound=Message)
V = TypeVar("V")


def to_proto(kind: type[M], value: object, **others: Any) -> M:
    """Returns a message whose fields are those of a value.

    Args:
        value: The value; it has each field of the message that is not among `others`.
        others: Fields that are not those of `value` as they are.
    """
    names = kind.DESCRIPTOR.fields_by_name.keys() - others.keys()
    return kind(**{name: getattr(value, name) for name in names}, **others)


def from_proto(kind: type[V], message: Message, **others: Any) -> V:
    """Returns the value, a dataclass, whose fields have the names of those of a message."""
    names = {item.name for item in fields(kind)} - others.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **others)


def peer_of(peer: pb.Peer) -> Peer:
    """Returns a worker's description of itself."""
    texts = {name: getattr(peer, name) for name in ("host", "local", "secret")}
    cut = {name: printable(text, TEXT_LENGTH_MAX) for name, text in texts.items()}
    return from_proto(Peer, peer, **cut)


def pace_of(message: pb.Pace) -> ReportedPace:
    """Returns the pace that a worker reports; zeros if no worker can have it."""
    pace = from_proto(ReportedPace, message)
    return pace if pace.is_valid else NO_PACE


def report_of(message: pb.ChooseRequest) -> ModeReport:
    """Returns the report of a worker for the choice of the mode; the job knows its host."""
    return ModeReport(
        incarnation=message.incarnation,
        pace=pace_of(message.pace),
        near=tuple(message.near),
        possible=frozenset(message.possible),
        overlaps=message.overlaps,
    )


def stage_of(message: pb.StageReport) -> StageReport | None:
    """Returns the report of a worker; None if no worker can have sent it."""
    report = from_proto(StageReport, message)
    return report if report.is_valid else None


def job_status(job: JobView) -> pb.JobStatus:
    """Returns the message of a job with its workers and tables."""
    return to_proto(
        pb.JobStatus,
        job,
        job=job.name,
        silent_s=min((worker.silent_s for worker in job.workers), default=0.0),
        workers=map(_worker_status, job.workers),
        tables=[to_proto(pb.TableStatus, table) for table in job.tables],
    )


def _worker_status(worker: WorkerView) -> pb.WorkerStatus:
    return to_proto(
        pb.WorkerStatus,
        worker,
        last_heard_s=worker.silent_s,
        peers=[to_proto(pb.PeerReport, report) for report in worker.peers],
        pace=to_proto(pb.Pace, worker.pace),
        stage=None if worker.stage is None else to_proto(pb.StageReport, worker.stage),
    )
