"""The metrics page over a shard in this process."""

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pscore.net import tls
from pscore.types import Verdict
from psserver.access import certs
from psserver.decisions.directory import PeerReport
from psserver.decisions.membership import Member
from psserver.decisions.shard import Shard
from psserver.decisions.worker_reports import ReportedPace, StageReport
from psserver.engine.engine import Engine
from psserver.publish.publications import Publications
from psserver.service.metrics import MetricsPage, ShardCollector
from psserver.service.publish_metrics import PublicationCollector
from psserver.service.standby_metrics import StandbyCollector, StandbyView
from psserver.service.web import REQUEST_NBYTES_MAX, WebServer
from scripts import grafana

WAIT_S = 200.0


def make_engine() -> Engine:
    engine = Engine(Shard(1, 3, lease_s=10.0), now=lambda: 0.0)
    for rank in range(2):
        member = Member(rank=rank, incarnation=1, restart=0, host="h", pid=1, heard_s=0.0)
        engine.join("train", 2, member)
    engine.leave("train", 1, 1, "done")
    return engine


async def ask(page: MetricsPage, *requests: bytes) -> list[bytes]:
    server = WebServer(page.answer, seconds_max=WAIT_S)
    port = await server.start("127.0.0.1", 0)
    answers = []
    for request in requests:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answers.append(await reader.read())
        writer.close()
    await server.stop()
    return answers


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode()


class HeldAnswer:
    """An answer that is made once `may_end` is set."""

    def __init__(self) -> None:
        self.asked, self.may_end = asyncio.Event(), asyncio.Event()

    async def answer(self, request: Request) -> Response:
        self.asked.set()
        await self.may_end.wait()
        return PlainTextResponse("here")


def samples(body: str) -> dict[str, float]:
    return {
        " ".join([sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))]): (
            sample.value
        )
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def test_the_page_shows_the_tally_and_the_shard() -> None:
    engine = make_engine()
    counters = engine.counters
    for verdict, count in ((Verdict.ACCEPTED, 5), (Verdict.TOO_LATE, 1)):
        for _ in range(count):
            counters.pushed("train", verdict)
    counters.pushed("ended", Verdict.ACCEPTED)
    counters.num_pushes_refused = 2
    values = {"loss": 0.5, "bad": float("nan"), "x" * 41: 1.0, "two words": 1.0}
    engine.jobs["train"].heartbeat(0, "", {}, values)
    for number in range(10):
        counters.pulled("train", is_answered=number < 7)
    counters.pulled("ended", is_answered=True)
    counters.received_nbytes, counters.sent_nbytes, counters.num_updates = 100, 200, 4
    counters.staleness.observe(3)
    counters.times_s.append(2e-3)
    (answer,) = asyncio.run(ask(MetricsPage(engine, lambda: True), get("/metrics")))
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    shown = samples(body)
    assert {
        "paceline_push_requests_total job=train verdict=accepted": 5,
        "paceline_push_requests_total job=train verdict=too_late": 1,
        "paceline_push_requests_total job= verdict=accepted": 1,
        "paceline_push_requests_total job= verdict=refused": 2,
        "paceline_pull_requests_total answer=weights job=train": 7,
        "paceline_pull_requests_total answer=not_yet job=train": 3,
        "paceline_pull_requests_total answer=weights job=": 1,
        "paceline_wire_bytes_total direction=received": 100,
        "paceline_wire_bytes_total direction=sent": 200,
        "paceline_updates_total": 4,
        "paceline_staleness_steps_bucket le=2": 0,
        "paceline_staleness_steps_bucket le=4": 1,
        "paceline_staleness_steps_bucket le=+Inf": 1,
        "paceline_staleness_steps_sum": 3,
        "paceline_apply_seconds_bucket le=0.001": 0,
        "paceline_apply_seconds_bucket le=0.003": 1,
        "paceline_apply_seconds_count": 1,
        "paceline_jobs": 1,
        "paceline_workers_live job=train": 1,
        "paceline_reported job=train name=loss worker=0": 0.5,
    }.items() <= shown.items()
    assert sum(name.startswith("paceline_reported") for name in shown) == 1
    assert not any("job=ended" in name for name in shown)
    (build,) = [name for name in shown if name.startswith("paceline_build_info")]
    assert "num_shards=3" in build
    assert "shard=1" in build
    assert "process_resident_memory_bytes" in shown


