# SPDX-License-Identifier: Apache-2.0
"""What every message has, and the registry of message types.

`Message` carries domain and instance, `TenantMessage` the tenant too, `Command` the ids of who asks. Subclasses set
`type` and `version` and are registered when their module is imported. Immutable; any thread.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from semkv.bus.fields import Name, Token

_registry: dict[tuple[str, int], type[Message]] = {}
_newest: dict[str, type[Message]] = {}


class Message(BaseModel):
    """Base of all messages: which hash domain and which instance it is about."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    type: ClassVar[str]
    version: ClassVar[int]
    kind: ClassVar[str]
    """Where it travels: `cmd`, `evt`, `res` or `registry`."""

    domain: Token
    instance: Name

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "type" in cls.__dict__:
            _registry[(cls.type, cls.version)] = cls
            if cls.type not in _newest or _newest[cls.type].version < cls.version:
                _newest[cls.type] = cls

    @classmethod
    def type_name(cls) -> str:
        """The text of the `Semkv-Type` header."""
        return f"{cls.type}.v{cls.version}"


class TenantMessage(Message):
    """A message of one tenant. `tenant` may be a full name; subjects carry its token."""

    tenant: Name


class Command(TenantMessage):
    """What an agent asks of ranks. `instance` is an instance's name, or `all` for every one of the domain."""

    kind: ClassVar[str] = "cmd"

    command_id: Token
    client: Name


def lookup(type_: str, version: int) -> type[Message] | None:
    """The model registered for (type, version), or None."""
    return _registry.get((type_, version))


def newest(type_: str) -> type[Message] | None:
    """The newest model of a type, or None for an unknown type."""
    return _newest.get(type_)


def registered() -> tuple[type[Message], ...]:
    """All registered models, by type and version."""
    return tuple(_registry[key] for key in sorted(_registry))
