"""Model shapes by name, as far as memory depends on them: no weights, no files.

In: a name, the number of ranks. Out: a K3Config that has the published attention layers; what memory does not depend on
(experts, MLP, vision) is left out.
Source: spec/k3.md 1 and 2; a test compares the bytes with `model/sizes.py` on the published config.json.
"""

from __future__ import annotations

from dataclasses import replace

from baltoro.errors import ConfigError
from baltoro.model.config import K3Config

K3_MLA_LAYERS = (*range(3, 93, 4), 92)


def named_shape(name: str) -> K3Config | None:
    """`k3` or `mini`; None for another name, which is then a path."""
    if name == "k3":
        return K3Config(
            vocab_size=163840, hidden_size=7168, num_layers=93, mla_layers=K3_MLA_LAYERS, kda_num_heads=96,
            kda_head_dim=128, num_heads=96, kv_lora_rank=512, qk_rope_head_dim=64,
            max_position_embeddings=1048576, dtype="bfloat16",
        )  # fmt: skip
    if name == "mini":
        return K3Config(
            vocab_size=1280, hidden_size=112, num_layers=9, mla_layers=(3, 7, 8), kda_num_heads=3, kda_head_dim=32,
            num_heads=4, kv_lora_rank=32, qk_rope_head_dim=16, max_position_embeddings=4096, dtype="float32",
        )  # fmt: skip
    return None


def rank_shape(config: K3Config, tp: int) -> K3Config:
    """What the rank with the most heads holds: its share of the states, and the whole latent. Errors: ConfigError."""
    if tp > config.kda_num_heads:
        raise ConfigError(f"{tp} ranks cannot share {config.kda_num_heads} heads")
    return replace(config, kda_num_heads=-(-config.kda_num_heads // tp))
