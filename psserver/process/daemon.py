"""One shard's process: binds, serves, reports, and ends in order.

It ends when it gets SIGTERM or SIGINT, when a Drain request comes, or when its parent is gone: the
supervisor holds the other end of standard input. Ending means: no new requests, those under way are
answered, exit code 0. A broken invariant ends it too, at once and with a log line: other shards
continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

os.environ.setdefault(
    "GRPC_VERBOSITY", "NONE"
)  # Our own message explains why a port cannot be bound.

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pscore.compressors import COMPRESSORS
from pscore.errors import ConfigError, PacelineError
from pscore.net import descriptors
from pscore.net.credentials import read_credentials
from pscore.net.listener import Listener
from pscore.net.rpc import CONNECTIONS_MAX
from pscore.observe import spans
from pscore.observe.timeline import open_timeline
from pscore.optimizers import OPTIMIZERS
from pscore.pb.ps.v1 import (
    checkpoint_pb2_grpc,
    control_pb2_grpc,
    publish_pb2_grpc,
    standby_pb2_grpc,
)
from pscore.registry import Registry
from pscore.rules import RULES
from pscore.text import join_address
from psserver.access.authorizer import AuthInterceptor
from psserver.decisions.shard import Shard
from psserver.durability.journal_dir import LOCK, JournalDir, Lock
from psserver.engine.engine import Engine
from psserver.engine.placement import Placement
from psserver.engine.resume import recover
from psserver.exits import CommandError, Exit
from psserver.logs import setup
from psserver.process.checkpoint_loading import bring, load
from psserver.process.moves import ShardMoves
from psserver.process.ports import bind_server, binding, make_server
from psserver.process.shard_plan import (
    ENDING,
    Ready,
    Refused,
    Report,
    ShardPlan,
    parse_every,
    report_to_json,
    with_own_port,
)
from psserver.process.spare import SPARE, await_plan, leave_deleted_folder
from psserver.publish.publications import Publications
from psserver.remote.checkpoint_files import Checkpoint, set_aside
from psserver.service.callers import GRPC_SHARE, Callers, defer_silent
from psserver.service.checkpoint_service import Checkpointer
from psserver.service.control import ControlServicer, data_handler
from psserver.service.data_socket import make_listener
from psserver.service.last_checkpoint import LastCheckpoint
from psserver.service.metrics import REQUEST_S_MAX, Identity, MetricsPage
from psserver.service.publications import PublicationsServicer
from psserver.service.publish_metrics import PublicationCollector
from psserver.service.refusals import ErrorInterceptor
from psserver.service.standby_metrics import StandbyCollector
from psserver.service.web import WebServer

log = structlog.get_logger()

TICK_S = 1.0
LATE_S = 2 * TICK_S  # Without a tick for longer, this process was stopped itself, and heard nobody.
WINDOW_TICK_S = 0.02  # The grain of the windows of rounds with a quorum.
NO_WINDOW_TICK_S = 0.5  # Without a table that has windows: a new one is noticed after so long.
MBIT_NBYTES = 125_000
ROOM_S = 0.1  # Between two looks at the connections of strangers.
BRING_S_MIN, BRING_S_MAX = 0.2, 10.0  # Pauses before another attempt.
FINISH_S = 2.0  # For requests under way when the last checkpoint has taken all of the grace.
QUIET_S = 0.3  # No queue at work for so long: an open request then waits for others.
POLL_S = 0.05
MOMENT_S = 0.002
STATUS = health_pb2.HealthCheckResponse
NAMES = ("", "liveness", "readiness")


class Daemon:
    """One shard that listens."""

    def __init__(self, plan: ShardPlan) -> None:
        """Makes the shard; nothing is bound yet. Must be called inside the event loop."""
        self.plan = plan
        self.code = Exit.OK  # The exit code so far.
        self._loop = asyncio.get_running_loop()
        self._is_short = False  # Whether descriptors are short: connections are refused.
        self._ending = asyncio.Event()
        self._last = LastCheckpoint()
        self.grace_s = plan.grace_s  # Seconds that requests under way may take at the end.
        self._parent = os.getppid()
        self._claim = _claim(plan)
        self._journals = _open_journals(plan)
        self._timeline = open_timeline(plan.timeline, "shard", plan.index)
        self._executor = ThreadPoolExecutor(plan.num_threads, thread_name_prefix="slice-queue")
        self.engine = Engine(
            Shard(plan.index, plan.num_shards, plan.lease_s, plan.limits),
            now=time.monotonic,
            executor=self._executor,
            placement=Placement.for_cores(plan.num_threads),
            journals=self._journals,
            broke=self.broke,
            timeline=self._timeline,
        )
        self._publications = Publications(
            self.engine,
            parse_every(plan.publish),
            executor=self._executor,
            rate=plan.publish_mbit * MBIT_NBYTES,
        )
        self._authorizer = plan.trust.authorizer()
        self._connections_max = min(CONNECTIONS_MAX, descriptors.limit() // GRPC_SHARE)
        self._moves = ShardMoves(plan, self.engine, self._journals, self._took_over)
        self._moves.stop_data, self._moves.start_data = self.close, self._start_data
        # The peers on its port of gRPC.
        self.callers = Callers(self._connections_max, needs_token=not self._authorizer.is_open)
        self._instance = secrets.randbits(63)
        self._data: Listener | None = None
        self._addresses: list[str] = []  # Addresses of all shards, once ours is known.
        self._to_bring: dict[str, Checkpoint] = {}  # Loaded jobs that other shards may lack.
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        identity = Identity(cluster=plan.cluster, certificate_end_s=plan.trust.ends_s())
        page = MetricsPage(
            self.engine,
            lambda: self.is_ready,
            self._authorizer,
            identity,
            [PublicationCollector(self._publications), StandbyCollector(lambda: self._moves.view)],
        )
        self._web = WebServer(
            page.answer, seconds_max=REQUEST_S_MAX, context=plan.trust.context(mutual=False)
        )

    def _make_server(self) -> grpc.aio.Server:
        interceptors = [
            self._moves.signpost,
            *spans.interceptors("psserver"),
            AuthInterceptor(self._authorizer, self.engine.heard),
            ErrorInterceptor(self.broke, self.callers.note_call),
        ]
        server = make_server(interceptors, self._connections_max)
        server.add_generic_rpc_handlers((data_handler(self.engine, self._authorizer),))
        self._servicer = ControlServicer(
            self.engine,
            self.plan.cluster,
            self._instance,
            self.drain,
            self._data,
            partial(_set_aside, self.plan.checkpoint_dir),
        )
        self._servicer.mends = self.plan.mends
        self._servicer.moving = lambda: self._moves.text
        self._servicer.stands_by = lambda: self._moves.view.stands_by
        self._servicer.shares_memory = lambda: self._moves.view.shares_memory
        self._servicer.tell_readers = self._publications.announce
        self._moves.control = self._servicer
        standby_pb2_grpc.add_StandbyServicer_to_server(self._moves.servicer(), server)
        if self._to_bring:
            self._servicer.closed = "it first sends the newest checkpoints to the other shards"
        control_pb2_grpc.add_ControlServicer_to_server(self._servicer, server)
        checkpoint_pb2_grpc.add_CheckpointsServicer_to_server(
            Checkpointer(self.engine, self._last), server
        )
        published = PublicationsServicer(self.engine, self._publications, self._servicer.locate)
        publish_pb2_grpc.add_PublicationsServicer_to_server(published, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server

    def _make_listener(self) -> Listener:
        """Binds the data sockets to their port; workers learn it from this shard."""
        local = f"paceline-{self.plan.cluster}-{self.plan.index}-{self._instance:x}"
        with binding(self.plan.host, self.plan.data_port, "--data-port"):
            return make_listener(
                self.engine,
                self.plan.host,
                self.plan.data_port,
                local,
                authorizer=self._authorizer,
                context=self.plan.trust.context(),
                fetches=self._publications,
            )

    async def start(self) -> Ready:
        """Binds, and answers from then on; a thread that fails ends the process.

        Raises:
            CommandError: A port cannot be bound; the message names it and the reason.
        """
        threading.excepthook = self._on_thread
        with spans.span("psserver", "restore", shard=self.plan.index):
            self._restore()
        self._data = self._make_listener()
        self._server = self._make_server()
        host, trust = self.plan.host, self.plan.trust
        self._port = port = bind_server(self._server, host, self.plan.port, trust, "--port")
        self._addresses = with_own_port(self.plan.addresses, self.plan.index, port)
        own = self.plan.pair.own if self.plan.pair is not None else ""
        self._moves.address = own or join_address(socket.gethostname(), port)
        metrics_port = None
        if self.plan.metrics_port is not None:
            with binding(self.plan.host, self.plan.metrics_port, "--metrics-port"):
                metrics_port = await self._web.start(self.plan.host, self.plan.metrics_port)
        for name in NAMES:
            await self._health.set(name, STATUS.SERVING)
        await self._server.start()
        defer_silent(port)
        self._data.start()
        self._moves.resume()
        log.info("shard ready", address=join_address(self.plan.host, port))
        return Ready(port=port, metrics_port=metrics_port)

    async def run(self, ready: Ready) -> None:
        """Reports, serves until asked to end, then lets the requests under way be answered."""
        self._watch()
        tell(ready)
        duties = (self._tick(), self._tick_windows(), self._bring(), self.keep_room())
        tasks = [asyncio.create_task(duty) for duty in duties]
        for task in (*tasks, *filter(None, [self._web.accepting])):
            task.add_done_callback(self._check)
        await self._ending.wait()
        if self.plan.awaits_last and self.engine.jobs and self.code is not Exit.BUG:
            await self._await_last()
        for task in tasks:
            task.cancel()
        if self.code is not Exit.BUG:
            await self.end()

    async def _await_last(self) -> None:
        """Serves as before while the last checkpoint is taken, and leaves the rest of the grace."""
        if not self._last.is_over:
            log.info("shard serves until a last checkpoint is over", limit_s=self.plan.grace_s)
        began_s = self._loop.time()
        await self._last.wait(self.plan.grace_s)
        waited_s = self._loop.time() - began_s
        self.grace_s = max(self.grace_s - waited_s, min(self.grace_s, FINISH_S))

    async def end(self) -> None:
        """Refuses new requests, and returns when those under way are answered."""
        log.info("shard draining", grace_s=self.grace_s)
        for name in ("", "readiness"):
            await self._health.set(name, STATUS.NOT_SERVING)
        is_over = await self._finish()
        await self._web.stop()
        if self._timeline is not None:
            self._timeline.write()
        spans.flush("psserver")
        if self.plan.state_dir is None:
            self.engine.recovery.remove()
        elif is_over and self._journals is not None:
            seal(self._journals)
        log.info("shard ended")

    @property
    def is_ready(self) -> bool:
        """Whether the shard accepts new connections."""
        return not (self._ending.is_set() or self._is_short)

    def drain(self, grace_s: float) -> float:
        """Ends the process in order, with `grace_s` seconds at most for requests under way.

        Returns:
            The seconds after which it has ended, with those for a last checkpoint.
        """
        self.grace_s = min(max(grace_s, 0.0), self.plan.grace_s)
        say(ENDING)
        if self.plan.checkpoint_dir is not None:  # The parent sends SIGINT when that is over.
            self._last.note(is_over=False)
        self._ending.set()
        return self.plan.grace_s + self.grace_s

    def _end_now(self) -> None:
        """Ends the process in order: no last checkpoint is to come."""
        self._last.note(is_over=True)
        self._ending.set()

    def broke(self, problem: BaseException) -> None:
        """Ends the process at once: an invariant is broken. May be called from any thread."""
        log.error(
            "an invariant of the shard broke and the shard ends; this is a bug in Paceline",
            exc_info=problem,
        )
        self.code = Exit.BUG
        self._loop.call_soon_threadsafe(self._ending.set)

    def _watch(self) -> None:
        """Ends on a signal, or when the parent has closed our standard input.

        The parent sends SIGINT once it has the last checkpoint. SIGTERM may come from an engine
        that sends it to all processes.
        """
        self._loop.add_signal_handler(signal.SIGINT, self._end_now)
        self._loop.add_signal_handler(signal.SIGTERM, self._ending.set)
        self._loop.add_reader(sys.stdin.fileno(), self._on_stdin)

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 1 << 10):
            self._loop.remove_reader(sys.stdin.fileno())
            self._end_now()

    async def _tick(self) -> None:
        ticked_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            if not self._moves.is_frozen:
                now_s = time.monotonic()
                self.engine.tick(max(0.0, now_s - ticked_s - LATE_S))
                ticked_s = now_s
                self._publications.tick()
                await self.check_readiness()
            if self.plan.beats:
                say("")  # A sign of life.
            setup.tell_left_out()
            leave_deleted_folder()
            self._moves.check()
            # A process that the parent forked may keep our standard input open after its death.
            if os.getppid() != self._parent:
                self._end_now()

    async def _tick_windows(self) -> None:
        while True:
            has_windows = not self._moves.is_frozen and self.engine.tick_windows()
            await asyncio.sleep(WINDOW_TICK_S if has_windows else NO_WINDOW_TICK_S)

    async def keep_room(self) -> None:
        """Closes connections of strangers to gRPC while there are too many."""
        while True:
            await asyncio.sleep(ROOM_S)
            # Not on the loop, which would get the GIL back after each of its many calls.
            num_closed = await asyncio.to_thread(self.callers.make_room, self._port)
            if num_closed:
                setup.sparsely("connections of strangers closed: too many", number=num_closed)

    async def check_readiness(self) -> None:
        """Sets the health service, and logs a change: whether new connections can be accepted."""
        data_is_well = self._data is None or self._data.is_well
        is_short = not (data_is_well and descriptors.are_there_any())
        if is_short == self._is_short or self._ending.is_set():
            return
        self._is_short = is_short
        for name in ("", "readiness"):
            await self._health.set(name, STATUS.NOT_SERVING if is_short else STATUS.SERVING)
        if is_short:
            log.error(
                "shard not ready: it cannot accept connections",
                descriptors=descriptors.limit(),
                do=(
                    "raise the limit (ulimit -n, LimitNOFILE=), or find the process that holds "
                    "connections open"
                ),
            )
        else:
            log.warning("shard ready again")

    def _restore(self) -> None:
        """Resumes the jobs in the journals of this shard's previous process."""
        if not self._moves.take_over():
            if self._moves.is_frozen:  # The shard is another process's.
                return
            for name in recover(self.engine):
                log.warning("job continues where it was", job=name)
            self._publications.begin()
        if self._journals is not None:
            self._instance = self._journals.instance
        if self.plan.checkpoint_dir is None:
            return
        journals = None if self._journals is None else self._journals.folder
        loaded = load(self.engine, Path(self.plan.checkpoint_dir), journals)
        if self.plan.addresses:
            self._to_bring = loaded

    def _took_over(self) -> None:
        """Serves as the shard whose journals have been moved here."""
        assert self._journals is not None
        self._publications.begin()
        self._instance = self._journals.instance
        if self._moves.control is None:
            return  # The data sockets are opened later.
        if self._data is None:  # The shard had moved away from here.
            self._start_data()
        else:
            self._moves.control.serve_as(self._instance, self._data)

    def _start_data(self) -> None:
        """Opens the data sockets again, which a move had closed."""
        self._data = self._make_listener()
        assert self._moves.control is not None
        self._moves.control.serve_as(self._instance, self._data)
        self._data.start()

    async def _bring(self) -> None:
        """Sends the other shards their parts of loaded jobs, and then admits workers."""
        pause_s = BRING_S_MIN
        while self._to_bring:
            try:
                credentials = read_credentials(token_file=self.plan.trust.token_file)
                await asyncio.to_thread(bring, self._addresses, credentials, self._to_bring)
            except PacelineError as problem:
                log.warning(
                    "workers wait until all shards have the checkpoints", reason=str(problem)
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BRING_S_MAX)
            else:
                self._to_bring = {}
        self._servicer.closed = ""

    def _on_thread(self, failed: threading.ExceptHookArgs) -> None:
        assert failed.exc_value is not None
        self.broke(failed.exc_value)

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (problem := task.exception()) is not None:
            self.broke(problem)

    async def _finish(self) -> bool:
        """Stops the servers when nothing moves any more, or when the grace period is over.

        Returns:
            Whether nothing can change the weights from now on.
        """
        deadline_s = self._loop.time() + self.grace_s
        stopping = asyncio.create_task(self._server.stop(self.grace_s))
        quiet_s = 0.0
        while not stopping.done() and quiet_s < QUIET_S:
            await asyncio.wait([stopping], timeout=POLL_S)
            quiet_s = 0.0 if self.engine.is_busy else quiet_s + POLL_S
        await self._server.stop(0)
        await stopping
        while self.engine.is_busy and self._loop.time() < deadline_s:
            await asyncio.sleep(MOMENT_S)
        have_ended = self.close()
        return have_ended and not self.engine.is_busy

    def close(self) -> bool:
        """Ends the data connections; returns whether no thread handles one any more."""
        data, self._data = self._data, None
        return data is None or data.stop()


