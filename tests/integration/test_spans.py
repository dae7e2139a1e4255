"""Spans of control calls at a receiver of OpenTelemetry's protocol."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import torch
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

import psworker
from pscore.observe import spans
from tests.integration.cluster import Shards, Station, new_job


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps the spans, as (service, name, trace, parent, attributes)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, bytes, bytes, dict[str, Any]]] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {
                        one.key: one.value.string_value or one.value.int_value
                        for one in span.attributes
                    }
                    found = (about["service.name"], span.name, span.trace_id, span.parent_span_id)
                    self.spans.append((*found, values))
        return pb.ExportTraceServiceResponse()


@contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    receiver, server = Receiver(), grpc.server(ThreadPoolExecutor(2))
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def train(me: Station) -> None:
    """Makes a step in each of two modes."""
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], mode="ssgd"
    )
    for mode in ("asgd", None):
        weight.grad = torch.ones(8)
        optimizer.step()
        if mode:
            optimizer.set_mode(mode)


def test_a_call_and_its_answer_are_one_trace_and_frequent_calls_have_none() -> None:
    job = new_job()
    with receiving() as (receiver, endpoint):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        with Shards(1, env=env) as shards:
            shards.run(train, job=job, num_workers=1, env=env)
    names = {(service, name.rpartition("/")[2]) for service, name, *_ in receiver.spans}
    calls = {"Join", "Define", "Change", "Leave"}
    assert names == {("psserver", "restore")} | {
        (service, call) for service in ("psworker", "psserver") for call in calls
    }
    traces = {
        service: {(name, trace) for kind, name, trace, *_ in receiver.spans if kind == service}
        for service in ("psworker", "psserver")
    }
    assert traces["psworker"] == {one for one in traces["psserver"] if one[0] != "restore"}
    about = [values for service, _, _, _, values in receiver.spans if service == "psworker"]
    assert {(values["paceline.job"], values.get("paceline.rank", 0)) for values in about} == {
        (job, 0)
    }


def test_nothing_is_recorded_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in spans.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace", raising=False)
    spans.provider.cache_clear()
    try:
        assert spans.provider("psworker") is None
    finally:
        spans.provider.cache_clear()
