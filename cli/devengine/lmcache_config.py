# SPDX-License-Identifier: Apache-2.0
"""The LMCache configuration of the development engine: a small DDR pool, an SSD tier, async loading."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LMCacheConfig:
    """LMCache's settings as semkv needs them. Sizes in GiB; `disk` is the SSD tier's folder.

    `hash_algorithm` other than `builtin` is LMCache's `pre_caching_hash_algorithm`. `extra` goes into `extra_config`.
    """

    disk: Path
    chunk_size: int = 64
    ddr_gib: float = 0.1
    disk_gib: float = 1.0
    hash_algorithm: str = "builtin"
    save_unfull_chunk: bool = False
    async_loading: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write the YAML file (JSON is YAML) and return its path."""
        self.disk.mkdir(parents=True, exist_ok=True)
        values: dict[str, Any] = {
            "chunk_size": self.chunk_size,
            "local_cpu": True,
            "max_local_cpu_size": self.ddr_gib,
            "local_disk": f"file://{self.disk}/",
            "max_local_disk_size": self.disk_gib,
            "enable_async_loading": self.async_loading,
            "save_unfull_chunk": self.save_unfull_chunk,
            "pre_caching_hash_algorithm": self.hash_algorithm,
            "extra_config": {"enable_cache_usage_details_in_response": True, **self.extra},
            **self.settings,
        }
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        return path
