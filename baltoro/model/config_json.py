"""Published config.json <-> K3Config. No torch.

Both directions are tables of (published name, our name), so that a field cannot be read and not written.
What we add to the published object (only when it differs from the default): `mla_norm_eps` and `mtp_shares_embeddings`
in the text object, `norm_eps` in the vision object.
"""

from __future__ import annotations

from typing import Any

from baltoro.errors import ConfigError
from baltoro.model.config import K3Config, VisionConfig

# published name -> our name, for plain copies; a file's null means "leave the default"
TEXT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "hidden_act": "hidden_act",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
    "attn_res_block_size": "attn_res_block_size",
    "rms_norm_eps": "rms_norm_eps",
    "initializer_range": "initializer_range",
    "max_position_embeddings": "max_position_embeddings",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "mla_use_output_gate": "has_mla_gate",
    "mla_norm_eps": "mla_norm_eps",
    "num_experts": "num_experts",
    "num_experts_per_token": "num_active_experts",
    "num_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "expert_intermediate_size",
    "routed_expert_hidden_size": "latent_size",
    "latent_moe_use_norm": "has_latent_norm",
    "moe_renormalize": "is_router_renormalised",
    "moe_router_activation_func": "router_activation",
    "routed_scaling_factor": "routed_scaling_factor",
    "num_expert_group": "num_expert_groups",
    "topk_group": "num_top_groups",
    "first_k_dense_replace": "first_dense_layers",
    "moe_layer_freq": "moe_layer_freq",
    "num_nextn_predict_layers": "num_mtp_layers",
    "mtp_shares_embeddings": "is_mtp_shared",
    "tie_word_embeddings": "tie_word_embeddings",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
LINEAR_FIELDS = {
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "conv_size",
    "gate_lower_bound": "gate_lower_bound",
    "use_full_rank_gate": "is_kda_gate_full_rank",
}
VISION_FIELDS = {
    "patch_size": "patch_size",
    "vt_hidden_size": "hidden_size",
    "qkv_hidden_size": "qkv_hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_heads",
    "vt_num_hidden_layers": "num_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "projector_ln_eps": "projector_ln_eps",
    "norm_eps": "norm_eps",
}
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "kv_lora_rank")


def read_config(data: dict[str, Any]) -> K3Config:
    """The published object as a K3Config. Errors: ConfigError naming the field."""
    model_type = data.get("model_type")
    if model_type not in ("kimi_k3", "kimi_linear"):
        raise ConfigError(f"model_type {model_type!r} is not one of kimi_k3, kimi_linear")
    is_k3 = model_type == "kimi_k3"
    text = data.get("text_config") if is_k3 else data
    if not isinstance(text, dict):
        raise ConfigError("a kimi_k3 config needs a text_config object")
    for name in REQUIRED:
        if text.get(name) is None:
            raise ConfigError(f"config.json lacks {name}")
    fields = _copy(text, TEXT_FIELDS)
    if not text.get("mla_use_nope", False):
        raise ConfigError("mla_use_nope must be true: rotary MLA is not part of this family")
    if text.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ConfigError(f"topk_method {text['topk_method']!r} is not supported, only noaux_tc")
    fields |= _read_linear(text)
    fields["are_experts_packed"] = _is_packed(text.get("quantization_config") or data.get("quantization_config"))
    fields["dtype"] = text.get("dtype") or text.get("torch_dtype") or data.get("dtype") or "bfloat16"
    if is_k3:
        fields["has_language_prefix"] = True
        fields["media_token_id"] = data.get("media_placeholder_token_id")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if data.get(name) is not None:
                fields[name] = data[name]
        if data.get("vision_config"):
            fields["vision"] = _read_vision(data["vision_config"])
    return K3Config(**fields)


