# SPDX-License-Identifier: Apache-2.0
"""Subjects: building them, reading them, and turning any name into a subject token.

    semkv.v1.<tenant>.<domain>.evt.<instance>.<type>
    semkv.v1.<tenant>.<domain>.cmd.<instance|all>.<op>
    semkv.v1.<tenant>.<domain>.res.<client>.<command_id>.<instance>.<rank>

A token is `[A-Za-z0-9_-]{1,64}`. A name that is none is replaced by `h-` and 32 hex digits of its BLAKE3; the full name
travels in the message. Pure functions; errors are `SubjectError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

PREFIX = "semkv.v1"
ALL = "all"
REGISTRY_BUCKET = "semkv_engines"
REGISTRY_PREFIX = f"$KV.{REGISTRY_BUCKET}"

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_HASHED = re.compile(r"h-[0-9a-f]{32}\Z")
_PARTS = {"evt": 7, "cmd": 7, "res": 9}


class SubjectError(ValueError):
    """A subject that is none of ours, or a token that cannot be one."""


@dataclass(frozen=True)
class Subject:
    """A subject taken apart. `kind` is evt, cmd, res or registry; what a kind does not have is empty (rank: -1)."""

    kind: str
    tenant: str = ""
    domain: str = ""
    instance: str = ""
    name: str = ""
    """The event's type or the command's op."""
    client: str = ""
    command_id: str = ""
    rank: int = -1


def is_token(text: str) -> bool:
    """Whether the text can stand in a subject as it is."""
    return bool(_TOKEN.match(text))


def token(name: str) -> str:
    """The subject token of a name: itself where it can be, else `h-` and a hash. Empty names are refused."""
    if not name:
        raise SubjectError("an empty name cannot be a subject token")
    # A name that looks hashed is hashed too, so that nobody can choose another's token.
    if _TOKEN.match(name) and not (_HASHED.match(name)):
        return name
    return "h-" + blake3(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def stands_for(name: str, subject_token: str) -> bool:
    """Whether a payload's name and a subject's token mean the same: the name itself, or its token."""
    return bool(name) and (name == subject_token or token(name) == subject_token)


def _checked(text: str, what: str) -> str:
    if not _TOKEN.match(text):
        raise SubjectError(f"{what} {text!r:.80} is no subject token: 1 to 64 of A-Z a-z 0-9 _ -")
    return text


def event(tenant: str, domain: str, instance: str, type_: str) -> str:
    """Subject of an event."""
    return f"{PREFIX}.{token(tenant)}.{_checked(domain, 'domain')}.evt.{token(instance)}.{_checked(type_, 'type')}"


def command(tenant: str, domain: str, instance: str, op: str) -> str:
    """Subject of a command to one instance, or to `all` of the domain."""
    return f"{PREFIX}.{token(tenant)}.{_checked(domain, 'domain')}.cmd.{token(instance)}.{_checked(op, 'op')}"


def result(tenant: str, domain: str, client: str, command_id: str, instance: str, rank: int) -> str:
    """Subject of a rank's `accepted` and `result`."""
    if rank < 0:
        raise SubjectError(f"rank {rank} is negative")
    return (
        f"{PREFIX}.{token(tenant)}.{_checked(domain, 'domain')}.res.{token(client)}."
        f"{_checked(command_id, 'command_id')}.{token(instance)}.{rank}"
    )


def registry(instance: str, rank: int) -> str:
    """Subject of a rank's registry entry."""
    if rank < 0:
        raise SubjectError(f"rank {rank} is negative")
    return f"{REGISTRY_PREFIX}.{token(instance)}.{rank}"


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or (len(text) > 1 and text[0] == "0"):
        raise SubjectError(f"rank {text!r:.80} is no number")
    return int(text)


# A process meets the same few command and event subjects over and over.
@lru_cache(maxsize=1024)
def parse(subject: str) -> Subject:
    """Takes a subject apart. Raises SubjectError for anything that is not one of ours."""
    parts = subject.split(".")
    if subject.startswith(REGISTRY_PREFIX + ".") and len(parts) == 4:
        return Subject(kind="registry", instance=_checked(parts[2], "instance"), name="engine", rank=_rank(parts[3]))
    if len(parts) < 6 or ".".join(parts[:2]) != PREFIX or _PARTS.get(parts[4]) != len(parts):
        raise SubjectError(f"{subject!r:.200} is not a subject of {PREFIX}")
    for part in parts[2:]:
        _checked(part, "token")
    tenant, domain, kind = parts[2:5]
    if kind == "res":
        client, command_id, instance, rank = parts[5:]
        return Subject(kind, tenant, domain, instance, "", client, command_id, _rank(rank))
    return Subject(kind, tenant, domain, parts[5], parts[6])
