"""`psserver relay`: one process that reads a job's published weights, and serves them to others.

It has one port for each shard of the job, so readers name it as they would name the shards. It
keeps nothing on the disk: a relay that is started again gives each reader whole weights once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from pscore.errors import PacelineError
from pscore.net import descriptors
from pscore.net.rpc import CONNECTIONS_MAX
from pscore.pb.ps.v1 import control_pb2_grpc, publish_pb2_grpc
from pscore.subscription.reader import Reader
from pscore.text import join_address
from pscore.threads import OwnedThread
from psserver.access.authorizer import AuthInterceptor
from psserver.access.files import Trust
from psserver.decisions.shard import Shard
from psserver.engine.engine import Engine
from psserver.process.ports import bind_server, binding, make_server
from psserver.publish.relayed import RelayedVersions, RelayShard
from psserver.service.callers import GRPC_SHARE, Callers, defer_silent
from psserver.service.data_socket import make_listener
from psserver.service.metrics import REQUEST_S_MAX, MetricsPage
from psserver.service.publications import ReadersServicer
from psserver.service.publish_metrics import PublicationCollector
from psserver.service.refusals import ErrorInterceptor
from psserver.service.relay_control import RelayControl
from psserver.service.web import WebServer

log = structlog.get_logger()
TICK_S = 1.0
WAIT_S = 1.0  # One wait for a version; then the relay looks whether it ends.
LEASE_S = 10.0  # A lease of workers: there are none here.
END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlan:
    """The settings of a relay."""

    servers: Sequence[str]  # Addresses of all shards, or of another relay, in order.
    job: str
    table: str
    host: str  # Address to listen on.
    port: int  # Port of shard 0, the others follow; 0: free ones.
    trust: Trust
    rate: int  # Most bytes per second to all readers on other hosts; 0: no limit.
    data_port: int = 0  # Of shard 0's data sockets, the others follow; 0: free ones.
    metrics_port: int | None = None  # None: no metrics page; 0: a free port.


class RelayProcess:
    """A relay that listens."""

    def __init__(self, plan: RelayPlan) -> None:
        """Prepares everything; must be called inside the event loop.

        Raises:
            ConfigError: An argument or file is wrong.
        """
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._is_over = threading.Event()
        self._problem: BaseException | None = None
        self._authorizer = plan.trust.authorizer()
        descriptors_each = descriptors.limit() // len(plan.servers)
        self._connections_max = min(CONNECTIONS_MAX, descriptors_each // GRPC_SHARE)
        self._callers: list[Callers] = []  # The peers on the port of each shard.
        self._name = f"paceline-relay-{secrets.token_hex(8)}"
        self._versions = RelayedVersions(
            plan.job, plan.table, len(plan.servers), time.monotonic, plan.rate
        )
        self._reader = Reader(
            plan.servers,
            job=plan.job,
            table=plan.table,
            dtype="bf16",
            token_file=plan.trust.token_file,
            follower=self._versions,
        )

    async def run(self) -> None:
        """Serves until a signal ends it.

        Raises:
            CommandError: A port cannot be bound.
            PacelineError: A shard refuses this reader.
        """
        threading.excepthook = self._on_thread  # Also of connections to readers.
        async with contextlib.AsyncExitStack() as stack:
            page = await self._show_metrics(stack)
            ports = [await self._serve(shard, stack) for shard in self._versions.shards]
            addresses = ",".join(join_address(self._plan.host, port) for port in ports)
            sys.stdout.write(f"PACELINE_SERVERS={addresses}\n{page}")
            sys.stdout.flush()
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._ending.set)
            thread = OwnedThread(self._read, "relay", self._broke)
            thread.start()
            stack.push_async_callback(asyncio.to_thread, thread.join, END_S)
            stack.callback(self._is_over.set)
            while not self._ending.is_set():
                for shard in self._versions.shards:
                    shard.forget_silent()
                for port, callers in zip(ports, self._callers, strict=True):
                    await asyncio.to_thread(callers.make_room, port)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), TICK_S)
        if self._problem is not None:
            raise self._problem

    async def _show_metrics(self, stack: contextlib.AsyncExitStack) -> str:
        """Serves the page for Prometheus until the stack is closed; returns a line about it."""
        plan = self._plan
        if plan.metrics_port is None:
            return ""
        parts = [PublicationCollector(*self._versions.shards)]
        page = MetricsPage(None, lambda: True, self._authorizer, parts=parts)
        web = WebServer(
            page.answer, seconds_max=REQUEST_S_MAX, context=plan.trust.context(mutual=False)
        )
        with binding(plan.host, plan.metrics_port, "--metrics-port"):
            port = await web.start(plan.host, plan.metrics_port)
        assert web.accepting is not None
        web.accepting.add_done_callback(self._end_page)
        stack.push_async_callback(web.stop)
        scheme = "http" if plan.trust.cert is None else "https"
        return f"metrics: {scheme}://{join_address(plan.host, port)}/metrics\n"

    async def _serve(self, shard: RelayShard, stack: contextlib.AsyncExitStack) -> int:
        """Serves one shard of the relay until the stack is closed; returns its port."""
        plan, index = self._plan, self._versions.shards.index(shard)
        engine = Engine(Shard(index, len(plan.servers), LEASE_S), now=time.monotonic)
        data_port = plan.data_port + index if plan.data_port else 0
        with binding(plan.host, data_port, "--data-port"):
            data = make_listener(
                engine,
                plan.host,
                data_port,
                f"{self._name}-{index}",
                authorizer=self._authorizer,
                context=plan.trust.context(),
                fetches=shard,
            )
        stack.callback(data.stop)
        callers = Callers(self._connections_max, needs_token=not self._authorizer.is_open)
        self._callers.append(callers)
        interceptors = [
            AuthInterceptor(self._authorizer, engine.heard),
            ErrorInterceptor(self._broke, callers.note_call),
        ]
        server = make_server(interceptors, self._connections_max)
        # Methods that they lack are refused (refusals.py).
        control = RelayControl(index, len(plan.servers), data)  # type: ignore[abstract]
        readers = ReadersServicer(shard)  # type: ignore[abstract]
        control_pb2_grpc.add_ControlServicer_to_server(control, server)
        publish_pb2_grpc.add_PublicationsServicer_to_server(readers, server)
        number = plan.port + index if plan.port else 0
        port = bind_server(server, plan.host, number, plan.trust, "--listen")
        await server.start()
        defer_silent(port)
        stack.push_async_callback(server.stop, None)
        data.start()
        return port

    def _read(self) -> None:
        """Reads version after version, on a thread of its own."""
        newest, said = None, ""
        try:
            while not self._is_over.is_set():
                try:
                    newest = self._reader.wait(newer_than=newest, timeout_s=WAIT_S).version
                except TimeoutError as problem:
                    self._versions.say(str(problem))
                    if newest is None and said != str(problem):
                        said = str(problem)
                        sys.stderr.write(f"psserver: {said}; waiting\n")
            self._reader.close()
        except PacelineError as problem:
            self._broke(problem)

    def _end_page(self, accepting: asyncio.Task[None]) -> None:
        if not accepting.cancelled() and (problem := accepting.exception()) is not None:
            self._broke(problem)

    def _on_thread(self, failed: threading.ExceptHookArgs) -> None:
        assert failed.exc_value is not None
        self._broke(failed.exc_value)

    def _broke(self, problem: BaseException) -> None:
        """Ends the process; may be called from any thread."""
        self._problem = problem
        self._loop.call_soon_threadsafe(self._ending.set)


def run_relay(plan: RelayPlan) -> None:
    """Relays until a signal ends it.

    Raises:
        CommandError: A port cannot be bound.
        PacelineError: An argument is wrong, or a shard refuses this reader.
    """

    async def run() -> None:
        await RelayProcess(plan).run()

    asyncio.run(run())
