"""The place where the journals of another process arrive, piece by piece."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pscore.errors import RemoteProtocolError
from psserver.durability.sealed import read_json, write_json
from psserver.standby.spans import BLOCK_NBYTES, JournalPiece, Span, digest_of_span

NBYTES_MAX = 1 << 48  # Largest size of a file.
JOB = re.compile(r"[\w-]+", re.ASCII)
PATH = re.compile(r"[\w-]+/\w[\w.-]*", re.ASCII)  # JOB/NAME, with no dots in JOB.
PREPARED, BEGUN = "prepared.json", "begun.json"
TAKEN = "taken.json"  # In the folder of the journals: the move by which they came.
STANDBY = "standby.json"  # In the folder of the journals: another process follows the shard.
REGISTER = "register.json"  # In the folder of the journals: the process's name in a register.
GIVEN = "given.json"  # In the folder of the journals: the shard is another process's.


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSpan:
    """A part of a file as it is at the end."""

    span: Span
    digest: int  # XXH3 of its content.


class ArrivingJournals:
    """The place where journals arrive, beside those of the shard."""

    def __init__(self, journals: Path) -> None:
        """Makes nothing yet; `journals` is the folder of the shard's own."""
        self._journals = journals
        self._folder = journals.with_name(f"incoming-{journals.name}")

    @property
    def shard(self) -> str:
        """The shard's name, which is that of the folder of its journals."""
        return self._journals.name

    @property
    def prepared(self) -> dict[str, object]:
        """The mark of a complete move that has not begun; empty without one."""
        path = self._folder / PREPARED
        return read_json(path) if path.exists() else {}

    @property
    def taken(self) -> dict[str, object]:
        """The mark of the last move that has begun; empty without one."""
        path = self._journals / TAKEN
        return read_json(path) if path.exists() else {}

    def start(self) -> None:
        """Makes an empty place; raises OSError if it cannot."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)

    def write(self, piece: JournalPiece) -> None:
        """Writes a piece, or deletes a file or a job that is gone.

        Raises:
            RemoteProtocolError: The path is none of a journal.
            OSError: There is no room.
        """
        path = self._folder / piece.path
        if piece.is_gone and (JOB.fullmatch(piece.path) or PATH.fullmatch(piece.path)):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            return
        if not PATH.fullmatch(piece.path) or not _is_possible(piece):
            raise RemoteProtocolError(f"{piece.path!r} at {piece.offset} is no part of a journal")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(fd)
            if found.st_size != piece.size:
                os.ftruncate(fd, piece.size)
            if found.st_blocks * BLOCK_NBYTES < piece.reserved:
                os.posix_fallocate(fd, 0, piece.reserved)  # No SIGBUS where it is mapped.
            os.pwrite(fd, piece.data, piece.offset)
        finally:
            os.close(fd)

    def prepare(self, spans: list[SentSpan], mark: dict[str, object]) -> None:
        """Compares the files with the sender's, and records that they are complete.

        Raises:
            RemoteProtocolError: One differs.
            OSError: One cannot be read, or there is no room.
        """
        wanted = {sent.span.path for sent in spans}
        for path in list(self._folder.glob("*/*")):
            if path.relative_to(self._folder).as_posix() not in wanted:
                path.unlink()
        for sent in spans:
            span = sent.span
            if not PATH.fullmatch(span.path) or max(span.offset, span.nbytes) > NBYTES_MAX:
                raise RemoteProtocolError(f"{span.path!r} at {span.offset} is no part of a journal")
            if digest_of_span(self._folder, span) != sent.digest:
                raise RemoteProtocolError(f"{span.path} did not arrive as it was sent")
        self.complete(mark)

    def complete(self, mark: dict[str, object]) -> None:
        """Records that the journals are complete, as a standby has them.

        Raises:
            OSError: There is no room.
        """
        write_json(self._folder / PREPARED, mark)

    def begin(self) -> dict[str, object] | None:
        """Makes the journals those of the shard, again after a kill in the middle of it.

        Returns:
            The mark of the move; None if there is none that has begun.

        Raises:
            OSError: They cannot be moved.
        """
        if not (self._folder / BEGUN).exists():
            return None
        mark = self.prepared
        self._journals.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (self._journals / GIVEN).exists():  # Jobs left here then may be over elsewhere.
            for path in self._journals.glob("*/"):
                shutil.rmtree(path)
        for name in (GIVEN, STANDBY):
            (self._journals / name).unlink(missing_ok=True)  # The shard has come back.
        for path in self._folder.glob("*/"):
            shutil.rmtree(self._journals / path.name, ignore_errors=True)
            path.rename(self._journals / path.name)
        if place := mark.get("register"):
            own = {"register": place, "holder": mark["id"], "epoch": mark.get("epoch", 0)}
            write_json(self._journals / REGISTER, own)
        else:
            (self._journals / REGISTER).unlink(missing_ok=True)
        write_json(self._journals / TAKEN, mark)
        return mark

    def note_begun(self) -> None:
        """Records that the journals are the shard's from now on.

        Raises:
            OSError: There is no room.
        """
        write_json(self._folder / BEGUN, {})

    def remove(self) -> None:
        """Deletes what is left of the place."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_possible(piece: JournalPiece) -> bool:
    """Returns whether the piece lies in its file."""
    end = piece.offset + len(piece.data)
    return end <= piece.size <= NBYTES_MAX and piece.reserved <= piece.size