def folder_name(plan: ShardPlan) -> str:
    """Returns the name of a shard's folder, so that no other shard takes up what is in it."""
    return f"shard-{plan.index}-of-{plan.num_shards}"


def seal(journals: JournalDir) -> None:
    """Makes journals survive the machine, as far as the disk allows it."""
    try:
        journals.seal()
    except OSError as problem:
        log.error(
            "the journals are not on the disk: after a restart of the machine the newest "
            "checkpoint counts",
            reason=str(problem),
        )


@contextlib.contextmanager
def _folder_of(plan: ShardPlan, root: str, what: str, advice: str) -> Iterator[Path]:
    """Yields the folder of a shard in another one."""
    folder = Path(root) / folder_name(plan)
    try:
        yield folder
    except BlockingIOError as problem:
        raise CommandError(
            Exit.ALREADY_RUNNING,
            f"another process of shard {plan.index} uses {folder}; stop it first, or give another "
            "--state-dir",
        ) from problem
    except OSError as problem:
        raise CommandError(
            Exit.STATE_DIR, f"cannot {what} {folder}: {problem}; give another --state-dir{advice}"
        ) from problem


def _claim(plan: ShardPlan) -> Lock | None:
    """Keeps other processes of this shard out of the state directory, if there is one."""
    if plan.state_dir is None:
        return None
    with _folder_of(plan, plan.state_dir, "use", "") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        return Lock(folder / LOCK)


