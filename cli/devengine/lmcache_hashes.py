# SPDX-License-Identifier: Apache-2.0
"""LMCache's own chunk hashes of a prompt, from LMCache's own token database, in a process of its own.

The chain's root depends on PYTHONHASHSEED, which a running interpreter cannot change: the process is started with the
engine's. It reads one JSON list of token ids a line and answers one JSON list of hex hashes, as LMCache prints them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import cast


class LMCacheHasher:
    """Asks a real LMCache 0.4.3 token database. A context manager; blocking; one question at a time."""

    def __init__(self, chunk_size: int, *, seed: str = "0") -> None:
        self._command = [sys.executable, "-m", __name__, str(chunk_size)]
        self._environment = {**os.environ, "PYTHONHASHSEED": seed, "LMCACHE_TRACK_USAGE": "false"}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> LMCacheHasher:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()

    def hashes(self, token_ids: Sequence[int]) -> list[str]:
        """The chunk hashes of the prompt's whole chunks, as LMCache prints them."""
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("LMCacheHasher is used as a context manager")
        self._process.stdin.write(json.dumps(list(token_ids)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"LMCache's token database ended with code {self._process.wait()}")
        return cast(list[str], json.loads(answer))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # What LMCache logs to standard output must not stand between the answers.
    os.dup2(2, 1)
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase

    config = LMCacheEngineConfig.from_defaults(chunk_size=int(sys.argv[1]))
    database = ChunkedTokenDatabase(config, None)
    for line in sys.stdin:
        chunks = database.process_tokens(tokens=json.loads(line), make_key=False)
        print(json.dumps([f"{chunk_hash:x}" for _, _, chunk_hash in chunks]), file=answers, flush=True)


if __name__ == "__main__":
    main()