def write_config(config: K3Config) -> dict[str, Any]:
    """The published object of a config; `read_config` gives the config back."""
    text: dict[str, Any] = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    for published, ours in TEXT_FIELDS.items():
        text[published] = getattr(config, ours)
    for absent_when_zero in ("num_experts", "num_experts_per_token", "moe_intermediate_size"):
        text[absent_when_zero] = text[absent_when_zero] or None
    for ours in ("mla_norm_eps", "is_mtp_shared"):
        if getattr(config, ours) == K3Config.__dataclass_fields__[ours].default:
            del text[next(published for published, name in TEXT_FIELDS.items() if name == ours)]
    if config.hidden_act != "situ":
        del text["activation_situ_beta"], text["activation_situ_linear_beta"]
    linear = {published: getattr(config, ours) for published, ours in LINEAR_FIELDS.items()}
    linear["full_attn_layers"] = [i + 1 for i in config.mla_layers]
    linear["kda_layers"] = [i + 1 for i in config.kda_layers]
    text |= {
        "num_key_value_heads": config.num_heads,
        "mla_use_nope": True,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "linear_attn_config": linear,
        "dtype": config.dtype,
    }
    if config.are_experts_packed:
        text["quantization_config"] = mxfp4_quantization_config()
    if not config.has_language_prefix:
        return text
    data: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "ignore_index": -100,
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": text,
    }
    if config.media_token_id is not None:
        data["media_placeholder_token_id"] = config.media_token_id
        data["image_placeholder"] = "<|kimi_image_placeholder|>"
    if config.vision is not None:
        data["vision_config"] = _write_vision(config.vision, config.hidden_size)
    return data


def mxfp4_quantization_config() -> dict[str, Any]:
    """What a file with packed experts declares (spec/k3.md 1.3)."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    layout = "mxfp4-pack-quantized"
    ignore = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower"]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"format": layout, "targets": ["Linear"], "weights": weights}},
        "ignore": [f"re:.*{name}.*" for name in [*ignore, "mm_projector"]],
    }


def _copy(source: dict[str, Any], table: dict[str, str]) -> dict[str, Any]:
    return {ours: source[published] for published, ours in table.items() if source.get(published) is not None}


def _read_linear(text: dict[str, Any]) -> dict[str, Any]:
    linear = text.get("linear_attn_config")
    if not isinstance(linear, dict):
        raise ConfigError("config.json lacks linear_attn_config")
    fields = _copy(linear, LINEAR_FIELDS)
    for published, ours in (("num_heads", "kda_num_heads"), ("head_dim", "kda_head_dim")):
        if ours not in fields:
            raise ConfigError(f"linear_attn_config lacks {published}")
    num_layers = text["num_hidden_layers"]
    mla = {int(i) for i in linear.get("full_attn_layers") or ()}
    kda = {int(i) for i in linear.get("kda_layers") or ()}
    if mla & kda or mla | kda != set(range(1, num_layers + 1)):
        raise ConfigError(
            f"full_attn_layers and kda_layers must name each of the layers 1..{num_layers} exactly once (1-based)"
        )
    fields["mla_layers"] = tuple(sorted(i - 1 for i in mla))
    return fields


def _is_packed(quantization: dict[str, Any] | None) -> bool:
    if not quantization:
        return False
    if quantization.get("format") != "mxfp4-pack-quantized":
        raise ConfigError(f"quantization format {quantization.get('format')!r} is not mxfp4-pack-quantized")
    return True


def _read_vision(data: dict[str, Any]) -> VisionConfig:
    merge = data.get("merge_kernel_size", [2, 2])
    sides = [merge, merge] if isinstance(merge, int) else list(merge)
    if sides[0] != sides[1]:
        raise ConfigError(f"merge_kernel_size {merge} is not square")
    return VisionConfig(**_copy(data, VISION_FIELDS), merge=sides[0])


def _write_vision(vision: VisionConfig, text_hidden_size: int) -> dict[str, Any]:
    data: dict[str, Any] = {published: getattr(vision, ours) for published, ours in VISION_FIELDS.items()}
    if vision.norm_eps == VisionConfig.__dataclass_fields__["norm_eps"].default:
        del data["norm_eps"]
    return data | {
        "merge_kernel_size": [vision.merge, vision.merge],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": vision.hidden_size,
        "text_hidden_size": text_hidden_size,
        "mm_projector_type": "patchmergerv2",
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "activation_func": "gelu_pytorch_tanh",
        "norm_type": "rmsnorm",
    }
