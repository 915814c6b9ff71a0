# SPDX-License-Identifier: Apache-2.0
"""xiaoO's debug files: ``kvcache_debug/kvcache_debug_{session}_{turn}.json``, only when asked for.

Same names and fields as that agent writes (session_id, turn, messages, chunk_hashes, timing). Other than there: secrets
are taken out, the newest ``keep`` files stay and the rest go, a file is whole or absent, only its owner can read it, a
session's name cannot lead out of the folder, and trouble is logged once and never reaches the turn. ``write`` blocks;
``write_soon`` does it in a worker thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semkv.consumers.memory.xiaoo.secrets import without_secrets

__all__ = ["DebugFiles"]

log = logging.getLogger(__name__)

_SAFE = re.compile(r"[^A-Za-z0-9_-]")
_MAX_BYTES = 8 * 1024 * 1024


class DebugFiles:
    """Writes one file per model call while enabled."""

    def __init__(self, folder: Path | str = "kvcache_debug", *, enabled: bool = False, keep: int = 200) -> None:
        if keep < 1:
            raise ValueError(f"keep: {keep} must be at least 1; to write no files, leave enabled false")
        self.folder = Path(folder)
        self.enabled = enabled
        self.keep = keep
        self._lock = threading.Lock()
        self._complained = False

    async def write_soon(self, *args: Any, **fields: Any) -> Path | None:
        return await asyncio.to_thread(self.write, *args, **fields) if self.enabled else None

    def write(self, session: str, turn: int, *, messages: Sequence[Mapping[str, Any]],
              chunk_hashes: Sequence[str], timing: Mapping[str, float] | None = None) -> Path | None:  # fmt: skip
        """The file written, or None when not enabled, without hashes (as there), or not possible."""
        if not self.enabled or not chunk_hashes:
            return None
        times = dict(timing or {})
        record = {
            "session_id": session,
            "turn": turn,
            "messages": without_secrets([dict(message) for message in messages]),
            "chunk_hashes": list(chunk_hashes),
            "timing": {name: times.get(name) for name in ("ttft_ms", "total_time_ms", "tpot_ms")},
        }
        text = json.dumps(record, ensure_ascii=False, indent=2, default=str)
        if len(text) > _MAX_BYTES:
            record["messages"] = f"left out: {len(text)} characters"
            text = json.dumps(record, ensure_ascii=False, indent=2, default=str)
        target = self.folder / f"kvcache_debug_{_file_token(session)}_{int(turn)}.json"
        with self._lock:
            try:
                self._put(target, text)
                self._rotate()
            except OSError as error:
                if not self._complained:
                    log.warning("debug file %s: %s; further trouble is not logged", target, error)
                self._complained = True
                return None
        return target

    def _put(self, target: Path, text: str) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            part.replace(target)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _rotate(self) -> None:
        files = sorted(self.folder.glob("kvcache_debug_*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        for old in files[: -self.keep]:
            old.unlink(missing_ok=True)


def _file_token(session: str) -> str:
    """The session's name where it is harmless, else made so with a short hash of the whole."""
    safe = _SAFE.sub("-", session)[:80]
    if safe == session and safe:
        return safe
    return f"{safe}-{hashlib.blake2s(session.encode()).hexdigest()[:8]}"
