"""Messages about peers have every field of the values."""

from dataclasses import fields

from psserver.decisions.directory import Peer, PeerReport
from psserver.service.peers import peer_of, peer_report, peer_to_proto, report_to_proto


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
    assert peer_of(peer_to_proto(peer)) == peer


def test_a_report_comes_back_from_its_message() -> None:
    report = PeerReport(
        table=1, step=2, partner=3, age_s=0.5, staleness=4, distance=0.25, num_exchanges=6
    )
    assert peer_report(report_to_proto(report)) == report
