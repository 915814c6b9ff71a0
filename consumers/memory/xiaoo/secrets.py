# SPDX-License-Identifier: Apache-2.0
"""Takes secrets out of what is about to be written down.

By the name of a field ("api_key", "password", …) and by the look of a value (keys of known providers, bearer tokens,
JWTs, private keys, ``user:password@`` in addresses, ``password=…`` in text). What looks like none of these is left:
this lowers the risk of a debug file, it does not end it. Pure.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["REMOVED", "without_secrets"]

REMOVED = "[removed]"
_DEPTH = 32

_FIELD = re.compile(
    r"(?:^|[_\-. ])(?:api[_\-]?key|apikey|secret|password|passwd|pwd|token|authorization|cookie|credentials?"
    r"|private[_\-]?key)s?$",
    re.IGNORECASE,
)
_WHOLE = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_\-]{12,}"),
    re.compile(r"\b(?:ghp|gho|ghu|ghs|ghr|github_pat|glpat|xox[abprs]|hf|npm|pypi)[_\-][A-Za-z0-9_\-]{10,}"),
    re.compile(r"\b(?:AKIA|ASIA|LTAI)[A-Za-z0-9]{12,}\b"),
    re.compile(r"\bAIza[A-Za-z0-9_\-]{30,}"),
    re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*"),
    re.compile(r"\bS[UAO][A-Z2-7]{56}\b"),  # nkey seeds
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/\-]{8,}=*", re.IGNORECASE)
_USER_INFO = re.compile(r"(\b[a-z][a-z0-9+.\-]*://)[^/\s:@]+:[^/\s@]+@", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"((?:api[_\-]?key|secret|password|passwd|pwd|access[_\-]?token|token|密码|口令|密钥)[\"']?\s*(?:[:=：]|是|is)\s*[\"']?)"
    r"[^\s\"',;，。；]{4,}",
    re.IGNORECASE,
)


def without_secrets(value: Any, depth: int = 0) -> Any:
    """The same value with secrets replaced by ``[removed]``."""
    if depth > _DEPTH:
        return REMOVED
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, dict):
        return {
            key: REMOVED if isinstance(key, str) and _FIELD.search(key) and item else without_secrets(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [without_secrets(item, depth + 1) for item in value]
    return value


def _clean(text: str) -> str:
    for pattern in _WHOLE:
        text = pattern.sub(REMOVED, text)
    text = _BEARER.sub(rf"\1 {REMOVED}", text)
    text = _USER_INFO.sub(rf"\1{REMOVED}@", text)
    return _ASSIGNED.sub(rf"\1{REMOVED}", text)