def test_the_page_shows_the_jobs_and_the_pace_of_live_workers() -> None:
    engine = make_engine()
    pace = ReportedPace(
        num_steps=4, steps_s=2.0, waits_s=0.25, requests_s=1.0, step_s=0.5, round_steps=12
    )
    peers = [
        PeerReport(
            table=0, step=9, partner=1, age_s=0.5, staleness=2, distance=0.125, num_exchanges=7
        )
    ]
    stage = StageReport(
        stage=1,
        replica=0,
        minibatch=12,
        version=11,
        in_flight=1,
        activation_nbytes=96,
        versions_held=2,
        waits_s=0.75,
    )
    view = engine.jobs["train"].heartbeat(0, "", {}, {}, peers, pace=pace, stage=stage)
    assert view.fastest_step_s == 0.5
    counters = engine.shard.jobs["train"].counters
    counters.pushed_nbytes, counters.raw_pushed_nbytes = 10, 160
    engine.budget.take(50, "a push")
    (answer,) = asyncio.run(ask(MetricsPage(engine, lambda: True), get("/metrics")))
    shown = samples(answer.decode().partition("\r\n\r\n")[2])
    assert {
        "paceline_worker_step_seconds_count job=train worker=0": 4,
        "paceline_worker_step_seconds_sum job=train worker=0": 2.0,
        "paceline_worker_pull_wait_seconds_total job=train worker=0": 0.25,
        "paceline_worker_request_seconds_total job=train worker=0": 1.0,
        "paceline_worker_hidden_ratio job=train worker=0": 0.75,
        "paceline_worker_round_steps job=train worker=0": 12,
        "paceline_peer_exchanges_total job=train table=0 worker=0": 7,
        "paceline_peer_partner job=train table=0 worker=0": 1,
        "paceline_peer_answer_age_seconds job=train table=0 worker=0": 0.5,
        "paceline_peer_staleness_mixes job=train table=0 worker=0": 2,
        "paceline_consensus_distance job=train table=0 worker=0": 0.125,
        "paceline_stage_minibatch job=train stage=1 worker=0": 12,
        "paceline_stage_version job=train stage=1 worker=0": 11,
        "paceline_stage_in_flight job=train stage=1 worker=0": 1,
        "paceline_stage_activation_bytes job=train stage=1 worker=0": 96,
        "paceline_stage_wait_seconds_total job=train stage=1 worker=0": 0.75,
        "paceline_worker_step job=train worker=0": 0,
        "paceline_worker_staleness_steps job=train worker=0": 0,
        "paceline_waited_for_seconds_total job=train worker=0": 0,
        "paceline_job_bytes_total direction=received job=train": 10,
        "paceline_job_uncompressed_bytes_total direction=received job=train": 160,
        "paceline_compression_ratio direction=received job=train": 16.0,
        "paceline_compression_ratio direction=sent job=train": 1.0,
        "paceline_job_step job=train": 0,
        "paceline_open_steps job=train": 0,
        "paceline_checkpoint_age_seconds job=train": 0,
        "paceline_workers_lost_total job=train": 0,
        "paceline_under_way_bytes": 50,
        "paceline_journal_bytes": 0,
        "paceline_recoveries_total": 0,
    }.items() <= shown.items()
    assert not any("worker=1" in name for name in shown)  # It has left.


def test_healthz_tells_ready_from_draining() -> None:
    states: Iterator[bool] = iter([True, False])
    page = MetricsPage(make_engine(), lambda: next(states))
    ready, draining = asyncio.run(ask(page, get("/healthz"), get("/healthz?x=1")))
    assert ready.startswith(b"HTTP/1.1 200")
    assert draining.startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize(
    ("request_", "begins"),
    [
        (get("/"), b"HTTP/1.1 404"),
        (b"POST /metrics HTTP/1.1\r\nHost: here\r\n\r\n", b"HTTP/1.1 405"),
        (b"\r\n\r\n", b"HTTP/1.1 400"),
        (b"x" * (2 * REQUEST_NBYTES_MAX), b"HTTP/1.1 4"),
    ],
)
def test_other_requests_are_refused(request_: bytes, begins: bytes) -> None:
    try:
        (answer,) = asyncio.run(ask(MetricsPage(make_engine(), lambda: True), request_))
    except ConnectionResetError:
        answer = b""
    assert answer[: len(begins) or None] == begins


def test_a_connection_that_takes_too_long_is_closed() -> None:
    async def scene() -> None:
        server = WebServer(MetricsPage(make_engine(), lambda: True).answer, seconds_max=0.01)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", await server.start("127.0.0.1", 0)
        )
        writer.write(get("/healthz")[:-1])
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        await server.stop()

    asyncio.run(scene())


