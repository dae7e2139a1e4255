"""Journals in pieces: those that have changed since they were last sent, and where they arrive.

Journals are mapped files, so a piece that is read while workers train may be of two moments. That
does no harm: the last pieces are read when nothing changes any more, and all files are then
compared by their hashes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pscore.errors import RemoteProtocolError
from psserver.durability.sealed import read_json, write_json

PIECE_NBYTES = 1 << 20
NBYTES_MAX = 1 << 48  # Largest size of a file.
PATH = re.compile(r"[\w-]+/\w[\w.-]*", re.ASCII)  # JOB/NAME, with no dots in JOB.
PREPARED, BEGUN = "prepared.json", "begun.json"
TAKEN = "taken.json"  # In the folder of the journals: the move by which they came.
GIVEN = "given.json"  # In the folder of the journals: the shard is another process's.


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPiece:
    """A part of a file."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFile:
    """A file as it is at the end."""

    path: str
    nbytes: int
    digest: int  # XXH3 of its content.


class LeavingJournals:
    """The journals of a shard that moves."""

    def __init__(self, folder: Path) -> None:
        """Sends nothing yet from `folder`."""
        self._folder = folder
        self._sent: dict[tuple[str, int], int] = {}  # XXH3 of each piece, by path and offset.

    def changed(self) -> Iterator[JournalPiece]:
        """Yields the pieces that differ from those that were sent.

        Raises:
            OSError: A file cannot be read.
        """
        for path in self._files():
            name = path.relative_to(self._folder).as_posix()
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError:  # Replaced or deleted just now.
                continue
            with file:
                for offset in range(0, max(1, os.fstat(file.fileno()).st_size), PIECE_NBYTES):
                    data = os.pread(file.fileno(), PIECE_NBYTES, offset)
                    digest = xxhash.xxh3_64_intdigest(data)
                    if self._sent.get((name, offset)) != digest:
                        self._sent[name, offset] = digest
                        yield JournalPiece(path=name, offset=offset, data=data)

    def files(self) -> list[SentFile]:
        """Returns all files; nothing changes them any more.

        Raises:
            OSError: A file cannot be read.
        """
        return [described(path, self._folder) for path in self._files()]

    def _files(self) -> list[Path]:
        found = self._folder.glob("*/*")
        return sorted(path for path in found if path.is_file() and path.suffix != ".draft")


class ArrivingJournals:
    """The place where journals arrive, beside those of the shard."""

    def __init__(self, journals: Path) -> None:
        """Makes nothing yet; `journals` is the folder of the shard's own."""
        self._journals = journals
        self._folder = journals.with_name(f"incoming-{journals.name}")

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
        """Makes an empty place.

        Raises:
            OSError: It cannot be made.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Writes a piece.

        Raises:
            RemoteProtocolError: The path is none of a journal.
            OSError: There is no room.
        """
        if not PATH.fullmatch(path) or offset > NBYTES_MAX:
            raise RemoteProtocolError(f"{path!r} at {offset} is no part of a journal")
        target = self._folder / path
        target.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, offset, max(1, len(data)))  # No SIGBUS where it is mapped.
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def prepare(self, files: list[SentFile], mark: dict[str, object]) -> None:
        """Compares the files with the sender's, and records that they are complete.

        Raises:
            RemoteProtocolError: One differs.
            OSError: One cannot be read, or there is no room.
        """
        wanted = {file.path: file for file in files}
        for path in list(self._folder.glob("*/*")):
            if path.relative_to(self._folder).as_posix() not in wanted:
                path.unlink()
        for name, file in wanted.items():
            if not PATH.fullmatch(name) or file.nbytes > NBYTES_MAX:
                raise RemoteProtocolError(
                    f"{name!r} of {file.nbytes} bytes is no file of a journal"
                )
            os.truncate(self._folder / name, file.nbytes)
            if described(self._folder / name, self._folder) != file:
                raise RemoteProtocolError(f"{name} did not arrive as it was sent")
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
        (self._journals / GIVEN).unlink(missing_ok=True)  # The shard has come back.
        for path in self._folder.glob("*/"):
            shutil.rmtree(self._journals / path.name, ignore_errors=True)
            path.rename(self._journals / path.name)
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


def described(path: Path, folder: Path) -> SentFile:
    """Returns a file below a folder with its hash.

    Raises:
        OSError: It cannot be read.
    """
    total, nbytes = xxhash.xxh3_64(), 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(PIECE_NBYTES):
            total.update(data)
            nbytes += len(data)
    name = path.relative_to(folder).as_posix()
    return SentFile(path=name, nbytes=nbytes, digest=total.intdigest())
