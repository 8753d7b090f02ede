"""OpenTelemetry spans of requests, exported with OTLP over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass._version import __version__
from windlass.server.observability.logging import CALLER_NAME, request_id

SPAN = "windlass.span"  # in a scope: its span
_FLUSH_MILLISECONDS = 3000  # for unsent spans when the server ends
_PATH_CHARS = 200

# Name, start and end in seconds of the monotonic clock, which the engine process shares, and attributes.
Phase = tuple[str, float, float, Mapping[str, Any]]

_UNTRACED_PATHS = frozenset({"/health", "/ready", "/metrics"})  # polled frequently


class Tracing:
    """Spans of requests. exporter: receives them in batches from a thread, which drops what it cannot send in time."""

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "windlass", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("windlass", __version__)
        self._callers = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> Span:
        """Start the span of a request, under the client's span if it sent a `traceparent`."""
        wanted = (b"traceparent", b"tracestate")
        carried = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in wanted}
        path = scope["path"][:_PATH_CHARS]
        return self._tracer.start_span(
            f"{scope['method']} {path}",
            self._callers.extract(carried),
            SpanKind.SERVER,
            {"http.request.method": scope["method"], "url.path": path, "windlass.request_id": request_id(scope)},
        )

    def phases(self, parent: Span, phases: Iterable[Phase]) -> None:
        """Record the completed phases of a request."""
        # One offset for all: where one phase begins at the end of another, their times are equal.
        offset = time.time_ns() - time.monotonic_ns()
        context = set_span_in_context(parent)
        for name, start, end, attributes in phases:
            span = self._tracer.start_span(
                name, context, attributes=dict(attributes), start_time=int(start * 1e9) + offset
            )
            span.end(int(max(start, end) * 1e9) + offset)

    def flush(self) -> None:
        """Send queued spans, for at most a few seconds."""
        self._provider.force_flush(_FLUSH_MILLISECONDS)

    def close(self) -> None:
        """Send queued spans, and end the thread."""
        self.flush()
        self._provider.shutdown()


def create_tracing(endpoint: str) -> Tracing:
    """Tracing to the collector at this URL, with or without /v1/traces."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    path = "/v1/traces"
    return Tracing(
        OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(path) + path, timeout=_FLUSH_MILLISECONDS / 1000)
    )


class TracingMiddleware:
    """A span for every request except health checks and scrapes."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTRACED_PATHS:
            await self._app(scope, receive, send)
            return
        span = scope[SPAN] = self._tracing.begin(scope)

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        try:
            await self._app(scope, receive, send_observed)
        finally:
            # Meanwhile the body may have set another id, and the key was checked.
            span.set_attribute("windlass.request_id", request_id(scope))
            if caller := scope.get(CALLER_NAME):
                span.set_attribute("windlass.caller", caller)
            span.end()
