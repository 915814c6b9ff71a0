# SPDX-License-Identifier: Apache-2.0
"""The one place that knows OpenTelemetry.

`setup_tracing` gives a `Tracer`: spans go to OTLP/HTTP (the standard `OTEL_*` variables), or to an OTLP JSON file
(`SEMKV_TRACE_FILE`, or told), which Jaeger's UI opens and `semkv trace` reads. Where neither is asked for, it gives a
`NullTracer`, which imports nothing, makes no span, and still hands a trace context on from one message to the next.
Spans are built from recorded times, on the loop that calls; never on a scheduler or forward thread. Nothing here raises
into the logic: an exporter's trouble is OpenTelemetry's to log. Any thread.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semkv.bus.steps import Attribute, Step

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
ENV_FILE = "SEMKV_TRACE_FILE"

INTERNAL = "INTERNAL"
PRODUCER = "PRODUCER"
CONSUMER = "CONSUMER"

_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})\Z")
_STATE_LIMIT = 512
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(frozen=True)
class TraceContext:
    """A place in a trace: what travels in the headers."""

    traceparent: str
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hex digits."""
        return self.traceparent[36:52]


def extract(headers: Mapping[str, str] | None) -> TraceContext | None:
    """The trace context in a message's headers, if there is a valid one."""
    if not headers:
        return None
    parent = headers.get(TRACEPARENT) or headers.get("Traceparent") or ""
    if not _PARENT.match(parent):
        return None
    state = headers.get(TRACESTATE) or headers.get("Tracestate") or ""
    return TraceContext(parent, state if len(state) <= _STATE_LIMIT and state.isascii() and state.isprintable() else "")


def inject(headers: dict[str, str], context: TraceContext | None) -> None:
    """Writes a trace context into a message's headers."""
    if context is not None:
        headers[TRACEPARENT] = context.traceparent
        if context.tracestate:
            headers[TRACESTATE] = context.tracestate


@dataclass
class Span:
    """A span being recorded. `context` is what children and messages carry on."""

    context: TraceContext | None
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str = ""
    otel: Any = None

    def set(self, **attributes: Attribute | None) -> None:
        """Adds attributes; `_` in a keyword stands for `.`."""
        self.attributes.update({k.replace("_", "."): v for k, v in attributes.items() if v is not None})

    def put(self, attributes: Mapping[str, Attribute]) -> None:
        """Adds attributes by their own names."""
        self.attributes.update(attributes)


class NullTracer:
    """Tracing is off: contexts pass through, and that is all."""

    enabled = False

    def current(self) -> TraceContext | None:
        """The caller's own trace context, where there is one."""
        return None

    def start(
        self,
        name: str,
        *,
        kind: str = INTERNAL,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext] = (),
        start_ns: int | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        """Begins a span. Without parent it is the root of a new trace."""
        return Span(parent)

    def end(self, span: Span, end_ns: int | None = None) -> None:
        """Ends it."""

    @contextmanager
    def span(self, name: str, **options: Any) -> Iterator[Span]:
        """A span around a block; an exception marks it as failed."""
        span = self.start(name, **options)
        try:
            yield span
        except BaseException as error:
            span.error = type(error).__name__
            raise
        finally:
            self.end(span)

    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        kind: str = INTERNAL,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext] = (),
        attributes: Mapping[str, Attribute] | None = None,
    ) -> TraceContext | None:
        """A span whose times are known already."""
        span = self.start(name, kind=kind, parent=parent, links=links, start_ns=start_ns, attributes=attributes)
        self.end(span, end_ns)
        return span.context

    def record_steps(self, steps: Sequence[Step], parent: TraceContext | None) -> None:
        """One span for each step."""
        if self.enabled:
            for step in steps:
                self.record(step.name, step.start_ns, step.end_ns, parent=parent, attributes=step.attributes)

    def flush(self) -> None:
        """Hands over what is buffered."""

    def shutdown(self) -> None:
        """Hands over what is buffered, and ends."""


