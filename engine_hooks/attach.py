# SPDX-License-Identifier: Apache-2.0
"""Hooks onto one LMCache connector: before it is built (`prepare`) and after (`attach`).

`prepare` decides whether a configuration is one that semkv serves, says in one line why not if it is not, and puts the
patches and, where LMCache has none, the device connector in place. `attach` changes the class of the built connector
(its state stays) and gives it its scheduler side or its worker side. Called on the process's main thread.
Errors: none of ours reach vLLM; a half-made hook is taken off again.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from semkv.bus.settings import SettingsError
from semkv.engine_hooks import settings

_log = logging.getLogger("semkv.engine_hooks")

LMCACHE_CLASSES = frozenset({"LMCacheConnectorV1", "LMCacheConnectorV1Dynamic", "SemKVConnectorV1"})
ASCEND_MODULE = "lmcache_ascend"
REFUSED = {
    "MultiConnector": "kv_connector MultiConnector: two children may both answer with parameters; "
    "name LMCache's connector directly",
    "LMCacheMPConnector": "kv_connector LMCacheMPConnector: LMCache runs in a process of its own, out of reach of the "
    "engine's hooks; use LMCacheConnectorV1",
}
NATIVE = "use_native true: vLLM's own copy of LMCache's adapter is not hooked; leave use_native out"


def refusal(config: Any, connector_class: type) -> str | None:
    """Why this connector is left alone although it has to do with LMCache; None if it is served or not ours at all."""
    transfer = config.kv_transfer_config
    name = connector_class.__name__
    if name in REFUSED:
        return REFUSED[name]
    if is_lmcache(connector_class) and transfer.get_from_extra_config("use_native", False):
        return NATIVE
    return None


def is_lmcache(connector_class: type) -> bool:
    """Whether the class is LMCache's connector, LMCache-Ascend's, ours, or derived from one of them."""
    for base in connector_class.__mro__:
        if base.__name__ in LMCACHE_CLASSES or base.__module__.partition(".")[0] == ASCEND_MODULE:
            return True
    return False


def wanted() -> bool:
    """Whether semkv is switched on in this process; a switch that cannot be read is said, and off."""
    try:
        return settings.enabled()
    except settings.SettingError as error:
        _log.error("semkv: not hooked: %s", error)
        return False


def prepare(factory: Any, config: Any) -> bool:
    """Get this process ready for the connector that is about to be built. True if `attach` is to follow."""
    try:
        connector_class = factory.get_connector_class(config.kv_transfer_config)
    except Exception:
        return False  # vLLM is about to say what is wrong
    try:
        reason = refusal(config, connector_class)
        if reason is not None:
            _log.error("semkv: not hooked: %s", reason)
            return False
        if not is_lmcache(connector_class):
            return False
        make_ready()
        return wanted()
    except Exception as error:
        _log.exception(
            "semkv: could not get ready for %s; it runs without hooks: %s: %s",
            connector_class.__name__,
            type(error).__name__,
            error,
        )
        return False


def make_ready() -> None:
    """What has to be in place before LMCache's adapter is built, in both roles. Safe to repeat."""
    # The adapter is imported late by vLLM's connector; what replaces parts of it must find it there.
    importlib.import_module("lmcache.integration.vllm.vllm_v1_adapter")
    from semkv.native import lmcache_connector

    lmcache_connector.install()  # only where LMCache has no device connector
    from semkv.engine_hooks.patches import apply_all

    apply_all()


def attach(connector: Any, config: Any, role: Any) -> Any:
    """Hook a connector that was just built, and return it."""
    from semkv.engine_hooks.hooked import hooked_class
    from semkv.engine_hooks.sides import make_side

    try:
        if getattr(connector, "_semkv_side", None) is not None:
            return connector
        side = make_side(connector._lmcache_engine, config, role)
        if side is not None:
            connector.__class__ = hooked_class(type(connector))
            connector._semkv_side = side
    except (settings.SettingError, SettingsError) as error:
        _log.error("semkv: not hooked: %s", error)
    except Exception:
        _log.exception("semkv: could not hook %s; it runs as vLLM built it", type(connector).__name__)
    return connector
