"""The parent of the shards: starts a process for each, waits until all answer, keeps them alive.

A shard ends when its standard input does, so none outlives the process that holds it, however that
one ends. A shard that dies by itself is started again, after a pause that doubles up to a limit; a
spare process (spare.py) then becomes the shard, since most of a start is loading.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import structlog

from pscore.signals import signal_pipe
from psserver.exits import CommandError, Exit
from psserver.process.notify import ServiceManager
from psserver.process.shard_plan import ENDING, Ready, Refused, Report, ShardPlan, report_from_json
from psserver.process.spare import SpareProcess, start_process

log = structlog.get_logger()

START_S_MAX = 300.0  # Against a hang: a start that takes 3 s took over 60 s at a load of 30.
STOP_MARGIN_S = 5.0  # Beyond the grace period, until a shard is killed.
PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 30.0
RESTARTS_MAX = 10  # One after the other, without having lived for `SETTLED_S`.
SETTLED_S = 10.0
WATCHDOG_PARTS = 3  # Signs of life within the time that systemd allows.
LINE_NBYTES_MAX = 64 << 10
SPARE_AFTER_S = 5.0  # Until a spare process is started, when all shards are ready.


class ShardProcess:
    """One shard as its parent sees it."""

    def __init__(
        self, plan: ShardPlan, log_file: Path | None = None, spare: SpareProcess | None = None
    ) -> None:
        """Starts the process.

        Args:
            log_file: Where its log lines go; None for our own standard error.
            spare: A process that becomes the shard, if there is one.

        Raises:
            OSError: The machine has no room for it.
        """
        self.plan = plan
        self.log_file = log_file
        self.report: Report | None = None
        self.started_s = self.heard_s = time.monotonic()
        self.is_ending = False  # Whether a client has asked it to end.
        self.hangs = False  # Whether it was killed because it was not ready in time.
        self._line = b""
        if spare is not None and (popen := spare.take(plan)) is not None:
            self._popen = popen
            return
        with nullcontext() if log_file is None else _open_log(log_file) as stderr:
            self._popen = start_process(plan.to_json(), stderr)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._popen.pid

    @property
    def start_s(self) -> float:
        """The time that its start may take, in seconds."""
        return START_S_MAX + self.plan.loading_s

    def fileno(self) -> int:
        """Readable when there is a report, or the process has ended."""
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    def read(self) -> bool:
        """Reads the output of the process; returns False if it has ended."""
        chunk = os.read(self.fileno(), LINE_NBYTES_MAX)
        self.heard_s = time.monotonic()
        if self.report is None:
            self._line += chunk
            line, newline, _ = self._line.partition(b"\n")
            if newline:
                self.report = report_from_json(line.decode())
            assert len(self._line) <= LINE_NBYTES_MAX
        else:
            self.is_ending = self.is_ending or ENDING.encode() in chunk
        return bool(chunk)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process is still there."""
        self._popen.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the end and returns the exit status, or None after `timeout_s`."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Closes the pipes; a shard that still runs ends by itself."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()

    def failure(self, status: int | None) -> CommandError:
        """Returns why the process did not become ready."""
        if isinstance(self.report, Refused):
            return CommandError(self.report.code, f"shard {self.plan.index} {self.report.message}")
        where = "the lines above" if self.log_file is None else str(self.log_file)
        how = f"did not answer within {self.start_s:g} s" if status is None else ended(status)
        return CommandError(
            Exit.SHARD_DIED, f"shard {self.plan.index} {how} before it was ready; see {where}"
        )


def _open_log(path: Path) -> IO[bytes]:
    """Returns where a shard writes its log lines: nowhere, if there is no room for them."""
    try:
        return path.open("ab")
    except OSError as problem:
        log.error("a shard continues without its log file", path=str(path), reason=str(problem))
        return Path(os.devnull).open("ab")


