"""Small models for tests: every feature on, every free dimension different from every other.

Weights come from `baltoro.model.build.new_model(..., decay="slow", std=0.1..0.3)`: a lost state then changes the output
by more than 1e-3 for hundreds of tokens.
"""

from __future__ import annotations

from typing import Any

from baltoro.model.config import K3Config, VisionConfig


def tiny_k3(**changes: Any) -> K3Config:
    """K3 with 7 layers, 3 bank rows and a partial block, latent MoE, a vision tower; dense experts unless packed."""
    fields: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 40,
        "num_layers": 7,
        "mla_layers": (3, 5, 6),
        "kda_num_heads": 3,
        "kda_head_dim": 8,
        "conv_size": 4,
        "gate_lower_bound": -5.0,
        "is_kda_gate_full_rank": True,
        "num_heads": 5,
        "kv_lora_rank": 14,
        "q_lora_rank": 22,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "has_mla_gate": True,
        "intermediate_size": 52,
        "hidden_act": "situ",
        "situ_beta": 4.0,
        "situ_linear_beta": 25.0,
        "num_experts": 11,
        "num_active_experts": 3,
        "num_shared_experts": 2,
        "expert_intermediate_size": 64,
        "latent_size": 32,
        "has_latent_norm": True,
        "first_dense_layers": 1,
        "attn_res_block_size": 3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "bos_token_id": 120,
        "eos_token_id": 122,
        "pad_token_id": 130,
        "media_token_id": 126,
        "dtype": "float32",
        "vision": tiny_vision(),
        "has_language_prefix": True,
    }
    return K3Config(**(fields | changes))


def tiny_vision(**changes: Any) -> VisionConfig:
    """A tower of 2 layers on 6-pixel patches."""
    fields: dict[str, Any] = {
        "patch_size": 6,
        "hidden_size": 20,
        "qkv_hidden_size": 24,
        "intermediate_size": 28,
        "num_heads": 3,
        "num_layers": 2,
        "pos_emb_height": 7,
        "pos_emb_width": 9,
    }
    return VisionConfig(**(fields | changes))


def tiny_kimi_linear(**changes: Any) -> K3Config:
    """Kimi-Linear: plain residual, softplus gate, low-rank output gate, no latent, SiLU."""
    fields: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 40,
        "num_layers": 5,
        "mla_layers": (2, 4),
        "kda_num_heads": 3,
        "kda_head_dim": 8,
        "conv_size": 4,
        "num_heads": 5,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "intermediate_size": 52,
        "num_experts": 11,
        "num_active_experts": 3,
        "num_shared_experts": 1,
        "expert_intermediate_size": 64,
        "routed_scaling_factor": 2.446,
        "first_dense_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "bos_token_id": 120,
        "eos_token_id": 122,
        "pad_token_id": 130,
        "dtype": "float32",
    }
    return K3Config(**(fields | changes))
