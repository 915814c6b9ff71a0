# SPDX-License-Identifier: Apache-2.0
"""Chunk hashes in the API server's process, for requests that it ends itself (stop strings).

The engine's own token database is built here a second time, from the same configuration, by a thread at start-up;
until it is there, and whenever it cannot be trusted, such answers simply carry no hashes. It is trusted if its roots
are stable and, from the first answer of the engine that has hashes, if it gives the same ones.

Threads: `wanted` and `answer` belong to the API server's loop; the build runs in a daemon thread that ends.
Errors: none reach the server.
"""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

from semkv.engine_hooks import refusals
from semkv.engine_hooks.scheduler_side import CHUNK_HASHES
from semkv.engine_hooks.settings import HookSettings

_log = logging.getLogger("semkv.engine_hooks")


class FrontEndHashes:
    """The hashes of one engine's prompts, as its API server computes them."""

    def __init__(self, vllm_config: Any, settings: HookSettings) -> None:
        self.vllm_config = vllm_config
        self.settings = settings
        self.trusted = False
        self.checked = False
        self._database: Any = None
        self._texts: Any = None

    def start(self) -> None:
        """Build in a thread: LMCache's import takes seconds, and the server is starting."""
        threading.Thread(target=self._build_safely, name="semkv-front-end", daemon=True).start()

    def _build_safely(self) -> None:
        try:
            self._build()
        except Exception:
            _log.exception("semkv: answers that end on a stop string carry no chunk hashes")

    def _build(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        from semkv.engine_hooks import attach

        transfer = self.vllm_config.kv_transfer_config
        # The connector's module first: LMCache-Ascend changes LMCache's hash when it is imported.
        connector_class = KVConnectorFactory.get_connector_class(transfer)
        if attach.refusal(self.vllm_config, connector_class) or not attach.is_lmcache(connector_class):
            return
        from lmcache.v1.token_database import ChunkedTokenDatabase

        from semkv.engine_hooks.lookup_client import HashTexts
        from semkv.engine_hooks.sides import engine_status, use_configured_hash

        config = lmcache_config(transfer)
        if engine_status(config) is not None:
            return  # the engine says so in its log
        database = ChunkedTokenDatabase(config, None)
        use_configured_hash(database, config=config, vllm_config=self.vllm_config)
        self._texts = HashTexts()
        self._database = database
        self.trusted = True

    def wanted(self, request: Any) -> bool:
        """Whether this request (vLLM's EngineCoreRequest) may end here, and its tokens are all that names its cache."""
        if not self.trusted or not self.settings.return_hashes:
            return False
        sampling = request.sampling_params
        if sampling is None or not (sampling.stop or not self.checked):
            return False
        if request.mm_features or refusals.request_reason(request) is not None:
            return False
        extra = (sampling.extra_args or {}).get("kv_transfer_params") or {}
        return not any(isinstance(name, str) and name.startswith(refusals.TAG_PREFIX) for name in extra)

    def answer(self, state: Any, params: dict[str, Any] | None, stop_reason: Any) -> dict[str, Any] | None:
        """The parameters to answer with: `params` itself, or with the hashes of `state`'s prompt."""
        if not self.trusted or not state.prompt_token_ids:
            return params
        given = params.get(CHUNK_HASHES) if params else None
        if given:
            if not self.checked:
                self._check(state, given)
            return params
        if not isinstance(stop_reason, str):
            return params  # the engine ended it and had no hashes to give, or the client left
        texts = self._hashes(state)
        return {**(params or {}), CHUNK_HASHES: texts} if texts else params

    def _check(self, state: Any, given: list[str]) -> None:
        self.checked = True
        mine = self._hashes(state)
        if mine != given:
            self.trusted = False
            _log.error(
                "semkv: answers that end on a stop string carry no chunk hashes: the API server computes others than "
                "the engine (%d and %d for one prompt); are both started with the same PYTHONHASHSEED and Python?",
                len(mine),
                len(given),
            )

    def _hashes(self, state: Any) -> list[str]:
        tokens = list(state.prompt_token_ids)
        skip = int(self.vllm_config.kv_transfer_config.get_from_extra_config("skip_last_n_tokens", 0) or 0)
        if skip > 0:
            tokens = tokens[:-skip]
        texts: list[str] = self._texts.of(list(self._database.process_tokens(tokens, make_key=False)))
        return texts


def lmcache_config(transfer: Any) -> Any:
    """LMCache's configuration as the engine will have it: file, environment, and what the KV transfer adds."""
    from lmcache.integration.vllm.utils import lmcache_get_or_create_config
    from lmcache.v1.config_base import validate_and_set_config_value

    config = copy.copy(lmcache_get_or_create_config())
    for name, value in (transfer.kv_connector_extra_config or {}).items():
        if name.startswith("lmcache."):
            validate_and_set_config_value(config, name.removeprefix("lmcache."), value)
    return config