class Tracer(NullTracer):
    """Tracing is on: spans of one OpenTelemetry provider."""

    enabled = True

    def __init__(self, provider: Any, *, owned: bool = True) -> None:
        from opentelemetry import trace

        self._provider = provider
        self._owned = owned
        self._trace = trace
        self._tracer = provider.get_tracer("semkv")
        kinds = trace.SpanKind
        self._kinds = {INTERNAL: kinds.INTERNAL, PRODUCER: kinds.PRODUCER, CONSUMER: kinds.CONSUMER}

    def current(self) -> TraceContext | None:
        return self._read(self._trace.get_current_span().get_span_context())

    def _read(self, context: Any) -> TraceContext | None:
        if not context.is_valid:
            return None
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        return TraceContext(parent, context.trace_state.to_header())

    def _remote(self, context: TraceContext) -> Any:
        match = _PARENT.match(context.traceparent)
        assert match is not None
        trace = self._trace
        return trace.SpanContext(
            int(match[1], 16),
            int(match[2], 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(int(match[3], 16)),
            trace_state=trace.TraceState.from_header([context.tracestate] if context.tracestate else []),
        )

    def start(
        self,
        name: str,
        *,
        kind: str = INTERNAL,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext] = (),
        start_ns: int | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        from opentelemetry.context import Context

        trace = self._trace
        context = Context()
        if parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(self._remote(parent)), context)
        otel = self._tracer.start_span(
            name,
            context=context,
            kind=self._kinds[kind],
            links=[trace.Link(self._remote(link)) for link in links],
            start_time=start_ns,
            attributes=dict(attributes) if attributes else None,
        )
        return Span(self._read(otel.get_span_context()), otel=otel)

    def end(self, span: Span, end_ns: int | None = None) -> None:
        if span.otel is None:
            return
        if span.attributes:
            span.otel.set_attributes(span.attributes)
        if span.error:
            span.otel.set_attribute("error.type", span.error)
            span.otel.set_status(self._trace.Status(self._trace.StatusCode.ERROR, span.error))
        span.otel.end(end_time=end_ns)

    def flush(self) -> None:
        if hasattr(self._provider, "force_flush"):
            self._provider.force_flush(5000)

    def shutdown(self) -> None:
        if self._owned:
            self._provider.shutdown()
        else:
            self.flush()


def wanted(file: Path | None = None, env: Mapping[str, str] | None = None) -> bool:
    """Whether spans would go anywhere."""
    env = os.environ if env is None else env
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return file is not None or bool(env.get(ENV_FILE)) or any(env.get(name) for name in _ENDPOINTS)


def setup_tracing(service_name: str, *, file: Path | None = None) -> NullTracer:
    """The tracer of a process or a part of one; the caller ends it with `shutdown()`. Global state is not touched."""
    if not wanted(file):
        return NullTracer()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    from semkv.bus.trace_ids import SystemIds

    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or service_name})
    provider = TracerProvider(resource=resource, id_generator=SystemIds(), shutdown_on_exit=True)
    target = file or (Path(os.environ[ENV_FILE]) if os.environ.get(ENV_FILE) else None)
    exporter: SpanExporter
    if target is not None:
        from semkv.bus.trace_file import OtlpJsonFileExporter

        exporter = OtlpJsonFileExporter(target)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=200))
    if any(os.environ.get(name) for name in _ENDPOINTS):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracer(provider)


def ambient_tracer(service_name: str) -> NullTracer:
    """For code inside somebody's program: our own exporters if asked for, else the program's provider if it has one."""
    if wanted():
        return setup_tracing(service_name)
    if "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            return Tracer(provider, owned=False)
    return NullTracer()


def destination(subject_kind: str, last: str) -> str:
    """The low-cardinality name of where a message goes, for span names."""
    if subject_kind == "res":
        return f"semkv.v1.{{tenant}}.{{domain}}.res.{{client}}.{{command_id}}.{{instance}}.{{rank}}.{last}"
    return f"semkv.v1.{{tenant}}.{{domain}}.{subject_kind}.{{instance}}.{last}"


def messaging_attributes(
    operation: str, subject: str, template: str, *, message_id: str | None = None, size: int | None = None
) -> dict[str, Attribute]:
    """The attributes of OpenTelemetry's messaging conventions."""
    attributes: dict[str, Attribute] = {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": "send" if operation == "publish" else operation,
        "messaging.destination.name": subject,
        "messaging.destination.template": template,
    }
    if message_id:
        attributes["messaging.message.id"] = message_id
    if size is not None:
        attributes["messaging.message.body.size"] = size
    return attributes


def now_ns() -> int:
    """Wall-clock unix nanoseconds, the clock of all spans."""
    return time.time_ns()
