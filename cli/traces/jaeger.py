# SPDX-License-Identifier: Apache-2.0
"""Traces from Jaeger's query API: `/api/v3`, whose answers are OTLP JSON.

Raises `JaegerError` with the way out; blocking, any thread. The answer of a stream of documents (one a line) is read
too, since Jaeger may send a long trace in parts.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from semkv.cli.traces.otlp import spans_of
from semkv.cli.traces.store import Span

_LIMIT = 64 << 20
_HEX = set("0123456789abcdef")


class JaegerError(RuntimeError):
    """Jaeger did not give the trace."""


def fetch(url: str, trace_id: str, *, timeout_s: float = 10.0) -> list[Span]:
    """The spans of one trace. `url` is Jaeger's query address, such as http://127.0.0.1:16686."""
    wanted = trace_id.lower()
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise JaegerError(f"{url!r:.80} is no http address; Jaeger's is usually http://127.0.0.1:16686")
    if len(wanted) != 32 or not set(wanted) <= _HEX:
        raise JaegerError(f"{trace_id!r:.80} is no trace id: 32 hex digits, as a result's trace_id has them")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v3/traces/{wanted}", timeout=timeout_s) as answer:
            text = answer.read(_LIMIT).decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise JaegerError(f"{url} has no trace {wanted}: was it sampled, and exported already?") from None
        raise JaegerError(f"{url} answered {error.code} for trace {wanted}") from None
    except OSError as error:
        raise JaegerError(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from None
    return [span for document in _documents(url, text) for span in spans_of(document)]


def _documents(url: str, text: str) -> list[dict[str, Any]]:
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    rest = text.strip()
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            found.append(value.get("result", value))
            rest = rest[end:].lstrip()
    except (json.JSONDecodeError, AttributeError):
        raise JaegerError(f"{url} did not answer with OTLP JSON: is it Jaeger 2?") from None
    return found
