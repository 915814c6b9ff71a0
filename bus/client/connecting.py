# SPDX-License-Identifier: Apache-2.0
"""`connect`: from a URL or the environment to a connected client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from semkv.bus.client.kv import KV
from semkv.bus.settings import BusSettings
from semkv.bus.tracing import NullTracer


class Connecting:
    """Awaitable, and an async context manager."""

    def __init__(self, make: Callable[[], Awaitable[KV]]) -> None:
        self._make = make
        self._kv: KV | None = None

    def __await__(self) -> Any:
        return self._make().__await__()

    async def __aenter__(self) -> KV:
        self._kv = await self._make()
        return self._kv

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._kv is not None
        await self._kv.close()


def connect(
    url: str | None = None,
    *,
    tenant: str | None = None,
    client: str | None = None,
    creds: str | Path | None = None,
    settings: BusSettings | None = None,
    tracer: NullTracer | None = None,
    timeout: float = 10.0,
) -> Connecting:
    """Connects: `async with connect(url) as kv`, or `kv = await connect(url)` and `await kv.close()`.

    What is not told is read from the environment (see `semkv.bus.settings`). `client` names this agent in answers'
    subjects; by default it is unique.
    """

    async def make() -> KV:
        base = settings or BusSettings.from_env()
        told: dict[str, Any] = {"url": url, "tenant": tenant, "creds": Path(creds) if creds is not None else None}
        chosen = replace(base, **{name: value for name, value in told.items() if value is not None})
        kv = KV(chosen, client=client, tracer=tracer, timeout=timeout)
        try:
            await kv.session()
        except BaseException:
            await kv.close()
            raise
        return kv

    return Connecting(make)
