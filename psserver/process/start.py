"""`psserver start`: checks, the run file, and whether we stay in the foreground or detach."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from pscore.errors import ConfigError
from pscore.net import faults
from pscore.observe.boot import began
from pscore.observe.timeline import require_folder
from pscore.text import is_loopback, join_address
from psserver.copies.copier import UNREACHED, fetch
from psserver.copies.places import place_of
from psserver.durability.journal_dir import TemporaryJournalDir
from psserver.exits import CommandError, Exit
from psserver.logs import setup
from psserver.process import run_dir
from psserver.process.checkpoint_keeper import Keeper
from psserver.process.notify import ServiceManager
from psserver.process.run_dir import FREE, RunDirectory, ShardRun, StartedRun
from psserver.process.settings import Settings, metrics_ports
from psserver.process.shard_plan import FOLDER, SchedulePlan, ShardPlan, with_own_port
from psserver.process.supervisor import SupervisedShard, Supervisor
from psserver.remote.checkpoint_files import newest

log = structlog.get_logger()
READ_RATE = 50e6  # Bytes of checkpoints that a shard reads in a second, at the least.
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The result of a start, for the person who started the shards."""

    servers: str  # `host:port,host:port`, as workers take it.
    hints: list[str]


@dataclass(slots=True, kw_only=True)
class ShardLaunch:
    """One `psserver start`."""

    settings: Settings
    tell: Callable[[Started], None]
    folder: Path | None
    detached: bool
    cluster: str = ""
    is_told: bool = False
    service: ServiceManager = field(init=False)
    keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        """Sets a unique name for a cluster that has none, and finds the service manager."""
        self.cluster = self.settings.server.cluster or secrets.token_hex(4)
        self.keeper = Keeper(self.settings.server.grace_s)
        self.service = ServiceManager.of(self.settings.server.alive_file)

    def run(self) -> Exit:
        """Supervises the shards until they end; raises CommandError if they cannot be started."""
        settings = self.settings
        stream = setup.rotating(self._log_file("supervisor"), settings.log.max_mb)
        setup.configure(settings.log.format, settings.log.level, stream, shard="all")
        state_dir, journals = settings.server.state_dir, None
        if settings.server.durability == "journal" and state_dir is None:
            journals = TemporaryJournalDir(
                f"{self.cluster}-{os.getpid()}"
            )  # Parts may share a cluster.
        self._say_without_checkpoints()
        self._fetch_copies()
        supervisor = Supervisor(
            plans=self._plans(None if journals is None else journals.path),
            log_files=[self._log_file(f"shard-{i}") for i in settings.server.indices],
            restart=settings.server.restart,
            has_spare=settings.server.spare,
            on_ready=self._on_ready,
            on_end=self._on_end,
            before_stop=self._before_stop,
            service=self.service,
        )
        try:
            return supervisor.run()
        finally:
            self.keeper.close()
            if journals is not None:
                journals.remove()

    def _fetch_copies(self) -> None:
        """Brings checkpoints that are lost here back from their second place."""
        folder, place = self._checkpoint_dir(), self.settings.server.checkpoint_copies
        if folder is None or place is None:
            return
        try:
            fetch(Path(folder), place_of(place))
        except UNREACHED as problem:
            if not newest(Path(folder)):
                raise CommandError(
                    Exit.STATE_DIR,
                    f"there is no checkpoint in {folder}, and {place} cannot be read: {problem}; "
                    "repair that, or leave --checkpoint-copies out: then jobs start over",
                ) from problem
            log.error("the second place of checkpoints cannot be read", reason=str(problem))

    def _plans(self, short_lived: Path | None) -> list[ShardPlan]:
        server = self.settings.server
        journal_dir = short_lived
        if server.durability == "journal" and server.state_dir is not None:
            journal_dir = server.state_dir.absolute() / "journal"
        folder = self._checkpoint_dir()
        return [
            ShardPlan(
                index=index,
                num_shards=server.shards,
                cluster=self.cluster,
                host=server.host,
                port=server.port + place if server.port else 0,
                metrics_port=metrics_port,
                data_port=server.data_port + place if server.data_port else 0,
                num_threads=server.threads_each,
                lease_s=server.lease_s,
                grace_s=server.grace_s,
                state_dir=None if server.state_dir is None else str(server.state_dir.absolute()),
                checkpoint_dir=folder,
                loading_s=0.0 if folder is None else _nbytes(Path(folder)) / READ_RATE,
                addresses=server.other_addresses,
                pair=server.pair,
                mends=folder is not None and bool(server.other_addresses),
                trust=server.trust,
                memory_mb=server.memory_mb,
                under_way_mb=server.under_way_mb,
                keep_ended_s=server.keep_ended_s,
                keep_interrupted_s=server.keep_interrupted_s,
                timeline=None if server.timeline is None else str(server.timeline.absolute()),
                journal_dir=_text(journal_dir),
                log_format=self.settings.log.format,
                log_level=self.settings.log.level,
                log_file=_text(self._log_file(f"shard-{index}")),
                log_max_mb=self.settings.log.max_mb,
                publish=server.publish,
                publish_mbit=server.publish_mbit,
                beats=self.service.watchdog_s > 0,
                awaits_last=folder is not None or server.is_saved_elsewhere,
            )
            for place, (index, metrics_port) in enumerate(
                zip(server.indices, metrics_ports(self.settings), strict=True)
            )
        ]

    def _checkpoint_dir(self) -> str | None:
        """Returns where scheduled checkpoints are taken and loaded; None: nowhere."""
        server = self.settings.server
        if server.state_dir is None or not server.takes_checkpoints:
            return None
        return str(server.state_dir.absolute() / FOLDER)

    def _say_without_checkpoints(self) -> None:
        """Warns if there is a state directory, but no checkpoints go into it."""
        server = self.settings.server
        is_wanted = server.state_dir is not None and server.checkpoint_s
        if is_wanted and server.shard_index in (None, 0) and server.why_no_checkpoints:
            log.warning("no scheduled checkpoints", reason=server.why_no_checkpoints)

    def _schedule(self, folder: str, addresses: list[str]) -> SchedulePlan:
        server = self.settings.server
        port = int(addresses[0].rpartition(":")[2])
        others = with_own_port(server.other_addresses, 0, port)
        return SchedulePlan(
            addresses=others or addresses,
            folder=folder,
            every_s=server.checkpoint_s,
            copies=server.checkpoint_copies,
            keep_checkpoints_s=server.keep_checkpoints_s,
            token_file=server.trust.token_file,
            log_format=self.settings.log.format,
            log_level=self.settings.log.level,
            log_file=_text(self._log_file("supervisor")),
            log_max_mb=self.settings.log.max_mb,
        )

    def _on_ready(self, shards: Sequence[SupervisedShard]) -> None:
        run = self._run(shards)
        if (folder := self._checkpoint_dir()) is not None:
            self.keeper.start(lambda: self._schedule(folder, run.addresses).to_json())
        if self.folder is not None:
            self._write(self.folder, run)
        self.service.ready(f"{len(shards)} shard(s) ready at {','.join(run.addresses)}")
        if not self.is_told:
            self.is_told = True
            self.tell(self._started(run))

    def _before_stop(self) -> None:
        self.service.stopping()
        self.keeper.last()

    def _write(self, folder: Path, run: StartedRun) -> None:
        """Writes the run file; without it the shards serve, and commands need their addresses.

        One that is there has the same addresses; its list of processes is of its time.

        Raises:
            CommandError: It is the first of a detached run, which could not be stopped without it.
        """
        try:
            run_dir.write(folder, run)
        except CommandError as problem:
            if self.detached and not self.is_told:
                raise
            log.error("the run file stays as it was", reason=problem.message)

    def _on_end(self) -> None:
        if self.folder is not None:
            run_dir.remove(self.folder)

    def _run(self, shards: Sequence[SupervisedShard]) -> StartedRun:
        server = self.settings.server
        entries = [
            ShardRun(
                index=shard.plan.index,
                pid=None if shard.process is None else shard.process.pid,
                port=shard.plan.port,
                metrics_port=shard.plan.metrics_port,
                log=_text(shard.log_file),
            )
            for shard in shards
        ]
        host = WILDCARDS.get(server.host, server.host)
        return StartedRun(
            pid=os.getpid(),
            began=began(os.getpid()),
            cluster=self.cluster,
            host=server.host,
            port=entries[0].port,
            addresses=[join_address(host, entry.port) for entry in entries],
            grace_s=server.grace_s,
            token_file=server.trust.token_file,
            detached=self.detached,
            supervisor_log=_text(self._log_file("supervisor")),
            shards=entries,
        )

    def _started(self, run: StartedRun) -> Started:
        host = socket.gethostname() if run.host in WILDCARDS else run.host
        servers = ",".join(join_address(host, shard.port) for shard in run.shards)
        scheme = "http" if self.settings.server.tls_cert is None else "https"
        pages = ", ".join(
            f"{scheme}://{join_address(host, shard.metrics_port)}/metrics"
            for shard in run.shards
            if shard.metrics_port is not None
        )
        which = _options(run.port, self.settings.server.state_dir)
        hints = [
            f"shards ready: {self._which()} (cluster {run.cluster}, process {run.pid})",
            "connect: set the variable above for the workers, or pass servers= in the script"
            if self.settings.server.shard_index is None
            else "connect: give workers the addresses of all shards, in the order of their index",
            f"status: psserver status {which}",
            f"stop: psserver stop {which}",
            *self._access(),
        ]
        if is_loopback(run.host):
            hints.append("only this machine reaches the shards; for others: --host ADDRESS")
        if pages:
            hints.append(f"metrics: {pages}")
        if self.detached:
            hints.append(f"logs, in {self.folder}: psserver logs {which}")
        elif self.settings.log.format == "json":
            hints = []  # Standard error is for machines.
        return Started(servers=servers, hints=hints)

    def _access(self) -> list[str]:
        """Returns what clients need besides the addresses."""
        server = self.settings.server
        wanted = []
        if server.tls_cert is not None:
            wanted.append("PACELINE_TLS_CA=ca.pem (the CA that signed --tls-cert)")
        if server.tls_client_ca is not None:
            wanted.append("PACELINE_TLS_CERT and PACELINE_TLS_KEY (a certificate of their own)")
        if server.token_file is not None:
            wanted.append("PACELINE_TOKEN_FILE (the token of their job)")
        if wanted:
            return [f"workers and psserver's commands need {', '.join(wanted)}"]
        if server.insecure:
            return [
                "nothing is checked (--insecure): any process that reaches the port can change "
                "the weights"
            ]
        return []

    def _which(self) -> str:
        server = self.settings.server
        if server.shard_index is None:
            return str(server.shards)
        return f"number {server.shard_index} of {server.shards}"

    def _log_file(self, name: str) -> Path | None:
        return self.folder / f"{name}.log" if self.detached and self.folder is not None else None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _nbytes(folder: Path) -> int:
    """Returns the bytes of the files in the folders of a folder."""
    return sum(path.stat().st_size for path in folder.glob("[!.]*/*") if path.is_file())