def ended(status: int) -> str:
    """Returns how a process ended, in words."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


def wait_ready(shards: Sequence[ShardProcess], wake_fd: int | None = None) -> bool:
    """Waits until every shard is ready; returns False if `wake_fd` became readable before.

    Raises:
        CommandError: One of them cannot start, or takes too long.
    """
    deadline_s = time.monotonic() + max((shard.start_s for shard in shards), default=0.0)
    with selectors.DefaultSelector() as selector:
        for shard in shards:
            selector.register(shard, selectors.EVENT_READ)
        if wake_fd is not None:
            selector.register(wake_fd, selectors.EVENT_READ)
        while unready := [s for s in shards if not isinstance(s.report, Ready)]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise unready[0].failure(None)
            for key, _ in selector.select(left_s):
                if not isinstance(key.fileobj, ShardProcess):
                    return False
                if not key.fileobj.read() or isinstance(key.fileobj.report, Refused):
                    raise key.fileobj.failure(key.fileobj.wait())
    return True


def stop(shards: Iterable[ShardProcess], grace_s: float) -> bool:
    """Ends shards in order; returns whether all did within the grace period and a margin.

    SIGTERM lets them wait for a last checkpoint; those whose start takes it have it already. A
    shard that is still starting has set up neither signal, and SIGTERM ends it without a word.
    """
    shards = list(shards)
    for shard in shards:
        is_saved = shard.plan.checkpoint_dir is not None
        if not (is_saved and isinstance(shard.report, Ready)):
            shard.send(signal.SIGTERM)
        if is_saved:
            shard.send(signal.SIGINT)
    deadline_s = time.monotonic() + grace_s + STOP_MARGIN_S
    late = [s for s in shards if s.wait(max(0.0, deadline_s - time.monotonic())) is None]
    for shard in late:
        log.error("shard killed: it did not end in time", shard=shard.plan.index, pid=shard.pid)
        shard.send(signal.SIGKILL)
        shard.wait()
    for shard in shards:
        shard.close()
    return not late


@dataclass(slots=True)
class SupervisedShard:
    """One shard: its process, or the time when the next one is due."""

    plan: ShardPlan  # With the ports that the first process got.
    log_file: Path | None
    process: ShardProcess | None = None
    due_s: float = 0.0
    num_restarts: int = 0  # Since the shard last lived for `SETTLED_S`.


@dataclass(slots=True)
class Supervisor:
    """Keeps the shards of one `psserver start`."""

    plans: Sequence[ShardPlan]
    log_files: Sequence[Path | None]
    restart: bool
    # Called after the start, and after each restart.
    on_ready: Callable[[Sequence[SupervisedShard]], None]
    on_end: Callable[[], None]
    before_stop: Callable[[], None] = lambda: None  # While the shards still serve.
    service: ServiceManager = field(default_factory=ServiceManager)
    spare: SpareProcess = field(default_factory=lambda: SpareProcess())
    has_spare: bool = True  # Whether one is kept.
    spare_due_s: float = 0.0  # When one is started; 0: not now.
    shards: list[SupervisedShard] = field(default_factory=list)
    _has_saved: bool = False  # Whether shards that a client ends have had a last checkpoint.

    def run(self) -> Exit:
        """Starts the shards and stays until a signal comes or all of them have ended.

        Raises:
            CommandError: They cannot be started.
        """
        with signal_pipe((signal.SIGTERM, signal.SIGINT)) as (wake_fd, _):
            try:
                for plan, log_file in zip(self.plans, self.log_files, strict=True):
                    process = ShardProcess(plan, log_file)
                    self.shards.append(SupervisedShard(plan, log_file, process))
                if not wait_ready(self._processes(), wake_fd):
                    log.info("stopped before the shards were ready")
                    return Exit.OK
                for shard in self.shards:
                    shard.plan = _fixed(shard)
                self._all_ready()
                code = self._keep(wake_fd)
                if code is Exit.OK and self._processes():
                    self.before_stop()
                return code if self._stop() else Exit.SHARD_DIED
            finally:
                self._stop()
                self.on_end()

    def _keep(self, wake_fd: int) -> Exit:
        """Watches until a signal comes, no shard is left, or one is dead for good."""
        with selectors.DefaultSelector() as selector:
            selector.register(wake_fd, selectors.EVENT_READ)
            for process in self._processes():
                selector.register(process, selectors.EVENT_READ)
            while any(shard.process or shard.due_s for shard in self.shards):
                for key, _ in selector.select(self._pause_s()):
                    if not isinstance(key.fileobj, ShardProcess):
                        return Exit.OK
                    if self._is_alive(key.fileobj):
                        continue
                    selector.unregister(key.fileobj)
                    if not self._note_end(key.fileobj):
                        return Exit.SHARD_DIED
                self._feed_watchdog()
                self._kill_late()
                for shard in self.shards:
                    if shard.due_s and shard.due_s <= time.monotonic():
                        self._start_again(shard, selector)
                if self.spare_due_s and self.spare_due_s <= time.monotonic():
                    self.spare_due_s = 0.0
                    self.spare.start()
        return Exit.OK

    def _kill_late(self) -> None:
        """Ends the processes that hang before they are ready; their ends are noted like others."""
        for process in self._starting():
            if process.started_s + process.start_s <= time.monotonic():
                process.hangs = True
                process.send(signal.SIGKILL)

    def _start_again(self, shard: SupervisedShard, selector: selectors.BaseSelector) -> None:
        """Starts a shard's next process; if the machine has no room for one, it is tried later."""
        shard.due_s = 0.0
        try:
            shard.process = ShardProcess(shard.plan, shard.log_file, self.spare)
        except OSError as problem:
            shard.due_s = time.monotonic() + PAUSE_S_MAX
            log.error(
                "shard cannot be started; the start is tried again",
                shard=shard.plan.index,
                reason=str(problem),
                pause_s=PAUSE_S_MAX,
            )
        else:
            selector.register(shard.process, selectors.EVENT_READ)

    def _is_alive(self, process: ShardProcess) -> bool:
        """Reads from a process; one that has come back is announced."""
        was_ready, was_ending = isinstance(process.report, Ready), process.is_ending
        if not process.read():
            return False
        if process.is_ending and not was_ending:
            if not self._has_saved:
                self._has_saved = True
                self.before_stop()
            if process.plan.checkpoint_dir is not None:
                process.send(signal.SIGINT)  # It serves until then, for the last checkpoint.
        if not was_ready and isinstance(process.report, Ready):
            log.warning("shard restarted", shard=process.plan.index, pid=process.pid)
            self._all_ready()
        return True

    def _all_ready(self) -> None:
        """Announces the shards; a spare process is due when nothing else has happened for long."""
        self.on_ready(self.shards)
        if self.restart and self.has_spare:
            self.spare_due_s = time.monotonic() + SPARE_AFTER_S

    def _note_end(self, process: ShardProcess) -> bool:
        """Notes that a shard has ended; returns False if that is the end of all of them."""
        shard = next(shard for shard in self.shards if shard.process is process)
        status = process.wait()
        process.close()
        shard.process = None
        if status == Exit.OK:
            log.info("shard drained", shard=process.plan.index)
            return True
        is_ready = isinstance(process.report, Ready)
        if is_ready and time.monotonic() - process.started_s > SETTLED_S:
            shard.num_restarts = 0
        assert status is not None
        how = ended(status)
        if isinstance(process.report, Refused):
            how = process.report.message
        elif process.hangs:
            how = f"was not ready within {process.start_s:g} s"
        gives_up = not self.restart or shard.num_restarts >= RESTARTS_MAX
        pause_s = min(PAUSE_S_MIN * 2**shard.num_restarts, PAUSE_S_MAX)
        log.error(
            "shard died" if gives_up else "shard died; it is started again",
            shard=process.plan.index,
            pid=process.pid,
            how=how,
            **({} if gives_up else {"pause_s": pause_s}),
        )
        shard.num_restarts += 1
        shard.due_s = 0.0 if gives_up else time.monotonic() + pause_s
        return not gives_up

    def _feed_watchdog(self) -> None:
        """Resets systemd's watchdog, unless a shard that was ready is silent for as long."""
        now_s, limit_s = time.monotonic(), self.service.watchdog_s
        ready = [each for each in self._processes() if isinstance(each.report, Ready)]
        if limit_s and all(now_s - each.heard_s < limit_s for each in ready):
            self.service.alive()

    def _pause_s(self) -> float | None:
        """Returns the time until a restart, the end of one, or a sign of life to systemd is due."""
        dues_s = [self.spare_due_s, *(shard.due_s for shard in self.shards)]
        dues_s += [each.started_s + each.start_s for each in self._starting() if not each.hangs]
        pauses = [max(0.0, due_s - time.monotonic()) for due_s in dues_s if due_s]
        if self.service.watchdog_s:
            pauses.append(self.service.watchdog_s / WATCHDOG_PARTS)
        return min(pauses, default=None)

    def _processes(self) -> list[ShardProcess]:
        return [shard.process for shard in self.shards if shard.process is not None]

    def _starting(self) -> list[ShardProcess]:
        return [each for each in self._processes() if each.report is None]

    def _stop(self) -> bool:
        self.spare.end()
        processes = self._processes()
        for shard in self.shards:
            shard.process = None
        return stop(processes, max((p.plan.grace_s for p in processes), default=0.0))


def _fixed(shard: SupervisedShard) -> ShardPlan:
    """Returns the plan with the ports that the shard has got, for its restarts."""
    assert shard.process is not None
    report = shard.process.report
    assert isinstance(report, Ready)
    return replace(shard.plan, port=report.port, metrics_port=report.metrics_port)
