"""The journals: the folder with the data of a shard that outlives its process.

    stamp.json          the boot of the machine, and the number that this shard has for its workers
    lock                held by the process that uses the folder
    closed.json         there only between an orderly end and the next start: all is on the disk
    JOB/job.json        members, waits at barriers, number of tables
    JOB/arena           the arrays of all tables, and the record of each slice (journal.py)
    JOB/0.json          declaration of table 0, and where its slices' roots lie in the arena
    JOB/0.weights       its weights, as workers of this host map them
    JOB/residuals       residuals of a checkpoint that workers have not fetched yet
    JOB/published.json  what readers get of it, and since when
    JOB/lost.json       why only the name of the job is left

JOB is a number, larger than those of the jobs before it, and a digest of its name. Each file has a
check that it is whole and of this journal (sealed.py). Memory-mapped files are complete after the
death of a process at any moment, but not after a crash of the machine. So another boot, or another
machine that gets the folder, uses them only after an orderly end (`seal`). Otherwise only the name
of a job is kept, and it does not start from zero unnoticed. A journal that cannot be used stays
where it is, until the job is restored or forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from safetensors import SafetensorError
from safetensors.numpy import load, save

from pscore.errors import ConfigError
from pscore.json_text import count_of
from pscore.memory.descriptor import Descriptor
from pscore.observe.boot import boot_id
from pscore.types import FloatArray
from psserver.decisions.lifetime import digest
from psserver.durability.records import RANDOM_MAX, sync
from psserver.durability.sealed import (
    Meta,
    WeightsFile,
    read_bytes,
    read_json,
    write_bytes,
    write_json,
)
from psserver.slices.arena import Arena

log = structlog.get_logger()
FORMAT = 3
STAMP, LOCK, CLOSED, JOB, ARENA, RESIDUALS, PUBLISHED, LOST = (
    "stamp.json", "lock", "closed.json", "job.json", "arena", "residuals", "published.json",
    "lost.json",
)  # fmt: skip
SHM = Path("/dev/shm")
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
BLOCK_NBYTES = 512  # Unit of `st_blocks`, on every file system.


def ignore(path: Path) -> None:
    """Notes nothing."""


class JobJournal:
    """The journal of one job."""

    def __init__(
        self, folder: Path, noted: Callable[[Path], None] = ignore, *, is_new: bool = False
    ) -> None:
        """Makes the folder, or opens that of a former process.

        Args:
            noted: Called with each small file that was written or deleted.
            is_new: Whether the folder is made.

        Raises:
            OSError: It cannot be made, the disk is full, or something is not there.
            ValueError: A file is damaged, or only the name of the job is left.
        """
        self.folder = folder
        self._note = noted
        self._noted: Meta | None = None  # Last argument of `write_job`.
        if is_new:
            folder.mkdir(mode=0o700)
            self.seal = secrets.randbits(63)
            self.arena = Arena(folder / ARENA, self.seal)
            return
        if (folder / LOST).exists():
            raise ValueError(str(read_json(folder / LOST)["reason"]))
        self.seal = count_of(self.read_job()["seal"], "the seal of the journal", most=RANDOM_MAX)
        self.arena = Arena(folder / ARENA)
        if self.arena.seal != self.seal:
            raise ValueError(f"{self.arena.path} is not the arena of this journal")

    def make_weights(self, table: int, nbytes: int, num_slices: int) -> WeightsFile:
        """Returns a new file for a table's weights; raises OSError if there is no room for it."""
        return WeightsFile(self._weights(table), nbytes, num_slices, self.seal, is_new=True)

    def open_weights(self, table: int, nbytes: int, num_slices: int) -> WeightsFile:
        """Returns the file of a table's weights.

        Raises:
            OSError: It is not there.
            ValueError: It is not whole, or of another job.
        """
        return WeightsFile(self._weights(table), nbytes, num_slices, self.seal, is_new=False)

    def _weights(self, table: int) -> Path:
        return self.folder / f"{table}.weights"

    def write_table(self, table: int, meta: Meta) -> None:
        """Records a table, once all its files are there; raises OSError if the disk is full."""
        write_json(self.folder / f"{table}.json", meta)
        self._note(self.folder / f"{table}.json")

    def write_job(self, meta: Meta) -> None:
        """Records the members of the job; an unchanged record is not written again.

        Raises:
            OSError: The disk is full; the former record is still there.
        """
        if meta != self._noted:
            write_json(self.folder / JOB, {**meta, "seal": self.seal})
            self._noted = meta
            self._note(self.folder / JOB)

    def read_job(self) -> Meta:
        """Returns the record of `write_job`.

        Raises:
            ValueError: It is damaged.
            OSError: It is not there.
        """
        return read_json(self.folder / JOB)

    def read_tables(self, count: int) -> dict[int, Meta]:
        """Returns the records of `write_table` by the numbers of the tables, the lowest first.

        Args:
            count: How many there are at least. One more may be there that `write_job` has not
                counted, because the process was killed then.

        Raises:
            ValueError: One is damaged, or not there.
            OSError: One cannot be read.
        """
        numbers = sorted(int(path.stem) for path in self.folder.glob("[0-9]*.json"))
        if len(numbers) < count:
            raise ValueError(f"records of {len(numbers)} tables are there, and it had {count}")
        return {number: read_json(self.folder / f"{number}.json") for number in numbers}

    def write_residuals(self, arrays: Mapping[str, FloatArray]) -> None:
        """Records the residuals that workers have not fetched yet; none: deletes the file.

        Raises:
            OSError: The disk is full.
        """
        if arrays:
            write_bytes(self.folder / RESIDUALS, save(dict(arrays)))
        else:
            (self.folder / RESIDUALS).unlink(missing_ok=True)
        self._note(self.folder / RESIDUALS)

    def read_residuals(self) -> dict[str, FloatArray]:
        """Returns the arrays of `write_residuals`; raises ValueError if they are damaged."""
        try:
            return load(read_bytes(self.folder / RESIDUALS))
        except FileNotFoundError:
            return {}
        except (SafetensorError, OSError) as problem:
            raise ValueError(f"{self.folder / RESIDUALS}: {problem}") from problem

    def write_published(self, meta: Meta) -> None:
        """Records what is published of the job; raises OSError if the disk is full."""
        write_json(self.folder / PUBLISHED, meta)
        self._note(self.folder / PUBLISHED)

    def read_published(self) -> Meta:
        """Returns the record of `write_published`; nothing if there is none that is whole."""
        with contextlib.suppress(OSError, ValueError):
            return read_json(self.folder / PUBLISHED)
        return {}

    def remove(self) -> None:
        """Deletes the journal."""
        self.arena.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._note(self.folder)