def test_a_newcomer_gets_the_place_of_one_that_has_not_asked() -> None:
    """The answer to a request is under way all the while, and keeps its place."""

    async def scene() -> None:
        held = HeldAnswer()
        server = WebServer(held.answer, seconds_max=WAIT_S)
        server.connections_max = 2
        port = await server.start("127.0.0.1", 0)
        first, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/"))
        await held.asked.wait()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, each in idle:  # The kernel would keep back one on which nothing comes.
            each.write(b"G")
        for reader, _ in idle[:-1]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        held.may_end.set()
        assert (await first.read()).endswith(b"here")
        for _, each in [(first, writer), *idle]:
            each.close()
        await server.stop()

    asyncio.run(scene())


def test_a_handshake_under_way_keeps_its_place(tmp_path: Path) -> None:
    """A probe on a busy machine: a crowd comes between the server's part and its own."""
    certs.make(tmp_path, [], days=1)
    context = tls.server_context(tmp_path / "server.pem", tmp_path / "server.key", None)
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    probe = ssl.create_default_context(cafile=tmp_path / "ca.pem").wrap_bio(
        received, sent, server_hostname="localhost"
    )

    async def scene() -> None:
        page = MetricsPage(make_engine(), lambda: True)
        server = WebServer(page.answer, seconds_max=WAIT_S, context=context)
        server.connections_max = 2
        port = await server.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises(ssl.SSLWantReadError):
            probe.do_handshake()
        writer.write(sent.read())
        received.write(await reader.read(1 << 16))
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for _, each in crowd:
            each.write(b"\x16\x03\x01")
        for silent, _ in crowd[:-1]:
            with contextlib.suppress(ConnectionResetError):
                assert await silent.read() == b""
        probe.do_handshake()
        probe.write(get("/healthz"))
        writer.write(sent.read())
        received.write(await reader.read(1 << 16))
        assert probe.read().startswith(b"HTTP/1.1 200 ")
        for _, each in [(reader, writer), *crowd]:
            each.close()
        await server.stop()

    asyncio.run(scene())


def test_the_time_of_the_answer_is_not_that_of_the_peer() -> None:
    """One that has asked is answered, long after one that has not was closed."""

    async def scene() -> None:
        held = HeldAnswer()
        server = WebServer(held.answer, seconds_max=0.01)
        port = await server.start("127.0.0.1", 0)
        both = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        (asked, writer), (silent, other) = both
        writer.write(get("/"))
        for _ in range(2):
            other.write(b"G")
            with contextlib.suppress(ConnectionResetError):
                assert await silent.read() == b""
            other.close()
            silent, other = await asyncio.open_connection("127.0.0.1", port)
        held.may_end.set()
        assert (await asked.read()).endswith(b"here")
        for each in (writer, other):
            each.close()
        await server.stop()

    asyncio.run(scene())


def test_a_newcomer_waits_while_all_places_are_of_peers_that_are_answered() -> None:
    async def scene() -> None:
        held = HeldAnswer()
        server = WebServer(held.answer, seconds_max=WAIT_S)
        server.connections_max = 1
        port = await server.start("127.0.0.1", 0)
        both = []
        for _ in range(2):
            both.append(await asyncio.open_connection("127.0.0.1", port))
            both[-1][1].write(get("/"))
            await held.asked.wait()
        held.may_end.set()
        for reader, writer in both:
            assert (await reader.read()).endswith(b"here")
            writer.close()
        await server.stop()

    asyncio.run(scene())


def test_head_has_no_body() -> None:
    page = MetricsPage(make_engine(), lambda: True)
    (answer,) = asyncio.run(ask(page, b"HEAD /healthz HTTP/1.1\r\nHost: here\r\n\r\n"))
    assert answer.endswith(b"\r\n\r\n")


def test_the_dashboard_and_the_alerts_name_metrics_that_exist() -> None:
    engine = Engine(Shard(0, 1, lease_s=10.0), now=lambda: 0.0)
    there = set()
    published = PublicationCollector(Publications(engine, {}))
    parts = (ShardCollector(engine), published, StandbyCollector(StandbyView))
    for family in (family for part in parts for family in part.collect()):
        ends = {
            "counter": ("_total",),
            "gauge": ("",),
            "info": ("_info",),
            "histogram": ("_bucket", "_sum", "_count"),
            "summary": ("_sum", "_count"),
        }[family.type]
        there |= {family.name + end for end in ends}
    rules = (grafana.FILE.parents[1] / "chart" / "files" / "rules.yaml").read_text()
    named = set(re.findall(r"paceline_[a-z_]+", " ".join(grafana.expressions()) + rules))
    assert named
    assert named <= there
    assert json.loads(grafana.FILE.read_text()) == grafana.dashboard()
