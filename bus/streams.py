# SPDX-License-Identifier: Apache-2.0
"""The streams: making them where absent, and asking the server about them.

Streams are created if absent and never changed: what an operator configured stays. With tenants in accounts of their
own, an engine's side makes the commands stream and the registry, an agent's side the events and results streams.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from semkv.bus import subjects
from semkv.bus.clock import BrokerClock, parse_rfc3339_ns
from semkv.bus.connection import Link
from semkv.bus.errors import BusError
from semkv.bus.settings import BusSettings

COMMANDS = "SEMKV_COMMANDS"
EVENTS = "SEMKV_EVENTS"
RESULTS = "SEMKV_RESULTS"
REGISTRY = f"KV_{subjects.REGISTRY_BUCKET}"

DUPLICATE_WINDOW_S = 120.0
HEARTBEAT_S = 2.0
REGISTRY_TTL_S = 15.0

ENGINE = "engine"
AGENT = "agent"

_NAME_IN_USE = 10058
_NO_STREAM = 10059
_MIB = 1 << 20


class StreamError(BusError):
    """The server refused a stream operation."""


def stream_configs(settings: BusSettings, side: str) -> list[StreamConfig]:
    """The streams a side makes: `engine` or `agent`; without accounts either side makes all of them."""
    tenant = subjects.token(settings.tenant) if settings.accounts else "*"
    engine = [
        StreamConfig(
            name=COMMANDS,
            subjects=[f"{subjects.PREFIX}.*.*.cmd.>"],
            storage=StorageType.FILE,
            max_age=120.0,
            duplicate_window=DUPLICATE_WINDOW_S,
            max_bytes=256 * _MIB,
            discard=DiscardPolicy.OLD,
            num_replicas=settings.replicas,
        ),
        StreamConfig(
            name=REGISTRY,
            subjects=[f"{subjects.REGISTRY_PREFIX}.>"],
            storage=StorageType.MEMORY,
            max_age=REGISTRY_TTL_S,
            duplicate_window=REGISTRY_TTL_S,
            max_msgs_per_subject=1,
            max_bytes=64 * _MIB,
            discard=DiscardPolicy.NEW,
            deny_delete=True,
            allow_rollup_hdrs=True,
            allow_direct=True,
            num_replicas=settings.replicas,
        ),
    ]
    agent = [
        StreamConfig(
            name=EVENTS,
            subjects=[f"{subjects.PREFIX}.{tenant}.*.evt.>"],
            storage=StorageType.FILE,
            max_age=24 * 3600.0,
            max_bytes=512 * _MIB,
            discard=DiscardPolicy.OLD,
            num_replicas=settings.replicas,
        ),
        StreamConfig(
            name=RESULTS,
            subjects=[f"{subjects.PREFIX}.{tenant}.*.res.>"],
            storage=StorageType.MEMORY,
            max_age=600.0,
            duplicate_window=DUPLICATE_WINDOW_S,
            max_msgs_per_subject=1,
            max_bytes=128 * _MIB,
            discard=DiscardPolicy.OLD,
            allow_direct=True,
            num_replicas=settings.replicas,
        ),
    ]
    if not settings.accounts:
        return engine + agent
    return engine if side == ENGINE else agent


async def ensure_streams(nc: Client, settings: BusSettings, side: str = AGENT, *, link: Link | None = None) -> None:
    """Creates the side's streams where absent. Raises StreamError or nats' own errors (time-out, no JetStream).

    With the connection's `link`, a missing right is PermissionDeniedError at once instead of a time-out.
    """
    js = nc.jetstream()
    for config in stream_configs(settings, side):
        try:
            await _guarded(link, f"$JS.API.STREAM.INFO.{config.name}", js.stream_info(str(config.name)))
        except nats.js.errors.NotFoundError as error:
            if error.err_code not in (_NO_STREAM, None):
                raise StreamError(f"stream {config.name}: {error.description}") from error
            try:
                await _guarded(link, f"$JS.API.STREAM.CREATE.{config.name}", js.add_stream(config))
            except nats.js.errors.APIError as refused:
                if refused.err_code != _NAME_IN_USE:  # someone else was quicker, perhaps with other limits
                    raise StreamError(f"stream {config.name} cannot be created: {refused.description}") from refused


async def _guarded(link: Link | None, subject: str, work: Awaitable[Any]) -> Any:
    return await (work if link is None else link.guard(subject, work))


async def stream_info(
    nc: Client, stream: str, clock: BrokerClock | None = None, timeout: float = 2.0
) -> dict[str, Any]:
    """What the server says of a stream (`created`, `state`, ...); its time feeds `clock`. NotFoundError if absent."""
    sent = time.time_ns()
    reply = await nc.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=timeout)
    received = time.time_ns()
    answer: dict[str, Any] = json.loads(reply.data)
    if "error" in answer:
        raise nats.js.errors.APIError.from_error(answer["error"])
    if clock is not None and isinstance(answer.get("ts"), str):
        clock.sample(sent, received, parse_rfc3339_ns(answer["ts"]))
    return answer


async def last_messages(
    nc: Client, stream: str, filters: list[str], *, timeout: float = 2.0
) -> AsyncIterator[tuple[str, dict[str, str], bytes]]:
    """The newest message of each subject that matches: (subject, headers, payload). One request (`DIRECT.GET`)."""
    inbox = nc.new_inbox()
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    sub = await nc.subscribe(inbox, cb=arrived.put)
    try:
        request = json.dumps({"multi_last": filters, "batch": 1000}).encode()
        await nc.publish(f"$JS.API.DIRECT.GET.{stream}", request, reply=inbox)
        while True:
            msg = await asyncio.wait_for(arrived.get(), timeout)
            headers = dict(msg.headers or {})
            if headers.get("Status"):
                return  # 204: the end; 404: nothing there; 503: no such stream
            yield headers.get("Nats-Subject", ""), headers, msg.data
    except asyncio.TimeoutError:
        raise nats.errors.TimeoutError from None
    finally:
        if not nc.is_closed:
            await sub.unsubscribe()
