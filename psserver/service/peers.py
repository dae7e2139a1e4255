"""Messages about peers, to and from the values of the directory."""

from __future__ import annotations

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.text import printable
from psserver.decisions.directory import Peer, PeerReport

TEXT_LENGTH_MAX = 256


def peer_of(peer: pb.Peer) -> Peer:
    """Returns a worker's description of itself."""
    return Peer(
        rank=peer.rank,
        incarnation=peer.incarnation,
        host=printable(peer.host, TEXT_LENGTH_MAX),
        port=peer.port,
        local=printable(peer.local, TEXT_LENGTH_MAX),
        certificate=peer.certificate,
        secret=printable(peer.secret, TEXT_LENGTH_MAX),
        position=peer.position,
        parts=peer.parts,
        stays=peer.stays,
    )


def peer_to_proto(peer: Peer) -> pb.Peer:
    """Returns the message that describes a worker."""
    return pb.Peer(
        rank=peer.rank,
        incarnation=peer.incarnation,
        host=peer.host,
        port=peer.port,
        local=peer.local,
        certificate=peer.certificate,
        secret=peer.secret,
        position=peer.position,
        parts=peer.parts,
        stays=peer.stays,
    )


def peer_report(report: pb.PeerReport) -> PeerReport:
    """Returns a worker's report of its last exchanges."""
    return PeerReport(
        table=report.table,
        step=report.step,
        partner=report.partner,
        age_s=report.age_s,
        staleness=report.staleness,
        distance=report.distance,
        num_exchanges=report.num_exchanges,
    )


def report_to_proto(report: PeerReport) -> pb.PeerReport:
    """Returns the message of a worker's report."""
    return pb.PeerReport(
        table=report.table,
        step=report.step,
        partner=report.partner,
        age_s=report.age_s,
        staleness=report.staleness,
        distance=report.distance,
        num_exchanges=report.num_exchanges,
    )