def _options(port: int, state_dir: Path | None) -> str:
    """Returns the options by which a command finds a run."""
    folder = "" if state_dir is None else f" --state-dir {shlex.quote(str(state_dir.absolute()))}"
    return f"--port {port}{folder}"


def launch(settings: Settings, *, detach: bool) -> Exit:
    """Starts shards as the settings say; with `detach` returns as soon as they are ready.

    Raises:
        CommandError: They cannot be started.
        ConfigError: A flag would have no effect.
    """
    server = settings.server
    if not detach and settings.origins["log.max_mb"].startswith("flag"):
        raise ConfigError(
            f"--log-max-mb {settings.log.max_mb} has no effect without --detach: log lines go to "
            "standard error"
        )
    faults.from_environment()  # Errors in them are reported here, not by each shard.
    require_folder(server.timeline)
    directory = RunDirectory(server.state_dir)
    for run in directory.runs():
        if run.port == server.port:
            raise CommandError(
                Exit.ALREADY_RUNNING,
                f"psserver already runs on port {run.port} (process {run.pid}, "
                f"{len(run.shards)} shards); stop it with: psserver stop "
                f"{_options(run.port, server.state_dir)}",
            )
        if run.cluster == server.cluster and server.shard_index in [s.index for s in run.shards]:
            sys.stderr.write(
                f"psserver: shard {server.shard_index} of cluster {run.cluster} runs on port "
                f"{run.port} already; a second process of it is for psserver drain or standby, and "
                "another shard needs another --shard-index\n"
            )
    folder = _folder(directory, settings, detach=detach)
    if detach:
        assert folder is not None
        return _detach(settings, folder)
    return ShardLaunch(settings=settings, tell=show, folder=folder, detached=False).run()


