# SPDX-License-Identifier: Apache-2.0
"""The publisher of an engine without NATS: it has the calls of `EventPublisher`, keeps nothing and sends nothing."""

from __future__ import annotations

from semkv.engine_hooks.finished import FinishedNote


class NoEvents:
    """Called as `EventPublisher` is, on the same threads; starts none."""

    def start(self) -> None:
        """There is nothing to start."""

    def offer(self, note: FinishedNote) -> None:
        """Nobody is told."""

    def close(self, timeout: float = 1.0) -> None:
        """There is nothing to hand over."""