class Lock(Descriptor):
    """Keeps other processes out, by a file, for as long as this one lives."""

    def __init__(self, path: Path) -> None:
        """Acquires the lock; raises BlockingIOError if another process has it."""
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise


def lock_folder(path: Path, busy: str) -> Lock | None:
    """Keeps other processes out of a folder; returns None on a file system without locks.

    Args:
        path: File of the lock, in the folder.
        busy: Text of the error if another process has it.

    Raises:
        BlockingIOError: Another process has it.
        OSError: The file cannot be opened.
    """
    try:
        return Lock(path)
    except BlockingIOError as problem:
        raise BlockingIOError(problem.errno, busy) from problem
    except OSError as problem:
        if problem.errno in WITHOUT_LOCKS:
            return None
        raise OSError(
            problem.errno, f"cannot open the lock {path}, without which two could write there"
        ) from problem


class JournalDir:
    """The journals of one shard.

    Attributes:
        instance: The number under which workers know this shard: the same as before for a process
            that resumes from the journals of another one.
        num_recoveries: Number of processes of this shard that have resumed jobs, in this boot.
        on_change: Called with each small file of a job, or folder of one, that was written or
            deleted; under the engine's lock.
    """

    def __init__(self, folder: Path) -> None:
        """Opens or makes the folder, and keeps other processes from using it.

        Raises:
            OSError: It cannot be made, or another process uses it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.on_change: Callable[[Path], None] = ignore
        self._lock = Lock(folder / LOCK)
        self.instance = secrets.randbits(63)
        self.num_recoveries = 0
        stamp: Meta = {}
        with contextlib.suppress(OSError, ValueError):
            stamp = read_json(folder / STAMP)
        known, recoveries = _instance_of(stamp), stamp.get("recoveries")
        if (found := _format_of(folder / STAMP)) is not None and found != FORMAT:
            log.error("journals of another format are left untouched", folder=str(folder))
        elif known is not None and stamp.get("boot") == boot_id():
            self.instance = known
            with contextlib.suppress(ConfigError):
                self.num_recoveries = count_of(recoveries, "a number of recoveries")
            self._unseal()
            return
        elif known is not None and self._sealed() == known:
            self.instance = known
            log.info("journals of another boot, which ended in order", folder=str(folder))
            self._try_stamp()
            self._unseal()  # Last: until then the next start finds the same.
            return
        else:
            self._empty()
            self._unseal()
        self._try_stamp()

    def make(self, name: str) -> JobJournal:
        """Returns the journal of a new job; a former one of its name is deleted.

        Raises:
            OSError: It cannot be made.
        """
        if not (self.folder / STAMP).exists():
            self._write_stamp()  # Without it the journal would be ignored.
        self.remove_job(name)
        numbers = [folder.name.partition("-")[0] for folder in self.folder.glob("*/")]
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
        # Counted, and not the time: a clock may be set back.
        folder = self.folder / f"{newest + 1:020d}-{digest(name)}"
        try:
            return JobJournal(folder, self.note, is_new=True)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def note(self, path: Path) -> None:
        """Calls `on_change`."""
        self.on_change(path)

    def note_recovered(self) -> None:
        """Counts a process that has resumed jobs."""
        self.num_recoveries += 1
        self._try_stamp()

    def adopt(self, instance: int) -> None:
        """Continues as the shard with this instance, whose journals have been moved here.

        Raises:
            OSError: That cannot be recorded.
        """
        self.instance = instance
        self._write_stamp()

    def nbytes(self) -> int:
        """Returns the bytes of all files in the folder, without the holes in them."""
        total = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(OSError):  # It has just been deleted.
                    total += BLOCK_NBYTES * os.lstat(os.path.join(folder, name)).st_blocks
        return total

    def found(self) -> list[Path]:
        """Returns the folders of the jobs that a former process has left, the newest first."""
        return sorted(self.folder.glob("*/"), reverse=True)

    def give_up(self, folder: Path, problem: Exception) -> tuple[str, str, str]:
        """Skips a job that cannot be resumed; the new instance reports that to its workers.

        Returns:
            A digest of its name, its name or else the digest, and the reason; the reason is empty
            if nothing is lost with it.
        """
        name, is_worth_it = name_of(folder), _is_worth_it(folder)
        log.error(
            "the journal of a job cannot be used",
            job=name or "unknown",
            path=str(folder),
            reason=str(problem),
            is_lost=is_worth_it,
        )
        if not is_worth_it:
            shutil.rmtree(folder, ignore_errors=True)
        self.instance = secrets.randbits(63)
        self._try_stamp()
        key = digest(name) if name else folder.name.rpartition("-")[2]
        reason = str(problem) if (folder / LOST).exists() else f"{problem} ({folder})"
        return key, name or key, reason if is_worth_it else ""

    def remove_job(self, name: str) -> None:
        """Deletes the journal of a job, also of one that was given up."""
        for folder in self.found():
            if folder.name.endswith(f"-{digest(name)}") or name_of(folder) == name:
                self.remove_folder(folder)

    def remove_folder(self, folder: Path) -> None:
        """Deletes the journal in one folder."""
        shutil.rmtree(folder, ignore_errors=True)
        self.note(folder)

    def seal(self) -> None:
        """Writes everything to the disk, and marks it as whole: another boot may use it too.

        Nothing may change the journals from the call on.

        Raises:
            OSError: The disk is full or fails; the journals are those of this boot only.
        """
        for folder, _, names in os.walk(self.folder, topdown=False):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))
        write_json(self.folder / CLOSED, {"instance": self.instance})
        sync(self.folder / CLOSED)
        sync(self.folder)

    def _sealed(self) -> int | None:
        """Returns the instance that has sealed the journals; None: they are not sealed."""
        with contextlib.suppress(OSError, ValueError):
            return _instance_of(read_json(self.folder / CLOSED))
        return None

    def _unseal(self) -> None:
        """Removes the mark, on the disk too, before the journals change.

        Raises:
            OSError: It cannot be removed.
        """
        if (self.folder / CLOSED).exists():
            (self.folder / CLOSED).unlink()
            sync(self.folder)

    def close(self) -> None:
        """Releases the folder for another process."""
        self._lock.close()

    def remove(self) -> None:
        """Deletes the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _empty(self) -> None:
        """Deletes the journals of another boot, but not the names of their jobs."""
        for folder in self.folder.glob("*/"):
            if not _is_worth_it(folder):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            reason = "the machine has been restarted since; a journal does not survive that"
            with contextlib.suppress(OSError):
                if not (folder / LOST).exists():
                    write_json(folder / LOST, {"reason": reason})
            for path in folder.glob("*"):
                if path.name not in (JOB, LOST):
                    path.unlink(missing_ok=True)

    def _write_stamp(self) -> None:
        stamp = {
            "format": FORMAT,
            "boot": boot_id(),
            "instance": self.instance,
            "recoveries": self.num_recoveries,
        }
        write_json(self.folder / STAMP, stamp)

    def _try_stamp(self) -> None:
        """Writes the stamp; on a full disk the former one stays, with the former instance."""
        try:
            self._write_stamp()
        except OSError as problem:
            log.error("the stamp of the journals cannot be written", reason=str(problem))