def _open_journals(plan: ShardPlan) -> JournalDir | None:
    """Opens where this shard keeps its journals, if it keeps any."""
    if plan.journal_dir is None:
        return None
    advice = ", or --durability memory"
    with _folder_of(plan, plan.journal_dir, "keep journals in", advice) as folder:
        return JournalDir(folder)


def _set_aside(folder: str | None, job: str) -> str:
    """Moves the checkpoints of a forgotten job aside; returns where they are, or nothing.

    Raises:
        ConfigError: They cannot be moved.
    """
    try:
        moved = None if folder is None else set_aside(Path(folder), job)
    except OSError as problem:
        raise ConfigError(
            f"job {job!r} is forgotten, but its checkpoints in {folder} cannot be moved aside: "
            f"{problem}; move them away, or the next start loads them"
        ) from problem
    return "" if moved is None else str(moved)


async def serve(plan: ShardPlan) -> Exit:
    """Runs one shard until it ends; returns the exit code."""
    daemon: Daemon | None = None
    try:
        daemon = Daemon(plan)
        ready = await daemon.start()
    except CommandError as refusal:
        if daemon is not None:
            daemon.close()
        tell(Refused(code=refusal.code, message=refusal.message))
        return refusal.code
    except ConfigError as problem:  # A file of secrets has changed since the start was checked.
        tell(Refused(code=Exit.USAGE, message=str(problem)))
        return Exit.USAGE
    await daemon.run(ready)
    return daemon.code


