"""The run directory: where a running `psserver start` can be found, and its logs.

    DIR/7070/run.json       processes, addresses, log files
    DIR/7070/shard-0.log    log lines of a detached shard; shard-0.log.1 has those before
    DIR/7070/supervisor.log

DIR is the state directory if one is given, else `paceline` in $XDG_RUNTIME_DIR, else a directory of
this user alone below the one for temporary files. A run file whose process is gone does not count.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pscore.errors import ConfigError
from pscore.json_text import count_of, to_json
from pscore.observe.boot import began
from pscore.text import printable
from psserver.exits import CommandError, Exit

FILE = "run.json"
NAME_NBYTES_MAX = 255  # Longest name of a file.
PID_MAX, PORT_MAX = (1 << 31) - 1, (1 << 16) - 1
FREE = "free-"  # Begins the name of a run on free ports; the number of its process follows.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRun:
    """One shard in a run file."""

    index: int
    pid: int | None  # None while it is down.
    port: int
    metrics_port: int | None
    log: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """One `psserver start` that runs on this machine."""

    pid: int  # Process number of the supervisor.
    began: str  # When that process began (pscore/observe/boot.py): process numbers are used again.
    cluster: str
    host: str
    port: int
    addresses: list[str]  # For programs on this machine.
    grace_s: float
    detached: bool
    supervisor_log: str | None
    shards: list[ShardRun]
    token_file: str | None = None

    def is_alive(self) -> bool:
        """Returns whether the supervisor still runs."""
        try:
            is_zombie = psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return not is_zombie and began(self.pid) == self.began


def require_path(name: str, path: Path) -> None:
    """Raises a `ConfigError` if a path cannot be meant, or be made."""
    text = str(path)
    if text != text.strip() or any(len(os.fsencode(one)) > NAME_NBYTES_MAX for one in path.parts):
        raise ConfigError(
            f"{name} is {printable(text, 64)!r}: it begins or ends with a blank, or has a name of "
            f"more than {NAME_NBYTES_MAX} bytes; give another path"
        )


class RunDirectory:
    """The runs of one state directory, or of this user."""

    def __init__(self, state_dir: Path | None) -> None:
        """Names the directory; nothing is made or read yet."""
        self.path = state_dir.absolute() if state_dir is not None else _default()
        self._is_private = state_dir is None

    def make(self, name: str) -> Path:
        """Returns the directory of the run `name`, made if need be, in which one can write.

        Raises:
            CommandError: It cannot be made or used; the message says why, and names a remedy.
        """
        folder = self.path / name
        try:
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{self.path} is not a directory")
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._require_ours()
            folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as problem:
            raise CommandError(
                Exit.STATE_DIR,
                f"cannot use {folder}: {problem.strerror or problem}; give --state-dir a "
                "directory that can be written to",
            ) from problem
        return folder

    def runs(self) -> list[StartedRun]:
        """Returns the runs whose supervisor is alive, by port."""
        found = [_read(file) for file in self.path.glob(f"*/{FILE}")]
        alive = [run for run in found if run is not None and run.is_alive()]
        return sorted(alive, key=lambda run: run.port)

    def last_logs(self, port: int | None) -> list[Path]:
        """Returns the log files of the run that wrote a log line last, whether or not it has ended.

        Args:
            port: Only of runs with this port of shard 0.
        """
        by_folder = [
            sorted(folder.glob("*.log"))
            for folder in self.path.glob("*" if port is None else str(port))
        ]
        return max(filter(None, by_folder), key=_newest_s, default=[])

    def clear(self) -> None:
        """Removes what ended runs on free ports have left; nothing would write there again."""
        for folder in self.path.glob(f"{FREE}*"):
            number = folder.name.removeprefix(FREE)
            run = _read(folder / FILE)
            is_used = number.isdecimal() and psutil.pid_exists(int(number))
            if is_used or (run is not None and run.is_alive()):
                continue
            with contextlib.suppress(OSError):
                for file in [*folder.glob("*.log*"), folder / FILE]:
                    file.unlink(missing_ok=True)
                folder.rmdir()

    def _require_ours(self) -> None:
        """Raises an OSError if another user owns or can change the default directory."""
        about = self.path.lstat()
        if not self._is_private:
            return
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o022:
            raise OSError(0, "it belongs to, or can be changed by, another user")


def write(folder: Path, run: StartedRun) -> None:
    """Writes the run file in one piece, or on a full disk over the one that is there.

    Raises:
        CommandError: It cannot; the message says why, and names a remedy.
    """
    temporary = folder / f".{FILE}.{os.getpid()}"
    text = to_json(asdict(run), indent=1) + "\n"
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / FILE)
    except OSError as problem:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if problem.errno == errno.ENOSPC and _overwrite(folder / FILE, text.encode()):
            return
        raise CommandError(
            Exit.STATE_DIR,
            f"cannot write {folder / FILE}: {problem.strerror}; make room there, or give "
            "--state-dir another directory",
        ) from problem


def _overwrite(file: Path, text: bytes) -> bool:
    """Returns whether a file could be written over, which needs no more room."""
    try:
        with file.open("r+b", buffering=0) as former:
            size = os.fstat(former.fileno()).st_size
            return former.write(text.ljust(size)) >= len(text)
    except OSError:
        return False


def remove(folder: Path) -> None:
    """Removes this process's run file; the logs stay, the next run on this port adds to them."""
    run = _read(folder / FILE)
    if run is not None and run.pid == os.getpid():
        with contextlib.suppress(OSError):
            (folder / FILE).unlink(missing_ok=True)


def _newest_s(files: list[Path]) -> float:
    """Returns when one of the files was last written to, seconds since the epoch."""
    return max(file.stat().st_mtime for file in files)


def _default() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "paceline"
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def _read(file: Path) -> StartedRun | None:
    """Returns what a run file says, or None if it is not one of this version."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        values["shards"] = [ShardRun(**shard) for shard in values["shards"]]
        run = StartedRun(**values)
        for pid in (run.pid, *(shard.pid for shard in run.shards)):
            if pid is not None:
                count_of(pid, "a process number", least=1, most=PID_MAX)
        for port in (run.port, *(shard.port for shard in run.shards)):
            count_of(port, "a port", most=PORT_MAX)
        if not all(isinstance(address, str) for address in run.addresses):
            raise TypeError("an address is not text")
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return None
    return run
