"""Journals in pieces: only what has changed is sent, and the copy is the same to the bit."""

from pathlib import Path

import pytest

from pscore.errors import RemoteProtocolError
from psserver.standby.pieces import PIECE_NBYTES, ArrivingJournals, JournalPiece, LeavingJournals

MARK: dict[str, object] = {"id": "m", "instance": 7}


def put(incoming: ArrivingJournals, outgoing: LeavingJournals) -> list[JournalPiece]:
    pieces = list(outgoing.changed())
    for piece in pieces:
        incoming.write(piece.path, piece.offset, piece.data)
    return pieces


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*")}


def test_changed_pieces_are_sent_and_the_copy_begins_as_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "0001-a").mkdir(parents=True)
    (source / "stamp.json").write_text("not sent")
    arena, small = source / "0001-a" / "arena", source / "0001-a" / "job.json"
    arena.write_bytes(bytes(3 * PIECE_NBYTES + 5))
    small.write_text("first and longer")
    (source / "0001-a" / "residuals").write_bytes(b"gone later")
    outgoing, incoming = LeavingJournals(source), ArrivingJournals(target)
    incoming.start()
    assert len(put(incoming, outgoing)) == 6
    assert put(incoming, outgoing) == []
    with arena.open("r+b") as file:
        file.seek(PIECE_NBYTES + 3)
        file.write(b"x")
    small.write_text("second")
    (source / "0001-a" / "residuals").unlink()
    assert [piece.offset for piece in put(incoming, outgoing)] == [PIECE_NBYTES, 0]
    incoming.prepare(outgoing.files(), MARK)
    assert ArrivingJournals(target).prepared == MARK
    assert incoming.begin() is None  # Nobody has decided that.
    incoming.note_begun()
    assert ArrivingJournals(target).begin() == MARK
    assert ArrivingJournals(target).begin() == MARK  # Again, after a kill.
    assert contents(target) == contents(source)
    incoming.remove()
    assert (incoming.prepared, incoming.taken) == ({}, MARK)


def test_a_copy_that_differs_and_a_path_outside_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "0001-a").mkdir(parents=True)
    (source / "0001-a" / "arena").write_bytes(b"1234")
    outgoing, incoming = LeavingJournals(source), ArrivingJournals(tmp_path / "target")
    incoming.start()
    put(incoming, outgoing)
    incoming.write("0001-a/arena", 0, b"5")
    with pytest.raises(RemoteProtocolError, match="did not arrive"):
        incoming.prepare(outgoing.files(), MARK)
    assert incoming.prepared == {}
    for path in ("../arena", "a/../b", "a/b/c", "arena", "/a/b", "./x", "a/.."):
        with pytest.raises(RemoteProtocolError, match="no part of a journal"):
            incoming.write(path, 0, b"")
    with pytest.raises(RemoteProtocolError, match="no part of a journal"):
        incoming.write("a/b", 1 << 63, b"")