def tell(report: Report) -> None:
    """Reports to the supervisor."""
    say(report_to_json(report))


def say(word: str) -> None:
    """Writes a line to the supervisor, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{word}\n")
        sys.stdout.flush()


def log_crash(
    kind: type[BaseException], problem: BaseException, trace: TracebackType | None
) -> None:
    """Logs an exception that no other code has caught, and ends the process."""
    log.error("shard crashed; this is a bug in Paceline", exc_info=problem)
    os._exit(Exit.BUG)


def import_plugins() -> None:
    """Imports the plug-ins of other packages, so that no message leads to an import later."""
    registries: tuple[Registry[Any], ...] = (RULES, COMPRESSORS, OPTIMIZERS)
    for registry in registries:
        for name, brought in registry.installed.items():
            known = {"kind": registry.kind, "plugin": name, "package": brought.package}
            if brought.problem:
                log.error("a plug-in cannot be used", **known, reason=brought.problem)
            else:
                log.info("plug-in of another package", **known, digest=brought.digest)


def main(text: str) -> None:
    """Runs the process of one shard.

    Args:
        text: Its plan as JSON; `SPARE`: standard input will bring it.
    """
    plan = await_plan() if text == SPARE else ShardPlan.from_json(text)
    if plan is None:
        os._exit(Exit.OK)
    with contextlib.suppress(OSError):  # The name that `top` and `ps` show.
        Path("/proc/self/comm").write_text(f"shard-{plan.index}-of-{plan.num_shards}")
    stream = setup.rotating(plan.log_file, plan.log_max_mb)
    setup.configure(plan.log_format, plan.log_level, stream, shard=plan.index)
    sys.excepthook = log_crash
    descriptors.raise_limit()
    import_plugins()
    code = asyncio.run(serve(plan))
    with contextlib.suppress(OSError):  # The disk may be full.
        sys.stderr.flush()
    os._exit(code)  # Without waiting for threads: of slices that are stuck, or connections.
