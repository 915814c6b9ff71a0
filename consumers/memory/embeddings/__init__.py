# SPDX-License-Identifier: Apache-2.0
"""Where the search's vectors come from: built-in lexical, an OpenAI-compatible server, or a local model."""

from __future__ import annotations

from semkv.consumers.memory.embeddings.base import Embedding, EmbeddingError, Vector
from semkv.consumers.memory.embeddings.lexical import LexicalEmbedding
from semkv.consumers.memory.embeddings.local import LocalEmbedding
from semkv.consumers.memory.embeddings.remote import OpenAIEmbedding

__all__ = ["Embedding", "EmbeddingError", "LexicalEmbedding", "LocalEmbedding", "OpenAIEmbedding", "Vector"]
