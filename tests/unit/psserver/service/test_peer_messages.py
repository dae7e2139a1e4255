"""Messages about peers have every field of the values."""

from dataclasses import fields

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.decisions.directory import Peer, PeerReport
from psserver.service.messages import from_proto, peer_of, to_proto


def test_a_peer_comes_back_from_its_message() -> None:
    peer = Peer(
        rank=1,
        incarnation=2,
        host="10.0.0.3",
        port=4,
        local="socket",
        certificate=b"pem",
        secret="word",
        position=5,
        parts=True,
        stays=True,
    )
    assert all(getattr(peer, item.name) for item in fields(Peer)), "a default would say nothing"
    assert peer_of(to_proto(pb.Peer, peer)) == peer


def test_a_report_comes_back_from_its_message() -> None:
    report = PeerReport(
        table=1, step=2, partner=3, age_s=0.5, staleness=4, distance=0.25, num_exchanges=6
    )
    assert from_proto(PeerReport, to_proto(pb.PeerReport, report)) == report
