# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: vLLM calls `register()` once in each of its processes.

With SEMKV_NATS_URL or SEMKV_DIRECT set it arranges for two things, both done when vLLM itself imports the module
concerned: `KVConnectorFactory.create_connector` is wrapped, so that an LMCache connector comes out hooked; and the API
server's request handling gets what the engine cannot do (stop strings, streaming). Without either nothing is touched.

It starts no thread and imports neither torch nor LMCache. It never raises: vLLM would not start.
"""

from __future__ import annotations

import logging

from semkv.engine_hooks import settings
from semkv.engine_hooks.post_import import when_imported

_log = logging.getLogger("semkv.engine_hooks")

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_registered: set[str] = set()


def register() -> None:
    """Hook this process, once, if semkv is switched on."""
    try:
        if _registered or not settings.enabled():
            return
        _registered.add("plugin")
        _show_log()
        from semkv.engine_hooks import front_end, wrap_factory

        when_imported(FACTORY, wrap_factory.wrap)
        front_end.register()
    except settings.SettingError as error:
        _log.error("semkv: not hooked: %s", error)
    except Exception:
        _log.exception("semkv: the plugin could not hook this process; vLLM runs without it")


def _show_log() -> None:
    """vLLM gives handlers to its own loggers only: without this, our lines below WARNING would go nowhere."""
    ours = logging.getLogger("semkv")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [semkv] %(message)s", "%m-%d %H:%M:%S"))
        ours.addHandler(handler)
        ours.propagate = False
        if ours.level == logging.NOTSET:
            ours.setLevel(logging.INFO)
