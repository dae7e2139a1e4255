"""Checkpoints as files: written so that a kill at any moment leaves a good one, verified when read.

    DIR/mnist-00000012/
        manifest.json                   job, sequence, mode, optimizer, tensors, versions, hashes
        model.safetensors               the weights, by the tensors' names
        momentum_buffer.safetensors     the optimizer's state, one file for each array, likewise
        weights_backup.0.safetensors    what the mode remembers (dcasgd), likewise
        worker.0.residual.safetensors   residual of worker 0's error feedback, likewise
        table-1.changes-1.safetensors   rows that have changed since those in the files of table 1

Where a table of rows was copied as its changes since the checkpoint before, its files are linked to
that one's, and the changes lie beside them: changes-1 first. So each folder is whole, and one is
written anew only when changes have become many (`_follows`). Such a manifest has format 4.

Checkpoints of one job are ordered by the `sequence` in their manifests: the newest has the largest.
Clocks and steps play no part, since asynchronous jobs have no common step and a job may start over.
The name of a folder is for people and claims its number: jobs and processes may share DIR.

All files are written into a draft folder and synced. Then the folder is renamed to its final name,
which no other writer can have taken, and DIR is synced. Older checkpoints of the same job are
deleted last. So a full disk or a kill leaves those that were there. A draft left by a killed writer
is deleted by the next one: every writer holds a shared lock on DIR/.lock, and drafts are deleted
by a writer that gets this lock alone.

The manifest holds a hash of every file and of itself. A file that differs from it is not read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pscore.commandline import replaceable
from pscore.errors import ConfigError
from pscore.json_text import COUNT_MAX, count_of
from pscore.table_names import GROWN
from pscore.table_spec import TableSpec
from pscore.types import FloatArray
from psserver.archives import archive_of
from psserver.decisions.membership import WORKERS_MAX
from psserver.durability import records
from psserver.exits import CommandError, Exit
from psserver.remote import parquet

FORMAT = 3
FORMAT_CHANGES = 4
CHANGES_MAX, CHANGES_SHARE = 20, 2  # Files, and bytes: a half of those of all rows.
MANIFEST = "manifest.json"
DRAFT = ".draft-"
LOCK = ".lock"
ASIDE = "forgotten"  # In the folder: checkpoints of jobs that are not to be loaded.
SLUG_LENGTH_MAX, SLUG_NBYTES_MAX = 64, 200  # Of a folder's name, without its number.
NAME = re.compile(r"(.*)-(\d{8,})")

Tensors = Mapping[str, FloatArray]
Tell = Callable[[str], None]
# Errors of reading a file of any content.
PROBLEMS = (
    OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError, ConfigError,
    OverflowError, RecursionError,
)  # fmt: skip
ARRAY = re.compile(r"[a-zA-Z0-9_.]+")  # Names of arrays, which are parts of files' names.


@dataclass(slots=True, kw_only=True)
class TableState:
    """One table of a job, whole."""

    spec: TableSpec
    version: int  # Version of all slices; -1 if they have none in common.
    slices: dict[str, Any]  # By index: version, and steps of each worker.
    counts: list[int]  # Optimizer steps of each tensor.
    arrays: Mapping[str, Tensors]  # By array and tensor.
    marks: dict[str, list[int]] = field(default_factory=dict)  # By slice: the mark of the copy.
    base: Written | None = None  # An earlier copy, in files.
    changes: Mapping[str, Tensors] | None = None  # By array: those since.

    @property
    def updates(self) -> tuple[int, int]:
        """The fewest and the most updates that a slice has had."""
        versions = [int(entry["version"]) for entry in self.slices.values()] or [self.version]
        return min(versions), max(versions)

    @property
    def clock(self) -> int:
        """Steps from which workers continue: the newest version, or the furthest worker's steps."""
        if self.spec.rule.by_step:
            return max(self.updates[1], 0)
        return max((int(c) for entry in self.slices.values() for c in entry["clocks"].values()),
                   default=0)  # fmt: skip

    @property
    def position(self) -> str:
        """Where training was, in words."""
        if self.version >= 0 and self.spec.rule.by_step:
            return f"step {self.spec.origin.step or self.version}"
        fewest, most = self.updates
        return f"{fewest} updates" if fewest == most else f"{fewest} to {most} updates"


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A job as it was at one moment."""

    job: str
    num_workers: int
    min_workers: int = 0  # Minimum of an elastic job (`Membership`).
    is_finished: bool = False  # The job had ended.
    tables: list[TableState] = field(default_factory=list)

    @property
    def position(self) -> str:
        """Where training was, in words."""
        return self.tables[0].position if self.tables else "no tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A folder that is, or should be, a checkpoint."""

    path: Path
    job: str | None  # None if the manifest cannot be read.
    sequence: int  # From the manifest, or else from the folder's name; -1 for none.
    manifest: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""  # Why the manifest cannot be read.

    def may_be_of(self, job: str) -> bool:
        """Returns whether this is a checkpoint of a job, judged by its manifest alone."""
        if self.job is not None:
            return self.job == job
        name = NAME.fullmatch(self.path.name)
        return name is not None and name[1] == _slug(job)


