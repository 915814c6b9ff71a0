# SPDX-License-Identifier: Apache-2.0
"""What a request's body says to semkv: `kv_transfer_params: {"semkv": {"session": …, "traceparent": …, "tenant": …}}`.

A client writes these, so nothing in them is believed: wrong types, overlong texts and malformed trace contexts are
left out one by one, the rest is kept. Pure functions, no errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

SESSION_LIMIT = 256
_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$")
_TENANT = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
_TRACESTATE_LIMIT = 512


class Labels(NamedTuple):
    """The request's session, tenant and trace context; None where it names none."""

    session: str | None = None
    tenant: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


NONE = Labels()


def _text(values: Mapping[str, Any], name: str, limit: int) -> str | None:
    value = values.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= limit or not value.isprintable():
        return None
    return value


def read_labels(request: Any, *, trust_tenant: bool) -> Labels:
    """Read the body's `semkv` part; the trace else comes from the request's own trace headers."""
    params = getattr(request, "kv_transfer_params", None)
    ours = params.get("semkv") if isinstance(params, Mapping) else None
    headers = getattr(request, "trace_headers", None)
    if not ours and not headers:
        return NONE
    session = tenant = traceparent = tracestate = None
    if isinstance(ours, Mapping):
        session = _text(ours, "session", SESSION_LIMIT)
        if trust_tenant:
            tenant = _text(ours, "tenant", 64)
            if tenant is not None and not _TENANT.match(tenant):
                tenant = None
        traceparent = _trace(ours)
        if traceparent is not None:
            tracestate = _text(ours, "tracestate", _TRACESTATE_LIMIT)
    if traceparent is None and isinstance(headers, Mapping):
        traceparent = _trace(headers)
        if traceparent is not None:
            tracestate = _text(headers, "tracestate", _TRACESTATE_LIMIT)
    return Labels(session, tenant, traceparent, tracestate)


def _trace(values: Mapping[str, Any]) -> str | None:
    value = values.get("traceparent")
    return value if isinstance(value, str) and _TRACEPARENT.match(value) else None
