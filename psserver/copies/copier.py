"""Keeps the newest checkpoints of a folder at a second place too, and brings them back from it.

A copy is made after the checkpoint itself is whole, in a thread of its own, so a slow or broken
place delays neither training nor the next checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from pscore.errors import PacelineError
from psserver.copies.places import SecondPlace, place_of
from psserver.remote.checkpoint_files import ASIDE, MANIFEST, PROBLEMS, Found, adopt, newest

log = structlog.get_logger()
HELD = ".copying-"  # A checkpoint that is being copied, so that no one deletes it meanwhile.
UNREACHED = (*PROBLEMS, PacelineError)

Report = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A checkpoint at the second place."""

    name: str
    job: str
    sequence: int
    digest: str


class Copier:
    """Copies what is new, whenever that is wanted."""

    def __init__(self, folder: Path, place: str, keep: int, report: Report) -> None:
        """Copies nothing yet.

        Args:
            place: The second place (`place_of`).
            keep: Copies of each job that are kept.
            report: Called after each attempt with its problem, or nothing, and the number of
                copies at the place.
        """
        self._folder, self._place, self._keep, self._report = folder, place, keep, report
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._lock = threading.Lock()  # Lock of the two below; a leaf.
        self._attempts: list[Future[None]] = []  # One that runs, and one after it at most.
        self._expired: list[str] = []  # Names that are to be deleted at the place.
        self._said = ""

    def begin(self, expired: Sequence[Path] = ()) -> None:
        """Starts to copy all that is new; `expired` checkpoints are deleted at the place too."""
        with self._lock:
            self._expired += [path.name for path in expired]
            self._attempts = [one for one in self._attempts if not one.done()]
            if len(self._attempts) <= 1:
                self._attempts.append(self._pool.submit(self._attempt))
                self._attempts[-1].add_done_callback(self._check)

    def finish(self) -> None:
        """Returns when the attempts that were begun are over."""
        with self._lock:
            attempts = list(self._attempts)
        wait(attempts)

    def _attempt(self) -> None:
        problem, count = "", 0
        with self._lock:
            expired = list(self._expired)
        try:
            count = copy(self._folder, place_of(self._place), self._keep, expired)
            with self._lock:
                del self._expired[: len(expired)]
        except UNREACHED as error:
            problem = str(error) or type(error).__name__
        self._say(problem)
        self._report(problem, count)

    def _say(self, problem: str) -> None:
        """Logs a problem once, and its end."""
        if problem and problem != self._said:
            log.error("checkpoints are not copied to the second place", reason=problem)
        if self._said and not problem:
            log.warning("checkpoints are copied to the second place again")
        self._said = problem

    def _check(self, attempt: Future[None]) -> None:
        if (problem := attempt.exception()) is not None:  # A store may raise what it likes.
            self._say(f"{type(problem).__name__}: {problem}")
            self._report(self._said, 0)


def copy(folder: Path, place: SecondPlace, keep: int, expired: Sequence[str] = ()) -> int:
    """Copies the newest checkpoint of each job to a place, and deletes those beyond `keep` there.

    Returns:
        The number of copies at the place.

    Raises:
        OSError, ValueError, PacelineError: The place cannot be used, or has checkpoints that are
            newer than those of the folder: it is of another start, or the folder was lost.
    """
    gone = _forgotten(folder)
    there: list[Copy] = []
    refused = ""  # Why a job is not copied; it keeps no other waiting.
    copies, damaged = _copies(place)
    for found in copies:
        if found.digest in gone or found.name in expired:
            place.delete(found.name)
        else:
            there.append(found)
    for job, own in newest(folder).items():
        theirs = sorted((one for one in there if one.job == job), key=lambda one: -one.sequence)
        known = {one.manifest.get("digest") for one in own}
        if own[0].problem or any(one.digest == own[0].manifest["digest"] for one in theirs):
            continue
        if theirs and theirs[0].sequence >= own[0].sequence and theirs[0].digest not in known:
            refused = (
                f"it has a checkpoint of job {job!r}, {theirs[0].name}, that is newer than all in "
                f"{folder}: start shard 0 again, which fetches it, or give a place of its own"
            )
            continue
        if own[0].path.name in damaged:
            place.delete(own[0].path.name)
        with _held(own[0]) as path:
            place.send(path)
        log.info("checkpoint copied to the second place", job=job, name=own[0].path.name)
        for old in theirs[keep - 1 :]:
            place.delete(old.name)
            there.remove(old)
        there.append(_copy_of(own[0].path.name, json.dumps(dict(own[0].manifest))))
    if refused:
        raise ValueError(refused)
    return len(there)


def fetch(folder: Path, place: SecondPlace) -> list[Path]:
    """Brings the newest whole checkpoint of each job back, if the folder has none or older ones.

    Args:
        folder: Folder of the checkpoints; made if it is not there.

    Returns:
        The checkpoints that were brought.

    Raises:
        OSError, ValueError, PacelineError: The place cannot be used, or there is no room.
    """
    brought, gone, own = [], _forgotten(folder), newest(folder)
    there = [found for found in _copies(place)[0] if found.digest not in gone]
    for job in dict.fromkeys(found.job for found in there):
        least = max((one.sequence for one in own.get(job, ())), default=-1)
        for found in sorted(
            (one for one in there if one.job == job), key=lambda one: -one.sequence
        ):
            if found.sequence <= least:
                break
            try:
                brought.append(adopt(folder, found.name, partial(place.fetch, found.name)))
            except PROBLEMS as problem:
                log.error("a copy cannot be used", job=job, name=found.name, reason=str(problem))
            else:
                log.warning("checkpoint fetched from the second place", job=job, name=found.name)
                break
    return brought


def _copies(place: SecondPlace) -> tuple[list[Copy], list[str]]:
    """Returns the copies at a place, and the names of those whose manifests are damaged."""
    found: list[Copy] = []
    damaged: list[str] = []
    for name in place.names():
        manifest = place.manifest(name)
        try:
            found.append(_copy_of(name, manifest))
        except PROBLEMS as problem:
            log.error("a copy cannot be used", name=name, reason=repr(problem))
            damaged.append(name)
    return found, damaged


def _copy_of(name: str, manifest: bytes | str) -> Copy:
    values = json.loads(manifest)
    return Copy(
        name=name,
        job=str(values["job"]),
        sequence=int(values["sequence"]),
        digest=str(values["digest"]),
    )


def _forgotten(folder: Path) -> set[str]:
    """Returns the digests of checkpoints of jobs that were forgotten."""
    found = set()
    for path in folder.glob(f"{ASIDE}/*/*/{MANIFEST}"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.add(str(json.loads(path.read_text(encoding="utf-8"))["digest"]))
    return found


@contextlib.contextmanager
def _held(found: Found) -> Iterator[Path]:
    """Yields a checkpoint's folder that stays while newer checkpoints replace this one."""
    holder = found.path.parent / f"{HELD}{secrets.token_hex(8)}"
    try:
        try:
            holder.mkdir()
            shutil.copytree(found.path, holder / found.path.name, copy_function=os.link)
        except (OSError, shutil.Error):  # A file system without links.
            yield found.path
        else:
            yield holder / found.path.name
    finally:
        shutil.rmtree(holder, ignore_errors=True)
