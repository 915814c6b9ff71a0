# SPDX-License-Identifier: Apache-2.0
"""Runs the demo: the stack, the play, the report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

from rich.console import Console

from semkv.bus import connect
from semkv.cli.demo import report
from semkv.cli.demo.agent import Model
from semkv.cli.demo.claims import Claims
from semkv.cli.demo.play import Measured, Play
from semkv.cli.demo.stack import CHUNK_SIZE, Endpoints
from semkv.cli.demo.texts import Topic, topic
from semkv.cli.devengine.lmcache_hashes import LMCacheHasher
from semkv.cli.traces.store import Span, by_trace, read_spans
from semkv.consumers.memory import MemoryMap, Store

STORE = "memory.db"
SPANS_PATIENCE_S = 15
READ_SPAN = "kv.tier.load disk→cpu"

FIRST = topic("billing", turns=3, sentences=18)
SECOND = topic("garden", turns=4, sentences=36)


async def run(
    console: Console, endpoints: Endpoints, trace_file: Path, topics: tuple[Topic, Topic] = (FIRST, SECOND)
) -> Claims:
    """Play the story against the endpoints and print what happened."""
    claims = Claims(console)
    if not endpoints.plain_engine:
        console.print("no engine without a cache was named: outputs are not compared with recomputed ones")
    async with AsyncExitStack() as opened:
        engine = await opened.enter_async_context(closing_model(Model(endpoints.engine, endpoints.served)))
        plain = None
        if endpoints.plain_engine:
            plain = await opened.enter_async_context(closing_model(Model(endpoints.plain_engine, endpoints.served)))
        kv = await opened.enter_async_context(connect(endpoints.nats))
        store = opened.enter_context(closing(fresh_store(trace_file.parent)))
        memory = await opened.enter_async_context(MemoryMap(kv, store=store, agent="semkv-demo"))
        # Of an engine that was not started here, neither the hashes' root nor the pool's size is known.
        hasher = opened.enter_context(LMCacheHasher(CHUNK_SIZE)) if endpoints.own else None
        play = Play(console, claims, kv, memory, engine, plain, hasher, pool_overflows=endpoints.own)
        await play.run(*topics)
    report.print_timeline(console, play.measured)
    report.print_decision(console, play.measured, trace_file.parent / STORE)
    if endpoints.own:
        await _trace(console, claims, play.measured, trace_file)
    else:
        _say_where(console, play.measured)
    report.print_verdict(console, claims)
    return claims


@asynccontextmanager
async def closing_model(model: Model) -> AsyncIterator[Model]:
    """The model, closed afterwards."""
    try:
        yield model
    finally:
        await model.close()


def fresh_store(folder: Path) -> Store:
    """A memory map's file that remembers nothing of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STORE, f"{STORE}-wal", f"{STORE}-shm"):
        (folder / name).unlink(missing_ok=True)
    return Store(folder / STORE)


def _say_where(console: Console, measured: Measured) -> None:
    """The engine's spans go where it was told: the trace's id is what can be said here."""
    trace_id = measured.prefetch.result.get("trace_id") if measured.prefetch is not None else None
    if trace_id is not None:
        console.print(f"\nthe last prefetch's trace: {trace_id} (semkv trace --jaeger URL {trace_id})", highlight=False)


async def _trace(console: Console, claims: Claims, measured: Measured, trace_file: Path) -> None:
    if measured.prefetch is None:
        return
    spans = await _spans_of(measured.prefetch.result.get("trace_id"), trace_file)
    if spans:
        report.print_prefetch_trace(console, spans)
    reads = [span for span in spans if span.name == READ_SPAN]
    services = {span.service for span in spans}
    roots = [span for span in spans if span.parent_id not in {other.span_id for other in spans}]
    claims.check(
        "one trace leads from the agent's search to the bytes read in the worker",
        bool(reads) and len(roots) == 1 and len(services) > 1,
        f"{len(spans)} spans of {', '.join(sorted(services)) or 'nobody'}; {len(reads)} reads",
    )
    console.print(f"  every trace is in {trace_file}: `semkv trace {trace_file}`, or Jaeger's UI, “JSON File”")


async def _spans_of(trace_id: str | None, trace_file: Path) -> list[Span]:
    """The trace's spans once the worker has exported its own, or what there is after a while."""
    spans: list[Span] = []
    for _ in range(SPANS_PATIENCE_S * 5):
        spans = _spans_now(trace_id, trace_file)
        if any(span.name == READ_SPAN for span in spans) and any(not span.parent_id for span in spans):
            break
        await asyncio.sleep(0.2)
    return spans


def _spans_now(trace_id: str | None, trace_file: Path) -> list[Span]:
    if trace_id is None or not trace_file.exists():
        return []
    return by_trace(read_spans(trace_file)).get(trace_id, [])
