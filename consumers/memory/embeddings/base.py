# SPDX-License-Identifier: Apache-2.0
"""The protocol behind the search: texts in, vectors out.

A sparse vector maps a term to its weight and lets the search say which words decided; a dense one is what embedding
models give. ``name`` is kept with each vector: another name means vectors that must not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Embedding", "EmbeddingError", "Vector"]

Vector = dict[str, float] | list[float]


class EmbeddingError(RuntimeError):
    """The embedding could not be had; the message names the source and the way out."""


class Embedding(Protocol):
    """Makes vectors of texts; may be slow, may raise EmbeddingError."""

    @property
    def name(self) -> str: ...

    @property
    def floor(self) -> float:
        """The score below which a best match is not believed."""
        ...

    def reads(self, text: str) -> bool:
        """Whether it understands the language of the text; else the search uses words alone."""
        ...

    async def embed(self, texts: Sequence[str]) -> list[Vector]: ...
