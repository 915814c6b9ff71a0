# SPDX-License-Identifier: Apache-2.0
"""The spans of one command on one rank, built once it has ended: queue, process, the storage's steps, publish result.

All times were recorded before. Runs on the worker's loop, and only where tracing is on.
"""

from __future__ import annotations

from collections.abc import Callable

from semkv.bus import codec
from semkv.bus.messages import Command, Result
from semkv.bus.status import State
from semkv.bus.steps import Attribute, Step
from semkv.bus.tracing import (
    CONSUMER,
    PRODUCER,
    NullTracer,
    TraceContext,
    destination,
    inject,
    messaging_attributes,
)

Publish = Callable[[Result, dict[str, str]], None]


def publish_traced(
    tracer: NullTracer,
    publish: Publish,
    result: Result,
    command: Command,
    *,
    context: TraceContext | None,
    subject: str,
    size: int,
    steps: tuple[Step, ...],
    sent_ns: int,
    started_ns: int,
) -> TraceContext | None:
    """Publishes a result with its trace context, and records the command's spans around it; gives `process`'s."""
    template = destination("cmd", command.type)
    about = attributes(command, result)
    if context is not None:
        tracer.record("queue", min(sent_ns, started_ns), started_ns, parent=context, attributes=about)
    process = tracer.start(
        f"process {template}",
        kind=CONSUMER,
        parent=context,
        links=[context] if context is not None else [],
        start_ns=started_ns,
        attributes=messaging_attributes("process", subject, template, message_id=command.command_id, size=size),
    )
    process.put(about)
    if result.state == State.FAILED:
        process.error = "failed"
    tracer.record_steps(steps, process.context)
    where = codec.subject_of(result)
    sending = tracer.start(
        "publish result",
        kind=PRODUCER,
        parent=process.context,
        attributes=messaging_attributes("publish", where, destination("res", "result")),
    )
    if result.trace_id is None and process.context is not None:
        result = result.model_copy(update={"trace_id": process.context.trace_id})
    headers: dict[str, str] = {}
    inject(headers, sending.context)
    publish(result, headers)
    tracer.end(sending)
    tracer.end(process)
    return process.context


def attributes(command: Command, result: Result) -> dict[str, Attribute]:
    """What a command's spans say about it: counts, never hashes."""
    found: dict[str, Attribute] = {
        "kv.command_id": result.command_id,
        "kv.domain": result.domain,
        "kv.instance": result.instance,
        "kv.rank": result.rank,
        "kv.outcome": str(result.state),
        "kv.chunks.requested": len(getattr(command, "chunk_hashes", ())),
        "kv.bytes": sum(result.bytes_by_tier.values()),
    }
    found |= {f"kv.chunks.{status}": count for status, count in result.counts.items()}
    session = getattr(command, "session", None)
    if session:
        found["kv.session_id"] = session
    return found