# ----- writing


def write(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes a checkpoint below `folder`, then deletes the oldest of its job beyond `keep`.

    Raises:
        OSError: It cannot be written; those that are there stay.
    """
    _make(folder)
    with _writing(folder):
        draft = folder / f"{DRAFT}{secrets.token_hex(8)}"
        draft.mkdir()
        try:
            hashes: dict[str, str] = {}
            for number, table in enumerate(checkpoint.tables):
                hashes |= _write_changes(draft, number, table) or _write_whole(draft, number, table)
            target, sequence = _publish(draft, checkpoint, hashes)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        _prune(folder, checkpoint.job, sequence, keep)
    return target


def in_files(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint that was written to a folder, with its arrays there and not in memory.

    Raises:
        OSError, SafetensorError: A file cannot be read.
    """
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    tables = [
        replace(table, arrays=Written(path, manifest, number), base=None, changes=None)
        for number, table in enumerate(checkpoint.tables)
    ]
    return replace(checkpoint, tables=tables)


def _write_whole(draft: Path, number: int, table: TableState) -> dict[str, str]:
    """Writes all arrays of a table; returns the hash of each file."""
    hashes = {}
    for array, tensors in table.arrays.items():
        path = draft / _file_name(number, array)
        _save(tensors, path)
        hashes[path.name] = records.sha256_of(path)
    return hashes


def _write_changes(draft: Path, number: int, table: TableState) -> dict[str, str]:
    """Writes what has changed in a table beside links to the files of its base.

    Returns:
        The hash of each file; nothing if the table is to be written whole: it did not come as
        changes, they have become many, or files cannot be linked.
    """
    base, changes = table.base, table.changes
    if base is None or changes is None or base.number != number or not _follows(base, changes):
        return {}
    linked: list[Path] = []
    try:
        for name in base.hashes:
            os.link(base.path / name, draft / name)
            linked.append(draft / name)
    except OSError:  # Not on this file system, or the base is gone.
        for path in linked:
            path.unlink()
        return {}
    path = draft / _changes_name(number, base.num_changes + 1)
    tensors = {
        f"{array}/{name}": values for array, of in changes.items() for name, values in of.items()
    }
    _save(tensors, path)
    return {**base.hashes, path.name: records.sha256_of(path)}


def _follows(base: Written, changes: Mapping[str, Tensors]) -> bool:
    """Returns whether changes are few enough to be written beside those since the whole table."""
    nbytes = sum(values.nbytes for tensors in changes.values() for values in tensors.values())
    try:
        whole, changed = base.nbytes
    except OSError:  # Somebody has deleted the base.
        return False
    return base.num_changes < CHANGES_MAX and CHANGES_SHARE * (changed + nbytes) <= whole


def adopt(folder: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Adds a checkpoint of another folder to this one, where it appears at once, complete.

    Args:
        folder: Folder of the checkpoints; made if it is not there.
        name: Name of the checkpoint's folder; nothing has this name yet.
        fill: Called with a folder to make, and to copy all files of the checkpoint into.

    Returns:
        Where it is.

    Raises:
        OSError, ValueError, KeyError, TypeError, SafetensorError, ConfigError: It cannot be
            copied, or is not whole.
    """
    _make(folder)
    with _writing(folder):
        draft = folder / f"{DRAFT}{secrets.token_hex(8)}"
        draft.mkdir()
        try:
            fill(draft / name)
            verified(_look(draft / name))
            for path in (draft / name).iterdir():
                records.sync(path)
            records.sync(draft / name)
            (draft / name).rename(folder / name)
            records.sync(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder / name


def set_aside(folder: Path, job: str) -> Path | None:
    """Moves the checkpoints of a job to where no start looks for them, and deletes none.

    Returns:
        Where they are now; None if there are none.

    Raises:
        OSError: They cannot be moved.
    """
    if not folder.is_dir():
        return None
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # There are no locks here.
            fcntl.flock(fd, fcntl.LOCK_EX)  # Waits for a checkpoint that is being written.
        found = [one.path for one in scan(folder) if one.job == job]
        if not found:
            return None
        aside = folder / ASIDE
        aside.mkdir(mode=0o700, exist_ok=True)
        number = max((int(n.name) for n in aside.iterdir() if n.name.isdecimal()), default=0) + 1
        target = aside / str(number)
        target.mkdir(mode=0o700)
        for path in found:
            path.rename(target / path.name)
        for changed in (target, aside, folder):
            records.sync(changed)
        return target
    finally:
        os.close(fd)


def newest_table(checkpoint: Checkpoint) -> TableState:
    """Returns the first table, or the last of those that follow it because the model has grown."""
    stem = checkpoint.tables[0].spec.name + GROWN
    following = [
        table
        for table in checkpoint.tables
        if table.spec.name.startswith(stem) and table.spec.name.removeprefix(stem).isdecimal()
    ]
    return max(
        following,
        key=lambda table: int(table.spec.name.removeprefix(stem)),
        default=checkpoint.tables[0],
    )


def export(
    path: Path, checkpoint: Checkpoint, tensor: str | None = None, since: Path | None = None
) -> None:
    """Writes the weights of a job as one safetensors file; one row table perhaps as Parquet.

    Args:
        tensor: Name of a row table or parameter, of which alone the file is; None: all parameters.
        since: An earlier file of that row table: only the changes since are written.

    Raises:
        OSError: It cannot be written, or is a folder or a device; a former file stays.
        ConfigError: There are no changes since that file, or a file of Parquet cannot be written.
        CommandError: There is no such row table or parameter.
    """
    path = replaceable(path)
    metadata: dict[str, str] = {}
    if tensor is None:
        tensors = newest_table(checkpoint).arrays["weights"]
    else:
        table = _table_with(checkpoint, tensor)
        archive = archive_of(table.spec.content.name)
        tensors, metadata = archive.exported(table.spec, table.arrays, tensor, since)
    draft = path.with_name(f"{DRAFT}{secrets.token_hex(8)}-{path.name}")
    try:
        if path.suffix == parquet.SUFFIX:
            parquet.save(tensors, draft, metadata)
            records.sync(draft)
        else:
            _save(tensors, draft, metadata)
        draft.replace(path)
        records.sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _table_with(checkpoint: Checkpoint, tensor: str) -> TableState:
    """Returns the newest table that has a tensor of this name."""
    for table in reversed(checkpoint.tables):
        if any(each.name == tensor for each in table.spec.tensors):
            return table
    names = sorted({each.name for table in checkpoint.tables for each in table.spec.tensors})
    raise CommandError(
        Exit.USAGE,
        f"job {checkpoint.job!r} has no row table or parameter {tensor!r}; it has "
        f"{', '.join(map(repr, names))}",
    )


def _make(folder: Path) -> None:
    """Makes a folder and those above it, so that they are still there after a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        records.sync(path.parent)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Holds the lock of a writer; deletes what killed writers left, if no other is at work."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # Another one is at work, or there are no locks here.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in folder.glob(f"{DRAFT}*"):
                shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def _publish(draft: Path, checkpoint: Checkpoint, hashes: dict[str, str]) -> tuple[Path, int]:
    """Gives a draft its place in the order, and its name."""
    folder, slug = draft.parent, _slug(checkpoint.job)
    while True:
        taken = [found.sequence for found in scan(folder) if found.may_be_of(checkpoint.job)]
        names = [NAME.fullmatch(name) for name in os.listdir(folder)]
        taken += [int(name[2]) for name in names if name is not None and name[1] == slug]
        sequence = max((number for number in taken if number < COUNT_MAX), default=0) + 1
        path = draft / MANIFEST
        manifest = _manifest(checkpoint, sequence, hashes)
        path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        records.sync(path)
        records.sync(draft)
        target = folder / f"{slug}-{sequence:08d}"
        try:
            draft.rename(target)
        except OSError as problem:  # Another writer has just taken it; it is never empty.
            if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            continue
        records.sync(folder)
        return target, sequence


def _prune(folder: Path, job: str, sequence: int, keep: int) -> None:
    """Deletes checkpoints of a job that are older than `sequence`, but for `keep` - 1 of them."""
    older = [found for found in scan(folder) if found.job == job and found.sequence < sequence]
    for found in older[keep - 1 :]:
        delete(folder, found.path)


def expire(folder: Path, keep_s: float) -> list[Path]:
    """Deletes what is left of jobs that have ended, or were forgotten, some time ago.

    Args:
        keep_s: Seconds that they are kept, by the time that the file system has of their writing.

    Returns:
        The folders that are deleted.
    """
    before_s = time.time() - keep_s
    old = [path for path in (folder / ASIDE).glob("*/") if _is_before(path, before_s)]
    for found in newest(folder).values():
        if found[0].manifest.get("finished") and _is_before(found[0].path, before_s):
            old += [one.path for one in found]
    for path in old:
        delete(folder, path)
    return old


def _is_before(path: Path, before_s: float) -> bool:
    """Returns whether a folder was last changed before a time."""
    try:
        return path.stat().st_mtime <= before_s
    except OSError:  # Another writer has deleted it.
        return False


def delete(folder: Path, path: Path) -> None:
    """Deletes a checkpoint in a folder; does nothing if another writer does."""
    gone = folder / f"{DRAFT}{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # Another writer deletes it.
        path.rename(gone)  # One that is half deleted must not look like a checkpoint.
        shutil.rmtree(gone, ignore_errors=True)


def _manifest(checkpoint: Checkpoint, sequence: int, hashes: dict[str, str]) -> dict[str, Any]:
    counts = [
        sum(_changes_name(number, k + 1) in hashes for k in range(CHANGES_MAX))
        for number in range(len(checkpoint.tables))
    ]
    manifest = {
        "format": FORMAT_CHANGES if any(counts) else FORMAT,
        "job": checkpoint.job,
        "sequence": sequence,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),  # For people.
        "num_workers": checkpoint.num_workers,
        "min_workers": checkpoint.min_workers,
        "finished": checkpoint.is_finished,
        "tables": [
            {
                "spec": table.spec.to_json(),
                "version": table.version,
                "updates": list(table.updates),
                "slices": table.slices,
                "counts": table.counts,
                "arrays": sorted(table.arrays),
                **({"changes": count} if count else {}),
            }
            for table, count in zip(checkpoint.tables, counts, strict=True)
        ],
        "sha256": hashes,
    }
    return {**manifest, "digest": _digest(manifest)}


def _digest(manifest: Mapping[str, Any]) -> str:
    """Returns the hash of a manifest without its own."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _slug(job: str) -> str:
    """Returns a job's name as a folder's name can hold it; others may have the same."""
    slug = re.sub(r"[^\w.=@+-]", "_", job)[:SLUG_LENGTH_MAX].encode()[:SLUG_NBYTES_MAX]
    # A dot at the beginning would hide the folder, a minus would make an option of its name.
    return slug.decode(errors="ignore").lstrip(".-") or "job"


def _changes_name(table: int, number: int) -> str:
    """Returns the name of a file of changes; no array has a minus in its name."""
    return _file_name(table, f"changes-{number}")


def _file_name(table: int, array: str) -> str:
    stem = "model" if array == "weights" else array
    return f"{stem}.safetensors" if table == 0 else f"table-{table}.{stem}.safetensors"


def _save(tensors: Tensors, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    try:
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
    except SafetensorError as problem:
        raise OSError(str(problem)) from problem
    records.sync(path)


# ----- reading


def scan(folder: Path) -> list[Found]:
    """Returns what is in a folder of checkpoints, the newest of each job first; not verified."""
    found = [
        _look(path)
        for path in folder.glob("[!.]*")
        if path.is_dir() and ((path / MANIFEST).exists() or NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda one: (one.sequence, one.path.name), reverse=True)


def read(path: Path, job: str | None, tell: Tell) -> tuple[Path, Checkpoint]:
    """Reads a checkpoint, or the newest good one in a folder of several, and checks every hash.

    Args:
        path: A checkpoint, or a folder of several.
        job: The job, if there are checkpoints of several.
        tell: Called with a sentence for each that is left out because it is damaged.

    Returns:
        Where it is, and the checkpoint.

    Raises:
        CommandError: There is none, or it is not whole.
    """
    if _is_one(path):
        try:
            return path, verified(_look(path))
        except PROBLEMS as problem:
            raise CommandError(
                Exit.STATE_DIR,
                f"{_refusal(path, problem)}; `psserver restore {path.parent}` uses the newest "
                "intact checkpoint in that folder",
            ) from problem
    tried: set[Path] = set()
    while True:  # Again after each that fails: a newer one may have taken its place meanwhile.
        found = scan(path)
        chosen = _choose(path, found, job)
        left = [one for one in found if one.may_be_of(chosen) and one.path not in tried]
        if not left:
            raise CommandError(
                Exit.STATE_DIR,
                f"none of the {len(tried)} checkpoints in {path} is complete: "
                f"{', '.join(one.name for one in sorted(tried))}; give another folder",
            )
        tried.add(left[0].path)
        try:
            return left[0].path, verified(left[0])
        except PROBLEMS as problem:
            if left[0].path.exists():  # Else it has just been deleted as too old.
                tell(f"{_refusal(left[0].path, problem)}; the next newest is used")


def newest(folder: Path) -> dict[str, list[Found]]:
    """Returns the checkpoints in a folder by job, the newest first; not verified."""
    found = scan(folder)
    jobs = dict.fromkeys(one.job for one in found if one.job is not None)
    return {job: [one for one in found if one.may_be_of(job)] for job in jobs}


def verified(found: Found) -> Checkpoint:
    """Returns a checkpoint whose files are all as they were written; arrays are read when used.

    Raises:
        OSError, ValueError, KeyError, TypeError, SafetensorError, ConfigError: It is not whole.
    """
    if found.problem:
        raise ValueError(found.problem)
    manifest = found.manifest
    num_workers = count_of(
        manifest["num_workers"], "the number of workers", least=1, most=WORKERS_MAX
    )
    checkpoint = Checkpoint(
        job=str(found.job),
        num_workers=num_workers,
        min_workers=count_of(
            manifest["min_workers"], "the least number of workers", most=num_workers
        ),
        is_finished=bool(manifest["finished"]),
    )
    if not manifest["tables"]:
        raise ValueError("it has no tables")
    for number, entry in enumerate(manifest["tables"]):
        spec = TableSpec.from_json(entry["spec"])
        for array in entry["arrays"]:
            if not ARRAY.fullmatch(array):
                raise ValueError(f"an array is named {array!r}")
        arrays = Written(found.path, manifest, number)
        for name, digest in arrays.hashes.items():
            if records.sha256_of(found.path / name) != digest:
                raise ValueError(f"{name} has changed since it was written")
        for array in entry["arrays"]:
            file = found.path / _file_name(number, array)
            archive_of(spec.content.name).require_file(file, array, spec)
        checkpoint.tables.append(
            TableState(
                spec=spec,
                version=count_of(entry["version"], "a version", least=-1),
                slices=_slices_of(entry["slices"]),
                counts=_counts_of(entry["counts"], spec),
                arrays=arrays,
            )
        )
    return checkpoint


def _slices_of(slices: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the versions and clocks of slices."""
    return {
        index: {
            "version": count_of(entry["version"], f"the version of slice {index}", least=-1),
            "clocks": {
                rank: count_of(clock, f"the clock of worker {rank} in slice {index}")
                for rank, clock in entry["clocks"].items()
            },
        }
        for index, entry in slices.items()
    }


def _counts_of(counts: Sequence[object], spec: TableSpec) -> list[int]:
    """Returns the optimizer's steps of each tensor of a table."""
    if len(counts) != len(spec.tensors):
        raise ValueError(f"{len(counts)} counts of steps for {len(spec.tensors)} tensors")
    return [
        count_of(count, f"the optimizer's steps of tensor {tensor.name!r}")
        for count, tensor in zip(counts, spec.tensors, strict=True)
    ]


class Written(Mapping[str, Tensors]):
    """The arrays of a table in a checkpoint's folder, read when they are used.

    Attributes:
        path: The folder.
        number: The table's number in the checkpoint.
        hashes: The hash of each of its files, by name.
        num_changes: Files of changes that follow those with all of it.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], number: int) -> None:
        """Reads nothing yet.

        Raises:
            KeyError, ConfigError: The manifest lacks a file, or a number is none.
        """
        entry = manifest["tables"][number]
        self.path, self.number = path, number
        self.num_changes = count_of(entry.get("changes", 0), "changes", most=CHANGES_MAX)
        self._whole = {array: _file_name(number, array) for array in entry["arrays"]}
        self._changes = [_changes_name(number, k + 1) for k in range(self.num_changes)]
        names = [*self._whole.values(), *self._changes]
        self.hashes = {name: manifest["sha256"][name] for name in names}
        self._archive = archive_of(TableSpec.from_json(entry["spec"]).content.name)

    @functools.cached_property
    def _arrays(self) -> Mapping[str, Tensors]:
        whole = {array: _File(self.path / name) for array, name in self._whole.items()}
        changes = [_read_changes(self.path / name) for name in self._changes]
        return self._archive.joined(whole, changes)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the files with all of the table, and of those with changes."""
        parts = list(self._whole.values()), self._changes
        whole, changed = (sum((self.path / n).stat().st_size for n in part) for part in parts)
        return whole, changed

    def __getitem__(self, array: str) -> Tensors:
        """Returns an array of each tensor."""
        return self._arrays[array]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def _read_changes(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Returns the changes in a file, by array and tensor."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with safe_open(path, framework="numpy") as content:
        for name in content.keys():  # noqa: SIM118 - not a mapping
            array, tensor = name.split("/", 1)
            found.setdefault(array, {})[tensor] = content.get_tensor(name)
    return found


class _File(Mapping[str, FloatArray]):
    """Tensors in a file, each read when it is asked for: a job may be larger than memory."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="numpy") as content:
            self._names = list(content.keys())
        self._path = path

    def __getitem__(self, name: str) -> FloatArray:
        with safe_open(self._path, framework="numpy") as content:
            tensor: FloatArray = content.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _look(path: Path) -> Found:
    name = NAME.fullmatch(path.name)
    number = -1 if name is None else int(name[2])
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if (theirs := manifest["format"]) not in (FORMAT, FORMAT_CHANGES):
            raise ValueError(
                f"its format is {theirs!r}, and this version reads {FORMAT}: restore it with the "
                "version of Paceline that wrote it"
            )
        if manifest["digest"] != _digest(manifest):
            raise ValueError(f"{MANIFEST} has changed since it was written")
        job, sequence = manifest["job"], count_of(manifest["sequence"], "its sequence")
        if not isinstance(job, str):
            raise TypeError("its job has no name")
    except PROBLEMS as problem:
        return Found(path=path, job=None, sequence=number, problem=_reason(problem))
    return Found(path=path, job=job, sequence=sequence, manifest=manifest)


def _is_one(path: Path) -> bool:
    """Returns whether `path` is a checkpoint, and not a folder of several."""
    return (path / MANIFEST).exists() or (any(path.glob("*.safetensors")) and not scan(path))


def _choose(path: Path, found: list[Found], job: str | None) -> str:
    """Returns the job whose checkpoints in a folder are meant."""
    jobs = list(dict.fromkeys(one.job for one in found if one.job is not None))
    if job in jobs:
        assert job is not None
        return job
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        listed = ", ".join(repr(name) for name in sorted(jobs))
        raise CommandError(
            Exit.USAGE,
            f"{path} holds checkpoints of jobs {listed}; choose one with --job, or name one "
            f"checkpoint, such as {found[0].path}",
        )
    if found:
        raise CommandError(
            Exit.STATE_DIR, "; ".join(f"{one.path} cannot be used: {one.problem}" for one in found)
        )
    raise CommandError(
        Exit.STATE_DIR, f"there is no checkpoint in {path}; `psserver checkpoint {path}` writes one"
    )


def _refusal(path: Path, problem: Exception) -> str:
    return f"{path} cannot be used: {_reason(problem)}"


def _reason(problem: BaseException) -> str:
    if isinstance(problem, FileNotFoundError):
        return f"{Path(str(problem.filename)).name} is missing"
    if isinstance(problem, KeyError):
        return f"the manifest has no {problem}"
    return str(problem) or type(problem).__name__
