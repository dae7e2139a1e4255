"""Spans of control calls for OpenTelemetry, which the OTEL_* variables alone configure.

Without OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT nothing is loaded and
nothing is recorded, unless the script has set a tracer provider of its own. A worker's call and the
shard's answer are spans of one trace. Frequent calls have none: pushes, pulls, heartbeats, status.
For those there are metrics (docs/monitoring.md) and the timeline (timeline.py).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("paceline")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_MS = 2000  # Longest time that the last spans take at the end of a process.
# Methods of the control and of the checkpoint service that are worth a span.
METHODS = (
    *("Join", "Leave", "Define", "Change", "Forget", "Drain"),
    *("Capture", "Release", "Prepare", "Finish"),
)


@functools.cache
def provider(service: str) -> TracerProvider | None:
    """Returns the receiver of this process's spans; None: they are not recorded.

    Args:
        service: Name of the service if OTEL_SERVICE_NAME gives none.
    """
    is_asked = any(os.environ.get(name) for name in ENDPOINTS)
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or not (is_asked or "opentelemetry.sdk.trace" in sys.modules):
        return None
    try:
        import opentelemetry.trace as trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.grpc import grpcext  # noqa: F401 - for `traced`
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as problem:
        log.warning("no spans for OpenTelemetry: %s; pip install 'paceline[otel]'", problem)
        return None
    current = trace.get_tracer_provider()
    if isinstance(current, TracerProvider):
        return current
    if not is_asked:
        return None
    name = os.environ.get("OTEL_SERVICE_NAME") or service
    made = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def traced(channel: grpc.Channel, service: str) -> grpc.Channel:
    """Returns a channel whose control calls are recorded, with the job and the rank."""
    if provider(service) is None:
        return channel
    from opentelemetry.instrumentation.grpc import client_interceptor, grpcext

    interceptor = client_interceptor(  # type: ignore[no-untyped-call]
        provider(service), filter_=_is_recorded(), request_hook=_describe
    )
    found: grpc.Channel = grpcext.intercept_channel(  # type: ignore[no-untyped-call]
        channel, interceptor
    )
    return found


def interceptors(service: str) -> list[grpc.aio.ServerInterceptor[Any, Any]]:
    """Returns what records the control calls that a server answers; empty: nothing does."""
    if provider(service) is None:
        return []
    from opentelemetry.instrumentation.grpc import aio_server_interceptor

    interceptor = aio_server_interceptor(  # type: ignore[no-untyped-call]
        provider(service), filter_=_is_recorded()
    )
    return [interceptor]


@contextmanager
def span(service: str, name: str, **attributes: str | int) -> Iterator[None]:
    """Records what runs inside as a span, with the error that it raises."""
    found = provider(service)
    if found is None:
        yield
        return
    about = {f"paceline.{key}": value for key, value in attributes.items()}
    with found.get_tracer("paceline").start_as_current_span(name, attributes=about):
        yield


def flush(service: str) -> None:
    """Sends the spans that are not sent yet, within two seconds."""
    found = provider(service)
    if found is not None:
        found.force_flush(FLUSH_MS)


def _is_recorded() -> Callable[[Any], bool]:
    from opentelemetry.instrumentation.grpc import filters

    return filters.any_of(*(filters.method_name(name) for name in METHODS))


def _describe(span: Any, request: Any) -> None:
    """Adds the job and the rank of a request to its span."""
    fields = {field.name for field in request.DESCRIPTOR.fields}
    if "job" in fields:
        span.set_attribute("paceline.job", request.job)
    rank = "worker" if "worker" in fields else "rank"
    if rank in fields:
        span.set_attribute("paceline.rank", getattr(request, rank))
