# SPDX-License-Identifier: Apache-2.0
"""One trace as an OTLP JSON document, from Jaeger's query API or from the file that spans are written to.

Blocking, any thread. Raises `TraceError` with the way out; None where the trace is not there.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from semkv.bus.trace_file import documents

__all__ = ["TraceError", "find"]

_LIMIT = 32 << 20
_TIMEOUT_S = 10.0


class TraceError(Exception):
    """Whoever has the traces cannot be asked, or answers something else."""


def find(trace_id: str, *, jaeger: str | None, file: Path | None) -> dict[str, Any] | None:
    """The spans of one trace (32 hex digits)."""
    if jaeger is not None:
        text, where = _ask(f"{jaeger.rstrip('/')}/api/v3/traces/{trace_id}", jaeger), jaeger
    elif file is not None:
        text, where = _read(file), str(file)
    else:
        raise TraceError("this gateway was not told where traces are: set SEMKV_JAEGER_URL, or SEMKV_TRACE_FILE")
    if text is None:
        return None
    try:
        found = [kept for document in documents(text) for kept in _of_trace(document, trace_id)]
    except (ValueError, AttributeError, TypeError):
        raise TraceError(f"{where} has no OTLP JSON") from None
    return {"resourceSpans": found} if found else None


def _of_trace(document: dict[str, Any], trace_id: str) -> list[dict[str, Any]]:
    """The document's resources, with only the trace's spans in them."""
    kept = []
    for resource in document["resourceSpans"]:
        scopes = [
            {**scope, "spans": spans}
            for scope in resource.get("scopeSpans", [])
            if (spans := [span for span in scope.get("spans", []) if span.get("traceId") == trace_id])
        ]
        if scopes:
            kept.append({**resource, "scopeSpans": scopes})
    return kept


def _ask(address: str, jaeger: str) -> str | None:
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
            text: str = answer.read(_LIMIT).decode()
            return text
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise TraceError(f"Jaeger at {jaeger} answers {error.code}") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"Jaeger at {jaeger} cannot be asked: {getattr(error, 'reason', error)}") from None


def _read(file: Path) -> str | None:
    try:
        if file.stat().st_size > _LIMIT:
            raise TraceError(f"{file} is larger than {_LIMIT >> 20} MiB: use semkv trace, or Jaeger")
        return file.read_text()
    except FileNotFoundError:
        return None  # nothing was traced yet
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror or error}") from None
