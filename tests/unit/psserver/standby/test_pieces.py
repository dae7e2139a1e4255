"""Pieces arrive as they were sent, and begin as the journals of the shard."""

from pathlib import Path

import pytest

from pscore.errors import RemoteProtocolError
from psserver.durability.sealed import write_json
from psserver.standby.pieces import GIVEN, ArrivingJournals, SentSpan
from psserver.standby.spans import (
    PIECE_NBYTES,
    JournalPiece,
    Span,
    SpanReader,
    digest_of_span,
    read_small,
)

MARK: dict[str, object] = {"id": "m", "instance": 7}
ARENA = Span(path="0001-a/arena", offset=5, nbytes=2 * PIECE_NBYTES)


def put(incoming: ArrivingJournals, pieces: list[JournalPiece]) -> list[JournalPiece]:
    for piece in pieces:
        incoming.write(piece)
    return pieces


def sent(folder: Path, *spans: Span) -> list[SentSpan]:
    return [SentSpan(span=span, digest=digest_of_span(folder, span)) for span in spans]


def test_changed_pieces_are_sent_and_the_copy_begins_as_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "0001-a").mkdir(parents=True)
    arena, small = source / "0001-a" / "arena", source / "0001-a" / "job.json"
    arena.write_bytes(bytes(3 * PIECE_NBYTES))
    small.write_text("first and longer")
    incoming, reader = ArrivingJournals(target), SpanReader(source)
    incoming.start()
    assert len(put(incoming, list(reader.changed([ARENA])))) == 2
    assert list(reader.changed([ARENA])) == []
    found = tmp_path / "incoming-target" / "0001-a"
    assert (found / "arena").stat().st_size == 3 * PIECE_NBYTES  # Also what is not sent.
    with arena.open("r+b") as file:
        file.seek(PIECE_NBYTES + 6)
        file.write(b"x")
    assert [piece.offset for piece in put(incoming, list(reader.changed([ARENA])))] == [
        PIECE_NBYTES + 5
    ]
    for text in ("first and longer", "second"):
        small.write_text(text)
        piece = read_small(source, small)
        assert piece is not None
        incoming.write(piece)
        assert (found / "job.json").read_text() == text
    (found / "residuals").write_bytes(b"not named in the end")
    job = Span(path="0001-a/job.json", offset=0, nbytes=6)
    incoming.prepare(sent(source, ARENA, job), MARK)
    assert ArrivingJournals(target).prepared == MARK
    assert incoming.begin() is None  # Nobody has decided that.
    incoming.note_begun()
    assert ArrivingJournals(target).begin() == MARK
    assert ArrivingJournals(target).begin() == MARK  # Again, after a kill.
    assert (target / "0001-a" / "arena").read_bytes() == arena.read_bytes()
    assert sorted(path.name for path in (target / "0001-a").iterdir()) == ["arena", "job.json"]
    incoming.remove()
    assert (incoming.prepared, incoming.taken) == ({}, MARK)


def test_a_shard_that_comes_back_brings_no_job_that_has_ended_elsewhere(tmp_path: Path) -> None:
    own = tmp_path / "journals" / "shard-0-of-1"
    (own / "1-ended").mkdir(parents=True)
    write_json(own / GIVEN, MARK)
    incoming = ArrivingJournals(own)
    incoming.start()
    incoming.write(JournalPiece(path="2-other/job.json", data=b"{}", size=2))
    incoming.complete(MARK)
    incoming.note_begun()
    for _ in range(2):  # Again, after a kill.
        assert ArrivingJournals(own).begin() == MARK
        assert [path.name for path in own.glob("*/")] == ["2-other"]


def test_a_file_and_a_job_that_are_gone_are_deleted(tmp_path: Path) -> None:
    incoming = ArrivingJournals(tmp_path / "target")
    incoming.start()
    for name in ("job.json", "residuals"):
        incoming.write(JournalPiece(path=f"1-a/{name}", data=b"x", size=1))
    gone = read_small(tmp_path, tmp_path / "1-a" / "residuals")
    assert gone is not None
    incoming.write(gone)
    assert [path.name for path in tmp_path.glob("*/1-a/*")] == ["job.json"]
    (tmp_path / "2-a").mkdir()
    assert read_small(tmp_path, tmp_path / "2-a") is None
    incoming.write(JournalPiece(path="1-a", is_gone=True))
    assert list(tmp_path.glob("*/1-a")) == []


def test_a_copy_that_differs_and_a_path_outside_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "0001-a").mkdir(parents=True)
    (source / "0001-a" / "arena").write_bytes(b"1234")
    span = Span(path="0001-a/arena", offset=0, nbytes=4)
    incoming = ArrivingJournals(tmp_path / "target")
    incoming.start()
    put(incoming, list(SpanReader(source).changed([span])))
    incoming.write(JournalPiece(path="0001-a/arena", data=b"5", size=4))
    with pytest.raises(RemoteProtocolError, match="did not arrive"):
        incoming.prepare(sent(source, span), MARK)
    assert incoming.prepared == {}
    for path in ("../arena", "a/../b", "a/b/c", "arena", "/a/b", "./x", "a/.."):
        with pytest.raises(RemoteProtocolError, match="no part of a journal"):
            incoming.write(JournalPiece(path=path))
    for path in ("..", "a/../b", "/"):
        with pytest.raises(RemoteProtocolError, match="no part of a journal"):
            incoming.write(JournalPiece(path=path, is_gone=True))
    for wrong in (
        JournalPiece(path="a/b", offset=1 << 63, size=1 << 63),
        JournalPiece(path="a/b", data=b"12", size=1),
        JournalPiece(path="a/b", size=1, reserved=2),
    ):
        with pytest.raises(RemoteProtocolError, match="no part of a journal"):
            incoming.write(wrong)
