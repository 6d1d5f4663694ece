"""OpenTelemetry: a span and figures for each request and each run. Loaded only where `OTEL_*` names a receiver.

Everything else is configured by the standard variables. Providers that somebody has set before us are used as they are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter

from opentelemetry import context, metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uuid_utils.compat import uuid7

from app import __version__
from app.runs.claims import Execution
from app.runs.models import Run, RunStatus
from app.runs.ports import RunTelemetry
from app.runs.request import traceparent

FLUSH_SECONDS = 1.0
"""How long an ending process waits for the receiver."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
FAILED = frozenset({RunStatus.error, RunStatus.timeout})
"""A run that asks a human, or was cancelled, has done what it should."""
PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry(RunTelemetry):
    """One per process. `active` says how many runs it executes."""

    def __init__(self) -> None:
        tracers, meters = _tracers(), _meters()
        self._providers = (tracers, meters)
        self._tracer = tracers.get_tracer("keyturn", __version__)
        meter = meters.get_meter("keyturn", __version__)
        self.active: Callable[[], int] = lambda: 0
        meter.create_observable_up_down_counter("keyturn.runs.active", [self._observe], unit="{run}")
        self._ended = meter.create_counter("keyturn.runs.ended", unit="{run}")
        self._took = _histogram(meter, "keyturn.run.duration", "Time of one attempt, from its claim to its end.")
        self._waited = _histogram(meter, "keyturn.run.wait", "Time from when a run was due to its first claim.")
        self._answered = _histogram(meter, "http.server.request.duration", "Time to the end of the response.")

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(self.active())]

    @contextmanager
    def running(self, execution: Execution) -> Iterator[None]:
        """A span for an attempt, as a child of the request that made the run, wherever that was answered."""
        run = execution.run
        labels = {"keyturn.graph_id": run.graph_id}
        if run.attempts == 1 and run.started_at is not None:
            due = max(run.created_at, run.not_before or run.created_at)
            self._waited.record(max(0.0, (run.started_at - due).total_seconds()), labels)
        parent = PROPAGATOR.extract({"traceparent": str(run.kwargs.get("traceparent"))}, context.Context())
        began = perf_counter()
        with self._tracer.start_as_current_span(f"run {run.graph_id}", parent, SpanKind.CONSUMER, _attributes(run)) as span:
            yield
            outcome = execution.outcome
            if outcome is None:  # given back, lost, or deleted: whoever goes on has a span of his own
                span.set_attribute("keyturn.stop_reason", execution.reason or "given_back")
                return
            ended = {**labels, "keyturn.status": str(outcome.status), "keyturn.stop_reason": str(outcome.reason)}
            span.set_attributes(ended)
            if outcome.status in FAILED:
                error = outcome.error or {}
                span.set_attribute("error.type", str(error.get("code") or outcome.status))
                span.set_status(Status(StatusCode.ERROR, str(error.get("code") or outcome.reason)))
            self._ended.add(1, ended)
            self._took.record(perf_counter() - began, ended)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware: a span for each request, and its `traceparent` for the runs that it makes."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] == "/ok":  # probes would drown the rest
                await app(scope, receive, send)
            else:
                await self._request(app, scope, receive, send)

        return traced

    async def _request(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"}
        labels: dict[str, str | int] = {"http.request.method": scope["method"], "url.scheme": scope["scheme"]}

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                labels["http.response.status_code"] = message["status"]
                for name, value in message["headers"]:
                    if name.lower() == b"x-request-id":
                        span.set_attribute("keyturn.request_id", value.decode("latin-1"))
            await send(message)

        began = perf_counter()
        parent = PROPAGATOR.extract(sent, context.Context())
        with self._tracer.start_as_current_span(scope["method"], parent, SpanKind.SERVER) as span:
            carrier: dict[str, str] = {}
            PROPAGATOR.inject(carrier)
            traceparent.set(carrier.get("traceparent"))  # uvicorn runs each request in a context of its own
            try:
                await app(scope, receive, watched)
            finally:
                if (route := _route(scope)) is not None:
                    labels["http.route"] = route
                    span.update_name(f"{scope['method']} {route}")
                span.set_attributes({**labels, "url.path": scope["path"]})
                if int(labels.get("http.response.status_code", 0)) >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                self._answered.record(perf_counter() - began, labels)

    async def flush(self) -> None:
        """Send what waits, unless the receiver does not take it in time."""
        sending = asyncio.create_task(asyncio.to_thread(self._flush), name="telemetry")
        await asyncio.wait({sending}, timeout=FLUSH_SECONDS)

    def _flush(self) -> None:
        for provider in self._providers:
            if isinstance(provider, TracerProvider | MeterProvider):
                provider.force_flush(int(FLUSH_SECONDS * 1000))


@cache
def telemetry() -> Telemetry:
    """The process' own."""
    return Telemetry()


def _resource() -> Resource:
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ours = {"service.version": __version__, "service.instance.id": str(uuid7())}
    return Resource.create(ours if named else {"service.name": "keyturn", **ours})


def _tracers() -> trace.TracerProvider:
    present = trace.get_tracer_provider()
    if not isinstance(present, trace.ProxyTracerProvider):
        return present
    provider = TracerProvider(resource=_resource())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)  # graphs may have spans of their own, inside ours
    return provider


def _meters() -> metrics.MeterProvider:
    present = metrics.get_meter_provider()
    if isinstance(present, MeterProvider):
        return present
    provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=_resource())
    metrics.set_meter_provider(provider)
    return provider


def _histogram(meter: metrics.Meter, name: str, description: str) -> metrics.Histogram:
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=SECONDS)


def _attributes(run: Run) -> dict[str, str | int]:
    return {
        "keyturn.run_id": str(run.id),
        "keyturn.thread_id": str(run.thread_id),
        "keyturn.assistant_id": str(run.assistant_id),
        "keyturn.assistant_version": run.assistant_version,
        "keyturn.graph_id": run.graph_id,
        "keyturn.kind": run.kind,
        "keyturn.attempt": run.attempts,
        "keyturn.tenant_id": run.tenant_id,
    }


def _route(scope: Scope) -> str | None:
    """The template of the path. Without one, as for paths that nobody serves, nothing is told: there is no end of them."""
    path: str | None = getattr(scope.get("route"), "path", None) or scope.get("keyturn.route")
    return path
