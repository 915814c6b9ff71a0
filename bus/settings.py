# SPDX-License-Identifier: Apache-2.0
"""How to reach NATS, read from the environment.

| variable | meaning |
|---|---|
| `SEMKV_NATS_URL` | one or more `nats://` or `tls://` URLs, comma-separated; unset: semkv is off |
| `SEMKV_NATS_CREDS` | path of a `.creds` file |
| `SEMKV_NATS_NKEY_SEED_FILE` | path of a file that holds an nkey seed |
| `SEMKV_NATS_USER`, `SEMKV_NATS_PASSWORD_FILE` | user name, path of a file that holds the password |
| `SEMKV_NATS_CA`, `SEMKV_NATS_CERT`, `SEMKV_NATS_KEY` | TLS: the authority to trust; the client's certificate and key |
| `SEMKV_NATS_ACCOUNTS` | 1: tenants live in accounts of their own, and this side makes only its own streams |
| `SEMKV_TENANT` | tenant name, default `default` |
| `SEMKV_INSTANCE` | name of this engine instance; engines default to their engine id |
| `SEMKV_REPLICAS` | replicas of the streams this side creates, default 1 |
| `SEMKV_EVENT_FORMAT` | `msgpack` (default) or `json`: how an engine writes its events |

Secrets are read from files when a connection is made and are in no `repr`. Immutable; any thread. Bad values raise
`SettingsError`, which names the variable, the value and what is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from semkv.bus import subjects

DEFAULT_TENANT = "default"
_SCHEMES = {"nats", "tls", "ws", "wss"}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}\Z")


class SettingsError(ValueError):
    """A setting that cannot be used."""


@dataclass(frozen=True, repr=False)
class BusSettings:
    """Where NATS is, who we are, and how streams are made."""

    url: str = "nats://127.0.0.1:4222"
    creds: Path | None = None
    nkey_seed_file: Path | None = None
    user: str | None = None
    password_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    accounts: bool = False
    tenant: str = DEFAULT_TENANT
    instance: str | None = None
    replicas: int = 1
    event_format: str = "msgpack"

    def __post_init__(self) -> None:
        for url in self.urls or [self.url]:
            if not _usable(url):
                shown = url.rpartition("@")[2]  # a password has no place in a message
                raise SettingsError(
                    f"SEMKV_NATS_URL: {shown!r:.200} is no NATS URL; use nats://host:4222 or tls://host:4222"
                )
        for variable, name in (("SEMKV_TENANT", self.tenant), ("SEMKV_INSTANCE", self.instance or "x")):
            if not _NAME.match(name):
                raise SettingsError(f"{variable}: {name!r:.80} must be 1 to 256 characters without control characters")
        if self.instance == subjects.ALL:
            raise SettingsError("SEMKV_INSTANCE: 'all' addresses every instance and cannot be the name of one")
        if not 1 <= self.replicas <= 5:
            raise SettingsError(f"SEMKV_REPLICAS: {self.replicas} is not between 1 and 5")
        if self.event_format not in {"msgpack", "json"}:
            raise SettingsError(f"SEMKV_EVENT_FORMAT: {self.event_format!r} is neither msgpack nor json")
        if bool(self.cert) != bool(self.key):
            raise SettingsError("SEMKV_NATS_CERT and SEMKV_NATS_KEY belong together: set both or neither")

    @property
    def urls(self) -> list[str]:
        """The server URLs, one by one."""
        return [part.strip() for part in self.url.split(",") if part.strip()]

    @property
    def shown_url(self) -> str:
        """The URLs without user information, for logs and errors."""
        return ",".join(redact(url) for url in self.urls)

    def __repr__(self) -> str:
        shown = f"url={self.shown_url!r}, tenant={self.tenant!r}, instance={self.instance!r}, accounts={self.accounts}"
        return f"BusSettings({shown})"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> BusSettings:
        """Reads the variables above. An unset `SEMKV_NATS_URL` means the local default server."""
        env = os.environ if env is None else env

        def path(name: str) -> Path | None:
            return Path(env[name]) if env.get(name) else None

        return cls(
            url=env.get("SEMKV_NATS_URL") or cls.url,
            creds=path("SEMKV_NATS_CREDS"),
            nkey_seed_file=path("SEMKV_NATS_NKEY_SEED_FILE"),
            user=env.get("SEMKV_NATS_USER") or None,
            password_file=path("SEMKV_NATS_PASSWORD_FILE"),
            ca=path("SEMKV_NATS_CA"),
            cert=path("SEMKV_NATS_CERT"),
            key=path("SEMKV_NATS_KEY"),
            accounts=flag(env, "SEMKV_NATS_ACCOUNTS"),
            tenant=env.get("SEMKV_TENANT") or DEFAULT_TENANT,
            instance=env.get("SEMKV_INSTANCE") or None,
            replicas=_number(env, "SEMKV_REPLICAS", 1),
            event_format=env.get("SEMKV_EVENT_FORMAT") or "msgpack",
        )


def _usable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket left open; a port that is no number, or over 65535
        return False


def redact(url: str) -> str:
    """The URL without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def flag(env: Mapping[str, str], name: str) -> bool:
    """A yes-or-no variable; anything else is an error that says so."""
    text = env.get(name, "").strip().lower()
    if text not in _TRUE | _FALSE:
        raise SettingsError(f"{name}: {text!r:.80} is neither 1 nor 0")
    return text in _TRUE


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise SettingsError(f"{name}: {text!r:.80} is no number")
    return int(text)
