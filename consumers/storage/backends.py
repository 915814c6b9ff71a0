# SPDX-License-Identifier: Apache-2.0
"""The storage backends of one LMCache engine, as semkv's operations see them.

Finds the hot cache, the local disk and the remote backend, makes cache keys for hashes, and names the modes semkv does
not operate on. Frozen and bypassed backends are skipped, as LMCache itself does.

Threads: any; nothing is cached that LMCache may replace (backends can be closed and created again).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from semkv.bus.status import Tier

CPU = "LocalCPUBackend"
DISK = "LocalDiskBackend"
REMOTE = "RemoteBackend"
TIER_BACKENDS: dict[Tier, str] = {Tier.CPU: CPU, Tier.DISK: DISK, Tier.REMOTE: REMOTE}
LOCAL_TIERS: tuple[Tier, ...] = (Tier.CPU, Tier.DISK)
_MODES = {
    "use_layerwise": "layerwise caching",
    "enable_blending": "blending",
    "enable_pd": "prefill/decode disaggregation",
    "enable_p2p": "peer-to-peer sharing",
    "gds_path": "GDS",
    "enable_nixl_storage": "NIXL storage",
    "maru_path": "Maru",
}


class Backends:
    """Access to one engine's storage manager."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def manager(self) -> Any:
        """LMCache's storage manager, None before the engine is ready or on a passive rank."""
        return self.engine.storage_manager

    def unsupported_mode(self) -> str | None:
        """Why this engine's storage cannot be operated on, or None."""
        config = self.engine.config
        if self.manager is None:
            return "this rank has no storage manager"
        extra = config.extra_config or {}
        for name, words in _MODES.items():
            if getattr(config, name, None) or extra.get(name):
                return f"{words} ({name}) is not supported"
        if not config.local_cpu:
            return "local_cpu: false is not supported: there is no DDR tier to load into"
        if self.manager.storage_backends.get(CPU) is None:
            return f"this engine has no {CPU}"
        return None

    def active(self, name: str) -> Any:
        """The backend of that name, None if absent, bypassed or frozen out."""
        for _, backend in self.manager.get_active_storage_backends(location=name):
            return backend
        return None

    @property
    def cpu(self) -> Any:
        """The hot cache's backend; present in every supported mode."""
        return self.manager.storage_backends[CPU]

    @property
    def disk(self) -> Any:
        """The local disk backend in use, or None."""
        return self.active(DISK)

    @property
    def remote(self) -> Any:
        """The remote backend in use, or None."""
        return self.active(REMOTE)

    def others(self) -> list[str]:
        """Names of active backends that semkv does not operate on."""
        known = set(TIER_BACKENDS.values())
        return [name for name, _ in self.manager.get_active_storage_backends() if name not in known]

    def keys(self, hashes: Iterable[int]) -> list[Any]:
        """Cache keys for hashes, as this engine's own token database makes them."""
        make = self.engine.token_database._make_key_by_hash
        return [make(chunk_hash) for chunk_hash in hashes]

    def pool_bytes(self) -> int:
        """Size of the DDR pool."""
        buffer = getattr(self.cpu.memory_allocator, "buffer", None)
        if buffer is not None:
            return int(buffer.numel()) * int(buffer.element_size())
        return int(self.engine.config.max_local_cpu_size * 1024**3)

    def pool_used_bytes(self) -> int:
        """Bytes of the DDR pool that are allocated."""
        allocator = getattr(self.cpu.memory_allocator, "pin_allocator", None)
        return int(getattr(allocator, "total_allocated_size", 0))

    def live_loading(self) -> bool:
        """True while a live request's load holds LMCache's serializer."""
        lock = getattr(self.manager.async_serializer, "lock", None)
        return bool(lock is not None and lock.locked())
