# SPDX-License-Identifier: Apache-2.0
"""The hooks' own settings, from the environment. The connection's settings are `semkv.bus.settings.BusSettings`.

Read once per process, when something is hooked. Standard library only: the plugin reads `enabled()` in every process.
Errors: SettingError names the variable, its value and what is accepted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


class SettingError(ValueError):
    """A variable's value cannot be used."""


def on_the_bus(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the engine speaks NATS: SEMKV_NATS_URL is set and not empty."""
    return bool((os.environ if environment is None else environment).get("SEMKV_NATS_URL", "").strip())


def direct(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the engine answers agents on LMCache's internal API server: SEMKV_DIRECT=1. SettingError as for all."""
    return _flag(os.environ if environment is None else environment, "SEMKV_DIRECT", False)


def enabled(environment: Mapping[str, str] | None = None) -> bool:
    """Whether anything is hooked at all: for NATS, for direct mode, or for both."""
    return on_the_bus(environment) or direct(environment)


def _number(environment: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise SettingError(f"{name}={text!r}: give a whole number from {low} to {high} (default {default})")
    return value


def _flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = environment.get(name, "").strip().lower()
    if not text:
        return default
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise SettingError(f"{name}={text!r}: give 1 or 0 (default {int(default)})")


@dataclass(frozen=True)
class HookSettings:
    """`records`: live requests whose hashes are remembered. `ring`: finished events kept while NATS is away.

    `return_hashes`: put `chunk_hashes` into the answers. `trust_tenant`: let a request name its tenant.
    `direct_wait_s`: how long direct mode waits for a rank before it names it as silent.
    """

    records: int = 1024
    ring: int = 8192
    return_hashes: bool = True
    trust_tenant: bool = False
    tenant: str = "default"
    direct_wait_s: int = 10

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> HookSettings:
        env = os.environ if environment is None else environment
        return cls(
            records=_number(env, "SEMKV_HASH_RECORDS", cls.records, 1, 1 << 20),
            ring=_number(env, "SEMKV_EVENT_RING", cls.ring, 1, 1 << 20),
            return_hashes=_flag(env, "SEMKV_RETURN_HASHES", cls.return_hashes),
            trust_tenant=_flag(env, "SEMKV_TRUST_REQUEST_TENANT", cls.trust_tenant),
            tenant=env.get("SEMKV_TENANT", "").strip() or cls.tenant,
            direct_wait_s=_number(env, "SEMKV_DIRECT_WAIT_S", cls.direct_wait_s, 1, 600),
        )
