# SPDX-License-Identifier: Apache-2.0
"""Wraps `KVConnectorFactory.create_connector`: LMCache's connectors come out hooked, every other as vLLM made it.

The patches on LMCache go in here and not earlier: the connector's module has been imported by then, so that what
LMCache-Ascend replaces is in place and is what gets looked at.
Errors: those of vLLM and of the connector itself pass; ours never do.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

_log = logging.getLogger("semkv.engine_hooks")
_MARK = "__semkv_wrapped__"


def wrap(module: ModuleType) -> None:
    """Wrap the factory of vLLM's module, once."""
    factory = module.KVConnectorFactory
    original = factory.__dict__["create_connector"].__func__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_connector(cls: Any, config: Any, role: Any, *args: Any, **kwargs: Any) -> Any:
        from semkv.engine_hooks import attach

        ours = attach.prepare(cls, config)
        connector = original(cls, config, role, *args, **kwargs)
        return attach.attach(connector, config, role) if ours else connector

    setattr(create_connector, _MARK, original)
    factory.create_connector = classmethod(create_connector)
