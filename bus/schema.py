# SPDX-License-Identifier: Apache-2.0
"""The contract for other languages, generated from the models: JSON Schema of every message, and AsyncAPI 3.

`write` puts both into a directory; the committed copies are in `docs/schema/` and a test keeps them true. Pure
functions but `write`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from semkv.bus import subjects
from semkv.bus.codec import CONTENT_JSON, CONTENT_MSGPACK
from semkv.bus.messages import Message, registered
from semkv.bus.status import Op

ASYNCAPI = "asyncapi.json"
_ID = "https://json-schema.org/draft/2020-12/schema"

_CHANNELS: dict[str, tuple[str, str, list[str]]] = {
    "commands": (
        f"{subjects.PREFIX}.{{tenant}}.{{domain}}.cmd.{{instance}}.{{op}}",
        "What agents ask of ranks; `instance` is an instance's token or `all`.",
        ["tenant", "domain", "instance", "op"],
    ),
    "events": (
        f"{subjects.PREFIX}.{{tenant}}.{{domain}}.evt.{{instance}}.{{type}}",
        "What engines tell: finished requests, heartbeats, outcomes of prefetches.",
        ["tenant", "domain", "instance", "type"],
    ),
    "results": (
        f"{subjects.PREFIX}.{{tenant}}.{{domain}}.res.{{client}}.{{command_id}}.{{instance}}.{{rank}}",
        "A rank's answers to one command: `accepted`, then exactly one `result`, on the same subject.",
        ["tenant", "domain", "client", "command_id", "instance", "rank"],
    ),
    "registry": (
        f"{subjects.REGISTRY_PREFIX}.{{instance}}.{{rank}}",
        "The live ranks: a key-value bucket, put every two seconds, always JSON.",
        ["instance", "rank"],
    ),
}
_CHANNEL_OF = {"cmd": "commands", "evt": "events", "res": "results", "registry": "registry"}
_PARAMETERS = {
    "tenant": "Token of the tenant's name.",
    "domain": "Fingerprint of the hash domain: 12 hex digits.",
    "instance": "Token of the engine instance's name, or `all` in commands.",
    "op": "What a command asks for.",
    "type": "The event's type.",
    "client": "Token of the client's name, as the command gave it.",
    "command_id": "The command's id.",
    "rank": "Number of the rank.",
}


def json_schema(model: type[Message]) -> dict[str, Any]:
    """JSON Schema (2020-12) of one message in its JSON form. What the subject says may be left out of a payload."""
    schema = model.model_json_schema(mode="validation")
    filled = {"tenant", "domain", "instance"} | ({"client", "command_id", "rank"} if model.kind == "res" else set())
    if model.kind == "registry":
        filled = {"instance", "rank"}
    schema["required"] = [name for name in schema["required"] if name not in filled]
    return {"$schema": _ID, **schema, "title": model.type_name()}


def json_schemas() -> dict[str, dict[str, Any]]:
    """All of them, by file name."""
    return {f"{model.type_name()}.json": json_schema(model) for model in registered()}


def asyncapi(version: str = "1.0.0") -> dict[str, Any]:
    """The AsyncAPI 3 document."""
    models = registered()
    messages = {model.type_name(): _message(model) for model in models}
    channels = {}
    for name, (address, text, parameters) in _CHANNELS.items():
        mine = [m.type_name() for m in models if _CHANNEL_OF[m.kind] == name]
        channels[name] = {
            "address": address,
            "description": text,
            "parameters": {p: _parameter(p) for p in parameters},
            "messages": {key: {"$ref": f"#/components/messages/{key}"} for key in mine},
        }
    operations = {
        "command": _operation("send", "commands", "An agent publishes a command."),
        "answers": _operation("receive", "results", "An agent reads the answers to its commands."),
        "follow": _operation("receive", "events", "An agent follows what engines tell."),
        "engines": _operation("receive", "registry", "An agent learns which ranks are live."),
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "semkv",
            "version": version,
            "description": "An agent's memory steers the KV caches of LLM engines, over NATS. See contracts.md.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_MSGPACK,
        "servers": {
            "nats": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "2.11 or newer, JetStream on"}
        },
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages},
    }


def _message(model: type[Message]) -> dict[str, Any]:
    schema = json_schema(model)
    schema.pop("$schema")
    text = (model.__doc__ or "").strip()
    return {
        "name": model.type_name(),
        "title": model.type_name(),
        "summary": text.splitlines()[0],
        "contentType": CONTENT_JSON if model.kind == "registry" else CONTENT_MSGPACK,
        "headers": {
            "type": "object",
            "properties": {
                "Content-Type": {"type": "string", "enum": [CONTENT_MSGPACK, CONTENT_JSON]},
                "Semkv-Type": {"type": "string", "const": model.type_name()},
                "Nats-Msg-Id": {"type": "string", "description": "commands: <tenant token>.<command_id>"},
                "traceparent": {"type": "string"},
                "tracestate": {"type": "string"},
            },
        },
        "payload": _inline(schema),
    }


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """References to `$defs` replaced by what they stand for: a payload inside the document has no root of its own."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            reference = node.get("$ref", "")
            if reference.startswith("#/$defs/"):
                return walk(definitions[reference.removeprefix("#/$defs/")])
            return {key: walk(value) for key, value in node.items()}
        return [walk(item) for item in node] if isinstance(node, list) else node

    whole: dict[str, Any] = walk(schema)
    return whole


def _parameter(name: str) -> dict[str, Any]:
    described: dict[str, Any] = {"description": _PARAMETERS[name]}
    if name == "op":
        described["enum"] = [str(op) for op in Op]
    return described


def _operation(action: str, channel: str, summary: str) -> dict[str, Any]:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary}


def documents() -> dict[str, str]:
    """Every generated file: its name and its text."""
    files = {**json_schemas(), ASYNCAPI: asyncapi()}
    return {
        name: json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for name, content in files.items()
    }


def write(directory: Path) -> list[Path]:
    """Writes the documents into a directory (`semkv schema`)."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in documents().items():
        file = directory / name
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written
