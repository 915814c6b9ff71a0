# SPDX-License-Identifier: Apache-2.0
"""Messages to bytes and back.

`encode` writes msgpack, or JSON, and the headers that describe it. `decode` reads both and trusts nothing: the subject
is the authority, so a payload that names another tenant, domain, instance, op, client, command id or rank is refused;
fields the payload leaves out are filled from the subject. Without headers the type is the subject's last token at its
newest version, and a payload that starts with `{` is JSON. All failures are `DecodeError` with a short `kind` for
counting. Pure functions; any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

import msgpack
from pydantic import BaseModel, ValidationError

from semkv.bus import subjects
from semkv.bus.fields import JSON, MSGPACK, WIRE, Packing
from semkv.bus.messages import Accepted, Command, EngineInfo, Message, Result, TenantMessage, lookup, newest

CONTENT_TYPE = "Content-Type"
SEMKV_TYPE = "Semkv-Type"
MSG_ID = "Nats-Msg-Id"
CONTENT_MSGPACK = "application/msgpack"
CONTENT_JSON = "application/json"

MAX_BYTES = 8 << 20
"""Nothing larger is even parsed."""

_TYPE = re.compile(r"([a-z_]{1,32})\.v([1-9][0-9]{0,3})\Z")
_MSGPACK_CONTEXT = {WIRE: MSGPACK}
_JSON_CONTEXT = {WIRE: JSON}


class DecodeError(ValueError):
    """A message that is not accepted.

    `kind`: subject, content_type, malformed, unknown_type, unknown_version, invalid, mismatch, too_large. `fields` is
    what could be read of the payload, for an answer to whoever sent it; empty unless the payload was a map.
    """

    def __init__(self, kind: str, message: str, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.fields: Mapping[str, Any] = fields or {}


def encode(message: Message, *, json: bool = False) -> tuple[bytes, dict[str, str]]:
    """The payload and its headers."""
    headers = {CONTENT_TYPE: CONTENT_JSON if json else CONTENT_MSGPACK, SEMKV_TYPE: message.type_name()}
    msg_id = message_id(message)
    if msg_id:
        headers[MSG_ID] = msg_id
    if json:
        return _dumps(message), headers
    payload: bytes = msgpack.packb(_packed(message), use_bin_type=True, default=_packed)
    return payload, headers


# A message is validated when it is made, so it is written as it stands: pydantic's own dump looks at every word of a
# result's chunk_status again, which costs ten times as much as all the rest.
def _dumps(message: Message) -> bytes:
    return json.dumps(_shown(message), separators=(",", ":"), ensure_ascii=False, default=_shown).encode()


def _packed(part: BaseModel) -> dict[str, Any]:
    fields = _present(part)
    for name, packing in _packings(type(part)):
        fields[name] = packing.pack(fields[name])
    return fields


def _shown(part: BaseModel) -> dict[str, Any]:
    fields = _present(part)
    for name, packing in _packings(type(part)):
        fields[name] = packing.show(fields[name])
    return fields


def _present(part: BaseModel) -> dict[str, Any]:
    if not isinstance(part, BaseModel):
        raise TypeError(f"{type(part).__name__} is no part of a message")
    return {name: value for name, value in part.__dict__.items() if value is not None}


@lru_cache(maxsize=64)
def _packings(model: type[BaseModel]) -> tuple[tuple[str, Packing], ...]:
    marks = [(name, mark) for name, field in model.model_fields.items() for mark in field.metadata]
    return tuple((name, mark) for name, mark in marks if isinstance(mark, Packing))


def message_id(message: Message) -> str | None:
    """The id by which the server recognises a repetition: commands and answers have one, events do not."""
    if isinstance(message, Command):
        return f"{subjects.token(message.tenant)}.{message.command_id}"
    if isinstance(message, (Accepted, Result)):
        where = f"{subjects.token(message.instance)}.{message.rank}.{message.epoch}"
        return f"{subjects.token(message.tenant)}.{message.command_id}.{where}.{message.type}"
    return None


def subject_of(message: Message) -> str:
    """The subject a message is published on."""
    if isinstance(message, EngineInfo):
        return subjects.registry(message.instance, message.rank)
    assert isinstance(message, TenantMessage)
    if isinstance(message, (Accepted, Result)):
        return subjects.result(
            message.tenant, message.domain, message.client, message.command_id, message.instance, message.rank
        )
    build = subjects.command if message.kind == "cmd" else subjects.event
    return build(message.tenant, message.domain, message.instance, message.type)


def wire_size(payload: bytes, headers: Mapping[str, str]) -> int:
    """What the server counts against its limit: payload, header lines and their frame."""
    return len(payload) + 12 + sum(len(k.encode()) + len(v.encode()) + 4 for k, v in headers.items())


def is_json(headers: Mapping[str, str] | None, payload: bytes) -> bool:
    """Whether a message is JSON: its header says so, or there is no header and it starts with a brace."""
    content = _header(headers, CONTENT_TYPE)
    if content is not None:
        return content.split(";")[0].strip().lower() == CONTENT_JSON
    return payload[:1] == b"{"


def decode(subject: str, headers: Mapping[str, str] | None, payload: bytes) -> Message:
    """The message, validated and in agreement with its subject."""
    try:
        where = subjects.parse(subject)
    except subjects.SubjectError as error:
        raise DecodeError("subject", str(error)) from None
    if len(payload) > MAX_BYTES:
        raise DecodeError("too_large", f"{len(payload)} bytes, at most {MAX_BYTES} are read")
    as_json = is_json(headers, payload)
    fields = _parse(payload, as_json, headers)
    model = _model(where, headers, fields)
    _agree(where, model, fields)
    try:
        return model.model_validate(fields, context=_JSON_CONTEXT if as_json else _MSGPACK_CONTEXT)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "payload"
        raise DecodeError("invalid", f"{model.type_name()}: field {place}: {first['msg']}", fields) from None


def _header(headers: Mapping[str, str] | None, name: str) -> str | None:
    if not headers:
        return None
    value = headers.get(name)
    if value is None:
        value = next((v for k, v in headers.items() if k.lower() == name.lower()), None)
    return value


def _parse(payload: bytes, as_json: bool, headers: Mapping[str, str] | None) -> dict[str, Any]:
    content = _header(headers, CONTENT_TYPE)
    if content is not None and not as_json and content.split(";")[0].strip().lower() != CONTENT_MSGPACK:
        raise DecodeError(
            "content_type", f"Content-Type {content!r:.80} is neither {CONTENT_MSGPACK} nor {CONTENT_JSON}"
        )
    try:
        if as_json:
            fields = json.loads(payload.decode(), parse_constant=_no_constant)
        else:
            fields = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException, OverflowError, MemoryError) as error:
        raise DecodeError("malformed", f"not {'JSON' if as_json else 'msgpack'}: {str(error)[:200]}") from None
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise DecodeError("malformed", f"expected a map with text keys, got {type(fields).__name__}")
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _model(where: subjects.Subject, headers: Mapping[str, str] | None, fields: dict[str, Any]) -> type[Message]:
    header = _header(headers, SEMKV_TYPE)
    if header is None:
        name = where.name
        if where.kind == "res":  # the subject names no type; only a result has a state
            name = "result" if "state" in fields else "accepted"
        model = newest(name)
    else:
        match = _TYPE.match(header)
        if not match:
            raise DecodeError("unknown_type", f"Semkv-Type {header!r:.80} is not of the form prefetch.v1", fields)
        name = match[1]
        model = lookup(name, int(match[2]))
        if model is None and newest(name) is not None:
            raise DecodeError("unknown_version", f"{header} is not among the versions this reader knows", fields)
    if model is None:
        raise DecodeError("unknown_type", f"no message type {name!r:.80}", fields)
    if model.kind != where.kind or (where.name and model.type != where.name):
        raise DecodeError("mismatch", f"a {model.type_name()} cannot be on a {where.kind} {where.name} subject", fields)
    return model


def _agree(where: subjects.Subject, model: type[Message], fields: dict[str, Any]) -> None:
    """Refuses what contradicts the subject and fills in what it says."""
    if where.kind == "registry":
        names = {"instance": where.instance}
        exact: dict[str, Any] = {"rank": where.rank}
    else:
        names = {"tenant": where.tenant, "instance": where.instance}
        exact = {"domain": where.domain}
        if where.kind == "res":
            names["client"] = where.client
            exact |= {"command_id": where.command_id, "rank": where.rank}
        elif "op" in fields or "type" in fields:
            exact |= {key: where.name for key in ("op", "type") if key in fields}
    for field, expected in names.items():
        value = fields.setdefault(field, expected)
        if not isinstance(value, str) or not subjects.stands_for(value, expected):
            raise DecodeError("mismatch", f"{field} {value!r:.80} is not the subject's {expected!r}", fields)
    for field, wanted in exact.items():
        value = fields.setdefault(field, wanted)
        if type(value) is not type(wanted) or value != wanted:
            raise DecodeError("mismatch", f"{field} {value!r:.80} is not the subject's {wanted!r}", fields)
    if issubclass(model, Command) and "command_id" not in fields:
        raise DecodeError("invalid", f"{model.type_name()}: field command_id: missing", fields)
