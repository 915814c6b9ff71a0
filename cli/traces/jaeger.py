# SPDX-License-Identifier: Apache-2.0
"""Traces from Jaeger's query API: `/api/v3`, whose answers are OTLP JSON.

Raises `JaegerError` with the way out; blocking, any thread. Jaeger may send a long trace in parts, one after another.
"""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request

from semkv.cli.traces.store import Span, spans_of

_LIMIT = 64 << 20
_HEX = set("0123456789abcdef")


class JaegerError(RuntimeError):
    """Jaeger did not give the trace."""


def is_trace_id(text: str) -> bool:
    """Whether the text has a trace id's form."""
    return len(text) == 32 and set(text.lower()) <= _HEX


def fetch(url: str, trace_id: str, *, timeout_s: float = 10.0) -> list[Span]:
    """The spans of one trace. `url` is Jaeger's query address, such as http://127.0.0.1:16686."""
    from semkv.bus.trace_file import documents

    wanted = trace_id.lower()
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise JaegerError(f"{url!r:.80} is no http address; Jaeger's is usually http://127.0.0.1:16686")
    if not is_trace_id(wanted):
        raise JaegerError(f"{trace_id!r:.80} is no trace id: 32 hex digits, as a result's trace_id has them")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v3/traces/{wanted}", timeout=timeout_s) as answer:
            text = answer.read(_LIMIT).decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise JaegerError(f"{url} has no trace {wanted}: was it sampled, and exported already?") from None
        raise JaegerError(f"{url} answered {error.code} for trace {wanted}") from None
    except OSError as error:
        raise JaegerError(
            f"Jaeger at {url} cannot be reached ({getattr(error, 'reason', error)}): name it with --jaeger"
        ) from None
    try:
        return [span for document in documents(text) for span in spans_of(document)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise JaegerError(f"{url} did not answer with OTLP JSON: is it Jaeger 2?") from None
