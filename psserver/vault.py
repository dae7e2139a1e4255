"""The vault: the folder in which a shard keeps what outlives its process.

    stamp.json          the boot of the machine, and the number that this shard has for its workers
    lock                held by the process that uses the folder
    JOB/job.json        who takes part, and who waits at which barrier
    JOB/arena           the arrays of all tables, and the record of each slice (journal.py)
    JOB/0.json          declaration of table 0, and where its slices' roots lie in the arena
    JOB/0.weights       its weights, as workers of this host map them
    JOB/owed            what workers have not claimed yet of a checkpoint's residuals

What is in memory-mapped files is complete after the death of a process, whatever it was doing, but
not after that of the machine: a folder of an earlier boot is emptied.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pscore.boot import boot_id
from pscore.descriptor import Descriptor
from pscore.segment import Segment
from pscore.types import FloatArray
from psserver.arena import Arena

log = structlog.get_logger()
FORMAT = 1
STAMP, LOCK, JOB, ARENA, OWED = "stamp.json", "lock", "job.json", "arena", "owed"
SHM = Path("/dev/shm")

Meta = dict[str, Any]


class JobVault:
    """What is kept of one job."""

    def __init__(self, folder: Path) -> None:
        """Opens or makes the folder.

        Raises:
            OSError: It cannot be made, or the disk is full.
            ValueError: What is there cannot be read.
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self.arena = Arena(folder / ARENA)
        self._noted: Meta | None = None  # What `write_job` wrote last.

    def weights(self, table: int, nbytes: int) -> Segment:
        """Returns the segment for a table's weights, made if it is not there.

        Raises:
            OSError: There is no room for it.
        """
        return Segment.at(self.folder / f"{table}.weights", nbytes)

    def write_table(self, table: int, meta: Meta) -> None:
        """Notes a table, once all of it is there.

        Raises:
            OSError: The disk is full.
        """
        _write(self.folder / f"{table}.json", meta)

    def write_job(self, meta: Meta) -> None:
        """Notes who takes part; what is there already is not written again.

        Raises:
            OSError: The disk is full; what was noted before is still there.
        """
        if meta != self._noted:
            _write(self.folder / JOB, meta)
            self._noted = meta

    def read_job(self) -> Meta:
        """Returns what `write_job` wrote.

        Raises:
            ValueError: It cannot be read.
            OSError: It is not there.
        """
        return _read(self.folder / JOB)

    def read_tables(self) -> list[Meta]:
        """Returns what `write_table` wrote, in the order of the tables.

        One that the process was killed over is not there: no worker has been told of it.

        Raises:
            ValueError: One cannot be read.
        """
        tables: list[Meta] = []
        while (path := self.folder / f"{len(tables)}.json").exists():
            tables.append(_read(path))
        return tables

    def write_owed(self, arrays: Mapping[str, FloatArray]) -> None:
        """Notes what workers have still to claim; with nothing of it, none is kept.

        Raises:
            OSError: The disk is full.
        """
        path = self.folder / OWED
        if not arrays:
            path.unlink(missing_ok=True)
            return
        draft = path.with_suffix(".draft")
        try:
            save_file(dict(arrays), draft)
        except SafetensorError as problem:
            raise OSError(str(problem)) from problem
        draft.replace(path)

    def read_owed(self) -> dict[str, FloatArray]:
        """Returns what `write_owed` wrote.

        Raises:
            ValueError: It cannot be read.
        """
        path = self.folder / OWED
        try:
            return load_file(path) if path.exists() else {}
        except SafetensorError as problem:
            raise ValueError(f"{path}: {problem}") from problem

    def remove(self) -> None:
        """Deletes all of it."""
        self.arena.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Lock(Descriptor):
    """Keeps other processes out of a folder, for as long as this one lives."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            BlockingIOError: Another process has it.
        """
        super().__init__(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise


class Vault:
    """What is kept of one shard.

    Attributes:
        instance: The number under which workers know this shard: the same as before for a process
            that goes on where another one was killed.
    """

    def __init__(self, folder: Path) -> None:
        """Opens or makes the folder, and keeps other processes from using it.

        Raises:
            OSError: It cannot be made, or another process uses it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._lock = Lock(folder)
        self.instance = secrets.randbits(63)
        stamp: Mapping[str, object] = {}
        with contextlib.suppress(OSError, ValueError):
            stamp = _read(folder / STAMP)
        if stamp.get("boot") == boot_id() and stamp.get("format") == FORMAT:
            self.instance = int(str(stamp["instance"]))
        else:
            self._empty()
            self._write_stamp()

    def make(self) -> JobVault:
        """Returns a place for a new job.

        Raises:
            OSError: It cannot be made.
        """
        names = [folder.name.partition("-")[0] for folder in self.folder.glob("*/")]
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        # Counted, and not the time: a clock may be set back.
        return JobVault(self.folder / f"{newest + 1:020d}-{secrets.token_hex(4)}")

    def found(self) -> Iterator[JobVault]:
        """Opens what a former process has left, the newest job first."""
        for folder in sorted(self.folder.glob("*/"), reverse=True):
            try:
                yield JobVault(folder)
            except (OSError, ValueError) as problem:
                self.drop(folder, problem)

    def drop(self, folder: Path, problem: Exception) -> None:
        """Leaves out a job that cannot be taken up; its workers will know by the instance."""
        log.error("a job's journal cannot be read", path=str(folder), reason=str(problem))
        shutil.rmtree(folder, ignore_errors=True)
        self.instance = secrets.randbits(63)
        self._write_stamp()

    def close(self) -> None:
        """Lets another process use the folder."""
        self._lock.close()

    def remove(self) -> None:
        """Deletes the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _empty(self) -> None:
        for folder in self.folder.glob("*/"):
            shutil.rmtree(folder, ignore_errors=True)

    def _write_stamp(self) -> None:
        stamp = {"format": FORMAT, "boot": boot_id(), "instance": self.instance}
        _write(self.folder / STAMP, stamp)


class ShortLived:
    """A folder in memory for the journals of one start; gone with its last process.

    What others have left that were all killed at once is deleted on the way.

    Attributes:
        path: The folder, or None if there is no place for it.
    """

    def __init__(self, name: str) -> None:
        """Makes the folder `name`, private to this user."""
        self.path: Path | None = None
        base = (SHM if os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())) / (
            f"paceline-{os.geteuid()}"
        )
        try:
            base.mkdir(mode=0o700, exist_ok=True)
            found = base.stat(follow_symlinks=False)
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
                raise PermissionError(f"{base} belongs to somebody else")
            _sweep(base)
            folder = base / name
            folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = Lock(folder)
            self.path = folder
        except OSError as problem:
            log.warning("no journals: a killed shard would lose its weights", reason=str(problem))

    def remove(self) -> None:
        """Deletes the folder."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Deletes the folders whose owner is gone."""
    for folder in base.glob("*/"):
        if (folder / LOCK).exists():  # Else it is just being made.
            with contextlib.suppress(OSError):
                Lock(folder).close()
                shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> Meta:
    meta = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(meta, dict):
        raise ValueError(f"{path} is not a JSON object")
    return meta


def _write(path: Path, meta: Mapping[str, object]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(meta), encoding="utf-8")
    os.replace(draft, path)