def _instance_of(meta: Meta) -> int | None:
    """Returns the instance in a file; None if it names none that a message can hold."""
    with contextlib.suppress(ConfigError):
        return count_of(meta.get("instance"), "an instance", most=RANDOM_MAX)
    return None


def _format_of(stamp: Path) -> int | None:
    """Returns the format that a stamp names, also in another layout; None if it names none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        whole = json.loads(stamp.read_bytes())
        for meta in (whole, whole.get("meta") if isinstance(whole, dict) else None):
            if isinstance(meta, dict) and isinstance(meta.get("format"), int):
                return int(meta["format"])
    return None


def name_of(folder: Path) -> str:
    """Returns the name of a job by its folder, also where the file has another format or hash."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        whole = json.loads((folder / JOB).read_bytes())
        for meta in (whole, whole.get("meta") if isinstance(whole, dict) else None):
            if isinstance(meta, dict) and isinstance(meta.get("name"), str):
                return str(meta["name"])
    return ""


def _is_worth_it(folder: Path) -> bool:
    """Whether something would be lost with a job: it had slices, and is not known to have ended."""
    if (folder / LOST).exists():
        return True
    with contextlib.suppress(OSError, ValueError, KeyError):
        meta, tables = read_json(folder / JOB), list(folder.glob("[0-9]*.json"))
        are_there = meta["num_tables"] in (len(tables), len(tables) - 1)  # It may count one less.
        return not meta["ended"] and (not are_there or any(map(_may_have_slices, tables)))
    return any(folder.glob("*.weights")) or any(folder.glob("[0-9]*.json"))


def _may_have_slices(table: Path) -> bool:
    """Returns whether slices of a table lie on this shard, or its record cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return bool(read_json(table)["roots"])
    return True


class TemporaryJournalDir:
    """A folder in memory for the journals of one start; gone with its last process.

    Folders of former starts whose processes were all killed are deleted too.
    """

    def __init__(self, name: str) -> None:
        """Makes the folder `name`, private to this user."""
        self.path: Path | None = None  # The folder, or None if there is no place for it.
        base = (SHM if os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())) / (
            f"paceline-{os.geteuid()}"
        )
        try:
            base.mkdir(mode=0o700, exist_ok=True)
            found = base.stat(follow_symlinks=False)
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
                raise PermissionError(f"{base} belongs to another user")
            _sweep(base)
            folder = base / name
            folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = Lock(folder / LOCK)
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
                Lock(folder / LOCK).close()
                shutil.rmtree(folder, ignore_errors=True)
