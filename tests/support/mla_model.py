# SPDX-License-Identifier: Apache-2.0
"""Makes a random-weight model with latent attention (DeepSeek-V2's), locally, with the dense model's tokenizer.

One latent row of 512 + 64 elements a token and layer, the only sizes that vLLM's CPU kernel has. Dense layers alone, so
that no expert kernels are needed. Greedy output depends on the whole context; but attention is kept soft, because vLLM
computes a prompt's tokens in three ways (alone, after a context, one at a time) that round differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from semkv.cli.devengine.model import make_model

LATENT, ROPE = 512, 64
LAYERS, HIDDEN, HEADS, NOPE, VALUE, INTERMEDIATE, VOCAB = 2, 128, 2, 64, 64, 256, 512


def make_mla_model(folder: Path, seed: int = 0) -> Path:
    """Writes the model into `folder` and returns it. Needs numpy, safetensors and tokenizers."""
    make_model(folder)
    path = folder / "config.json"
    dense = json.loads(path.read_text(encoding="utf-8"))
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "first_k_dense_replace": LAYERS,
        "moe_layer_freq": 1,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
        "max_position_embeddings": dense["max_position_embeddings"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
        "eos_token_id": dense["eos_token_id"],
        "pad_token_id": dense["pad_token_id"],
    }
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    _write_weights(folder / "model.safetensors", seed)
    return folder


def _write_weights(path: Path, seed: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 0.3) -> Any:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)

    def ones(size: int) -> Any:
        return np.ones(size, dtype=np.float32)

    weights: dict[str, Any] = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        weights |= {
            f"{layer}.input_layernorm.weight": ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{attention}.q_proj.weight": matrix(HEADS * (NOPE + ROPE), HIDDEN, 0.1),
            f"{attention}.kv_a_proj_with_mqa.weight": matrix(LATENT + ROPE, HIDDEN, 0.1),
            f"{attention}.kv_a_layernorm.weight": ones(LATENT),
            f"{attention}.kv_b_proj.weight": matrix(HEADS * (NOPE + VALUE), LATENT, 0.05),
            f"{attention}.o_proj.weight": matrix(HIDDEN, HEADS * VALUE),
            f"{mlp}.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{mlp}.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{mlp}.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    save_file(weights, str(path), metadata={"format": "pt"})
