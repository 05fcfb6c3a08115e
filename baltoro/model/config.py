"""K3Config: the shape of one model, read from a published `config.json` and written back to one. No torch.

In: config.json of K3 (`model_type` kimi_k3, text and vision objects) or of Kimi-Linear (`kimi_linear`, flat).
Invariants: layers are 0-based here and 1-based in the file; every field that the file leaves out has the default of
the published class. A config that cannot be built says which field and why.
Source: spec/k3.md section 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from baltoro.errors import ConfigError

LayerKind = Literal["kda", "mla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """MoonViT3d tower and projector. `norm_eps` is an option: the published modules leave it to torch."""

    patch_size: int = 14
    merge: int = 2
    hidden_size: int = 1024
    qkv_hidden_size: int = 1536
    intermediate_size: int = 4096
    num_heads: int = 12
    num_layers: int = 27
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    pos_emb_time: int = 4
    projector_ln_eps: float = 1e-5
    norm_eps: float = 2.0**-23

    @property
    def head_dim(self) -> int:
        return self.qkv_hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class K3Config:
    """The text model, and the vision tower if there is one. Names are the glossary's; `from_json` maps the file's.

    A feature that is off is None or False: no `attn_res_block_size` is the plain residual, no `gate_lower_bound` the
    softplus gate, no `latent_size` ordinary experts on the full width, no `q_lora_rank` a single q projection.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]  # 0-based
    # KDA
    kda_num_heads: int
    kda_head_dim: int
    conv_size: int = 4
    gate_lower_bound: float | None = None
    is_kda_gate_full_rank: bool = False
    # MLA
    num_heads: int = 32
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    has_mla_gate: bool = False
    mla_norm_eps: float = 1e-6  # spec/k3.md 3.5: 1e-6 in the published modeling, 1e-5 in the engines
    # MLP and experts
    intermediate_size: int = 11008
    hidden_act: Literal["silu", "situ"] = "silu"
    situ_beta: float = 1.0
    situ_linear_beta: float | None = None
    num_experts: int = 0
    num_active_experts: int = 0
    num_shared_experts: int = 0
    expert_intermediate_size: int = 0
    latent_size: int | None = None
    has_latent_norm: bool = False
    is_router_renormalised: bool = True
    router_activation: Literal["sigmoid", "softmax"] = "sigmoid"
    routed_scaling_factor: float = 1.0
    num_expert_groups: int = 1
    num_top_groups: int = 1
    first_dense_layers: int = 0
    moe_layer_freq: int = 1
    are_experts_packed: bool = False  # MXFP4 in the file; loaders decide by the presence of weight_packed
    # depth
    attn_res_block_size: int | None = None
    rms_norm_eps: float = 1e-6
    num_mtp_layers: int = 0
    is_mtp_shared: bool = False  # MTP layers use the model's embedding and head; the file holds them once
    # rest
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    bos_token_id: int = 1
    eos_token_id: int = 2
    pad_token_id: int = 0
    media_token_id: int | None = None
    dtype: str = "bfloat16"
    vision: VisionConfig | None = None
    has_language_prefix: bool = False  # kimi_k3 files put `language_model.` before text tensors

    def __post_init__(self) -> None:
        _check_shape(self)

    # ---- layer pattern -------------------------------------------------------------------------------------------
    def kind(self, layer: int) -> LayerKind:
        """What attention layer `layer` (0-based) has."""
        return "mla" if layer in self.mla_layers else "kda"

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_layers) if i not in self.mla_layers)

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) is a mixture of experts; otherwise it has a dense MLP."""
        return self.num_experts > 0 and layer >= self.first_dense_layers and layer % self.moe_layer_freq == 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The decoder's mixtures of experts."""
        return tuple(i for i in range(self.num_layers) if self.has_experts(i))

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert."""
        return self.latent_size or self.hidden_size

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_row_width(self) -> int:
        """Values that one MLA layer caches per token: normed latent and shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kda_width(self) -> int:
        """Channels of each of q, k and v in a KDA layer."""
        return self.kda_num_heads * self.kda_head_dim

    # ---- files ---------------------------------------------------------------------------------------------------
    @staticmethod
    def load(path: str | Path) -> K3Config:
        """From a config.json or the folder that holds one. Errors: ConfigError with what is missing."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise ConfigError(f"{file} does not exist; give a model folder or its config.json")
        try:
            return K3Config.from_json(json.loads(file.read_text()))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from error

    @staticmethod
    def from_json(data: dict[str, Any]) -> K3Config:
        """From the published object: kimi_k3 (nested) or kimi_linear (flat)."""
        from baltoro.model.config_json import read_config

        return read_config(data)

    def to_json(self) -> dict[str, Any]:
        """The published object that reads back as this config."""
        from baltoro.model.config_json import write_config

        return write_config(self)

    def with_(self, **changes: Any) -> K3Config:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def _check_shape(config: K3Config) -> None:
    """Say what cannot be built, and which field to change."""

    def need(is_good: bool, message: str) -> None:
        if not is_good:
            raise ConfigError(message)

    need(
        config.num_layers >= 1 and config.hidden_size >= 1,
        "num_hidden_layers and hidden_size must be positive",
    )
    need(
        all(0 <= i < config.num_layers for i in config.mla_layers),
        f"full_attn_layers names a layer outside 1..{config.num_layers}",
    )
    need(
        config.gate_lower_bound is None or -5.0 <= config.gate_lower_bound < 0.0,
        f"gate_lower_bound {config.gate_lower_bound} is outside [-5, 0): chunk kernels could overflow",
    )
    need(config.conv_size >= 1, "short_conv_kernel_size must be at least 1")
    if config.num_experts:
        need(
            1 <= config.num_active_experts <= config.num_experts,
            f"num_experts_per_token {config.num_active_experts} must lie in 1..num_experts {config.num_experts}",
        )
        need(config.expert_intermediate_size > 0, "moe_intermediate_size is missing")
        need(
            config.num_experts % config.num_expert_groups == 0,
            "num_experts must divide into num_expert_group groups",
        )
    if config.are_experts_packed:
        need(
            config.expert_width % 32 == 0 and config.expert_intermediate_size % 32 == 0,
            "MXFP4 experts need routed width and moe_intermediate_size in multiples of 32",
        )
    if config.attn_res_block_size is not None:
        need(config.attn_res_block_size >= 1, "attn_res_block_size must be at least 1")
    if config.vision is not None:
        need(
            config.vision.qkv_hidden_size % config.vision.num_heads == 0,
            "qkv_hidden_size must divide by heads",
        )
