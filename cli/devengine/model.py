# SPDX-License-Identifier: Apache-2.0
"""Makes a random-weight Qwen2 model and its tokenizer, locally: nothing comes from a hub.

The files are written directly (safetensors, `tokenizers`, JSON), not through transformers: it takes about a second
instead of ten, and the same folder loads in every vLLM version. Weights are drawn wide (`init_range`), so that greedy
output depends on the whole context and a wrong KV cache shows in the text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TRAINING_TEXT = (
    "the memory of an agent remembers what was said and what will be read again. a conversation about a topic has many "
    "turns. the engine keeps keys and values of each token in chunks, on a device, in memory and on a disk. "
    "hello world, this is a small model for testing caches. the quick brown fox jumps over the lazy dog."
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. `head_dim` = hidden / heads must be one that vLLM's CPU attention has (32, 64, 80, 96, 128).

    KV bytes per token are `2 * layers * kv_heads * head_dim * 4` (float32).
    """

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    vocab: int = 512
    max_positions: int = 8192
    init_range: float = 0.3

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


TINY = ModelShape()
"""1.7 MB: for tests about correctness."""


def make_model(folder: Path, shape: ModelShape = TINY, seed: int = 0) -> Path:
    """Write the model into `folder` (made if absent) and return it. Needs numpy, safetensors and tokenizers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _write_tokenizer(folder, shape.vocab)
    _write_config(folder, shape, tokens)
    _write_weights(folder, shape, seed)
    return folder


def _write_tokenizer(folder: Path, vocab: int) -> dict[str, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    end, start, turn_end = SPECIAL_TOKENS
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": turn_end,
            "pad_token": end,
            "additional_special_tokens": [start],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    # The trainer numbers the special tokens first, in the order given.
    return {name: index for index, name in enumerate(SPECIAL_TOKENS)}


def _write_config(folder: Path, shape: ModelShape, tokens: dict[str, int]) -> None:
    end, _, turn_end = SPECIAL_TOKENS
    _write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": shape.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "torch_dtype": "float32",
            "eos_token_id": tokens[turn_end],
            "pad_token_id": tokens[end],
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"_from_model_config": True, "eos_token_id": tokens[turn_end], "pad_token_id": tokens[end]},
    )


def _write_weights(folder: Path, shape: ModelShape, seed: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)
    # Wide for the small model; a wider or deeper one keeps the same variance per layer.
    scale = shape.init_range * (TINY.hidden / shape.hidden) ** 0.5

    def matrix(rows: int, columns: int) -> Any:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)

    def ones(size: int) -> Any:
        return np.ones(size, dtype=np.float32)

    def zeros(size: int) -> Any:
        return np.zeros(size, dtype=np.float32)

    hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
    weights: dict[str, Any] = {
        "model.embed_tokens.weight": matrix(shape.vocab, hidden),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": matrix(shape.vocab, hidden),
    }
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        weights |= {
            f"{layer}.input_layernorm.weight": ones(hidden),
            f"{layer}.post_attention_layernorm.weight": ones(hidden),
            f"{attention}.q_proj.weight": matrix(hidden, hidden),
            f"{attention}.q_proj.bias": zeros(hidden),
            f"{attention}.k_proj.weight": matrix(kv, hidden),
            f"{attention}.k_proj.bias": zeros(kv),
            f"{attention}.v_proj.weight": matrix(kv, hidden),
            f"{attention}.v_proj.bias": zeros(kv),
            f"{attention}.o_proj.weight": matrix(hidden, hidden),
            f"{mlp}.gate_proj.weight": matrix(shape.intermediate, hidden),
            f"{mlp}.up_proj.weight": matrix(shape.intermediate, hidden),
            f"{mlp}.down_proj.weight": matrix(hidden, shape.intermediate),
        }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
