# SPDX-License-Identifier: Apache-2.0
"""The gateway's settings, read from the environment.

| variable | meaning |
|---|---|
| `SEMKV_GATEWAY_HOST`, `SEMKV_GATEWAY_PORT` | where to listen; default 127.0.0.1:6999, where agents call today |
| `SEMKV_GATEWAY_TOKENS_FILE` | bearer tokens, one a line, `name token` or `name token force`; needed off loopback |
| `SEMKV_GATEWAY_ALLOW_FORCE` | 1: without a tokens file, callers may `force` an evict |
| `SEMKV_GATEWAY_BODY_LIMIT` | the largest body in bytes, default 1 MiB |
| `SEMKV_GATEWAY_WAIT_LIMIT` | the longest a caller may `wait`, seconds, default 60 |
| `SEMKV_GATEWAY_STREAMS` | event streams at once, default 64 |
| `SEMKV_GATEWAY_REQUESTS` | other requests at once, default 1024 |
| `SEMKV_JAEGER_URL` | where the page's traces come from: Jaeger's query address, such as http://127.0.0.1:16686 |
| `SEMKV_TRACE_FILE` | without it: the file that spans are written to |

How to reach NATS, and the tenant it speaks for, are the bus's own variables. Immutable. Bad values are
``GatewaySettingsError`` with the variable, the value and what is allowed. Tokens are in no ``repr``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from semkv.bus.hosts import is_loopback
from semkv.bus.settings import BusSettings

__all__ = ["GatewaySettings", "GatewaySettingsError", "Token", "read_tokens"]

_LEAST_TOKEN = 16


class GatewaySettingsError(ValueError):
    """A setting that cannot be used."""


@dataclass(frozen=True)
class Token:
    """Who may call, and whether they may force."""

    name: str
    secret: str = field(repr=False)
    force: bool = False


@dataclass(frozen=True)
class GatewaySettings:
    """Where to listen and what to allow."""

    host: str = "127.0.0.1"
    port: int = 6999
    tokens: tuple[Token, ...] = ()
    allow_force: bool = False
    body_limit: int = 1 << 20
    wait_limit_s: float = 60.0
    accept_s: float = 1.0
    result_s: float = 10.0
    streams: int = 64
    requests: int = 1024
    jaeger_url: str | None = None
    trace_file: Path | None = None
    bus: BusSettings = field(default_factory=BusSettings)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise GatewaySettingsError(f"SEMKV_GATEWAY_PORT: {self.port} is not between 0 and 65535")
        for variable, value in (("BODY_LIMIT", self.body_limit), ("WAIT_LIMIT", self.wait_limit_s),
                                ("STREAMS", self.streams), ("REQUESTS", self.requests)):  # fmt: skip
            if value <= 0:
                raise GatewaySettingsError(f"SEMKV_GATEWAY_{variable}: {value} must be more than 0")
        if self.jaeger_url is not None and not self.jaeger_url.startswith(("http://", "https://")):
            raise GatewaySettingsError(
                f"SEMKV_JAEGER_URL: {self.jaeger_url!r:.80} is no http address; Jaeger's is usually http://127.0.0.1:16686"
            )
        if not self.tokens and not is_loopback(self.host):
            raise GatewaySettingsError(
                f"SEMKV_GATEWAY_HOST: {self.host!r} is not loopback, so callers must show a bearer token: give "
                "SEMKV_GATEWAY_TOKENS_FILE, or bind 127.0.0.1"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> GatewaySettings:
        """Reads the variables above."""
        env = os.environ if env is None else env
        file = env.get("SEMKV_GATEWAY_TOKENS_FILE", "")
        return cls(
            host=env.get("SEMKV_GATEWAY_HOST") or cls.host,
            port=_number(env, "SEMKV_GATEWAY_PORT", cls.port),
            tokens=read_tokens(Path(file)) if file else (),
            allow_force=env.get("SEMKV_GATEWAY_ALLOW_FORCE", "") in {"1", "true", "yes"},
            body_limit=_number(env, "SEMKV_GATEWAY_BODY_LIMIT", cls.body_limit),
            wait_limit_s=float(_number(env, "SEMKV_GATEWAY_WAIT_LIMIT", int(cls.wait_limit_s))),
            streams=_number(env, "SEMKV_GATEWAY_STREAMS", cls.streams),
            requests=_number(env, "SEMKV_GATEWAY_REQUESTS", cls.requests),
            jaeger_url=env.get("SEMKV_JAEGER_URL") or None,
            trace_file=Path(env["SEMKV_TRACE_FILE"]) if env.get("SEMKV_TRACE_FILE") else None,
            bus=BusSettings.from_env(env),
        )


def read_tokens(path: Path) -> tuple[Token, ...]:
    """The tokens of a file; errors name the line, never what stands in it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise GatewaySettingsError(f"SEMKV_GATEWAY_TOKENS_FILE: {path}: {error.strerror or error}") from None
    tokens: list[Token] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in {2, 3} or words[2:] not in ([], ["force"]) or len(words[1]) < _LEAST_TOKEN:
            raise GatewaySettingsError(
                f"SEMKV_GATEWAY_TOKENS_FILE: {path} line {number}: want 'name token' or 'name token force', the token "
                f"of at least {_LEAST_TOKEN} characters"
            )
        tokens.append(Token(words[0], words[1], len(words) == 3))
    if not tokens:
        raise GatewaySettingsError(f"SEMKV_GATEWAY_TOKENS_FILE: {path} holds no token")
    return tuple(tokens)


def _number(env: Mapping[str, str], variable: str, default: int) -> int:
    text = env.get(variable, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise GatewaySettingsError(f"{variable}: {text!r:.40} must be a whole number")
    return int(text)
