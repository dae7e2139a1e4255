"""The directory of peers after its shard was restarted: workers know a later epoch than it does."""

from dataclasses import replace

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.decisions.directory import Directory, Peer
from psserver.service.messages import peer_of, to_proto


def peer(rank: int, position: int = 7) -> Peer:
    return Peer(rank=rank, incarnation=rank + 1, host="h", port=1, position=position)


def test_a_new_directory_begins_behind_the_epochs_that_workers_know() -> None:
    directory = Directory()
    assert directory.arrive(peer(0), 5, [0, 1]) == [0, 1]
    assert directory.epoch == 6
    assert directory.arrive(peer(1), 5, [0, 1]) == [0, 1]
    assert directory.epoch == 7
    directory.arrive(peer(0), 7, [0, 1])
    assert directory.arrive(peer(1), 7, [0, 1]) == []
    (meeting,) = directory.since(5)
    assert meeting.epoch == 7
    assert [one.position for one in meeting.peers] == [7, 7]


def test_a_worker_that_parts_from_a_new_directory_is_not_waited_for() -> None:
    directory = Directory()
    directory.part(1, 2)
    assert directory.has_parted(2)
    directory.arrive(peer(0), 5, [0])
    assert directory.arrive(peer(0), directory.epoch, [0]) == []


def test_a_worker_that_stays_parts_once_no_other_is_behind_it() -> None:
    directory = Directory()
    done = replace(peer(0, 8), parts=True, stays=True)

    def meet(last: int) -> list[bool]:
        since = directory.newest
        for one in (done, peer(1, last), done, peer(1, last)):
            directory.arrive(one, directory.epoch, [0, 1], since)
        (meeting,) = directory.since(since)
        return [one.parts for one in meeting.peers]

    assert meet(7) == [False, False]
    assert sorted(directory.peers) == [0, 1]
    epoch = directory.epoch
    directory.arrive(peer(1, 7), epoch, [0, 1], epoch)  # Its question for the answer again.
    assert directory.epoch == epoch
    assert meet(8) == [True, False]
    assert sorted(directory.peers) == [1]
    assert directory.has_parted(done.incarnation)


def test_a_failed_exchange_begins_one_epoch_whoever_reports_it() -> None:
    directory = Directory()
    for _ in range(2):
        for one in (peer(0), peer(1)):
            directory.arrive(one, directory.epoch, [0, 1])
    met = directory.newest
    assert directory.epoch == met
    for rank in (0, 1):  # Both have failed under the same epoch.
        directory.arrive(peer(rank), met, [0, 1], met, again=True)
    assert directory.epoch == met + 1
    for one in (peer(0), peer(1)):
        directory.arrive(one, met + 1, [0, 1], met)
    assert directory.has_met
    assert [meeting.epoch for meeting in directory.since(met)] == [met + 1]


def test_a_meeting_under_way_does_not_wait_for_a_worker_that_starts() -> None:
    directory = Directory()
    for _ in range(2):
        for rank in (0, 1, 2):
            directory.arrive(peer(rank, -1), directory.epoch, [0, 1, 2])
    assert directory.has_met
    directory.keep({0: 1, 1: 2, 2: 30})  # Another worker has joined at rank 2.
    directory.arrive(peer(0), directory.epoch, [0, 1, 2])
    assert directory.arrive(peer(1), directory.epoch, [0, 1, 2]) == []
    new = replace(peer(2, -1), incarnation=30)
    assert directory.arrive(new, directory.epoch, [0, 1, 2]) == [0, 1, 2]


def test_workers_that_all_start_wait_for_each_other_whatever_was_before() -> None:
    directory = Directory()
    for _ in range(2):
        for rank in (0, 1):
            directory.arrive(peer(rank), directory.epoch, [0, 1])
    assert directory.has_met
    directory.keep({})  # All are dead.
    first = replace(peer(0, -1), incarnation=10)
    for _ in range(2):
        assert 1 in directory.arrive(first, directory.epoch, [0, 1])


def test_a_message_about_a_worker_keeps_every_field() -> None:
    whole = pb.Peer(
        rank=1,
        incarnation=1 << 40,
        host="h",
        port=2,
        local="l",
        certificate=b"pem",
        position=3,
        parts=True,
        stays=True,
        secret="s",
    )
    assert {field.name for field, _ in whole.ListFields()} == set(pb.Peer.DESCRIPTOR.fields_by_name)
    assert to_proto(pb.Peer, peer_of(whole)) == whole