def show(started: Started) -> None:
    """Prints the variable that workers read, and the next commands for a person."""
    sys.stdout.write(f"PACELINE_SERVERS={started.servers}\n")
    sys.stdout.flush()
    sys.stderr.write("".join(f"{hint}\n" for hint in started.hints))


def _folder(directory: RunDirectory, settings: Settings, *, detach: bool) -> Path | None:
    """Returns where the run file goes; None if it is optional and cannot be written."""
    server = settings.server
    directory.clear()
    try:
        return directory.make(str(server.port) if server.port else f"{FREE}{os.getpid()}")
    except CommandError as problem:
        if detach or server.state_dir is not None:
            raise
        sys.stderr.write(f"psserver: no run file, so give --servers to status: {problem}\n")
        return None


def _detach(settings: Settings, folder: Path) -> Exit:
    """Leaves the supervisor behind in a session of its own, once the shards are ready."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _be_supervisor(settings, folder, write_fd)
    os.close(write_fd)
    with os.fdopen(read_fd, encoding="utf-8") as pipe:
        try:
            line = pipe.readline()
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            raise
    if not line:
        raise CommandError(
            Exit.SHARD_DIED, f"the supervisor ended early; see {folder / 'supervisor.log'}"
        )
    values = json.loads(line)
    if "code" in values:
        raise CommandError(Exit(values["code"]), values["message"])
    try:
        show(Started(**values))
    except OSError:  # Nobody has read where they are.
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    return Exit.OK


def _be_supervisor(settings: Settings, folder: Path, write_fd: int) -> None:
    """Runs the detached process; does not return."""

    def tell(started: Started) -> None:
        answer({"servers": started.servers, "hints": started.hints})

    def answer(values: dict[str, object]) -> None:
        os.write(write_fd, (json.dumps(values) + "\n").encode())
        os.close(write_fd)

    os.setsid()
    log_fd = os.open(folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null_fd = os.open(os.devnull, os.O_RDWR)
    for target, fd in ((0, null_fd), (1, null_fd), (2, log_fd)):
        os.dup2(fd, target)
    code = Exit.BUG
    try:
        code = ShardLaunch(settings=settings, tell=tell, folder=folder, detached=True).run()
    except CommandError as problem:
        log.error("start failed", reason=problem.message)
        answer({"code": int(problem.code), "message": problem.message})
        code = problem.code
    finally:
        if code is Exit.BUG:
            sys.excepthook(*sys.exc_info())
        os._exit(code)
