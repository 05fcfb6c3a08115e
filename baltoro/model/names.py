"""Every tensor of a model: published name, shape and dtype, and the parameter it fills. No torch.

In: a K3Config. Out: `param_specs`, one per parameter of K3Model, and `tensor_specs`, one per tensor of a file. They
differ for routed experts, which a file holds one by one and the model stacked, and for A_log, which a file may pad.
Invariants: names and parameters are unique; both come layer by layer, so that a file cut by size keeps layers together.
Source: spec/k3.md section 2 (names), 2.8 (Kimi-Linear), 2.9 (MTP).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal

from baltoro.errors import ConfigError
from baltoro.model.config import K3Config, VisionConfig
from baltoro.model.vision_names import projector_shapes, tower_shapes
from baltoro.parallel.shard import Rule

Dtype = Literal["bf16", "fp16", "fp32", "fp64", "uint8"]
DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "uint8": 1}
CONFIG_DTYPES: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}

# parts of a model that reports count together; "layer" is what every layer has (spec/k3.md 2.2)
Group = Literal["globals", "layer", "kda", "mla", "dense", "moe", "experts", "mtp", "vision", "projector"]

LANGUAGE_PREFIX = "language_model."
MXFP4_BLOCK = 32
EXPERT_MATRICES = ("w1", "w3", "w2")  # gate, up, down


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of K3Model.

    param, shape      key of its state_dict; experts are stacked in front
    name, file_shape  of one published tensor; the name of an expert's has `{}` for its number
    rule, num_heads   how ranks share the parameter (parallel/shard.py)
    num_experts       None, or how many published tensors fill it
    """

    param: str
    name: str
    shape: tuple[int, ...]
    file_shape: tuple[int, ...]
    dtype: Dtype
    rule: Rule
    group: Group
    num_heads: int | None = None
    num_experts: int | None = None

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file, and where it goes: `param`, or `param[index]` for the expert `index`.

    `shape` is the file's, `param_shape` that of the place it fills; only A_log has two different ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    param: str
    index: int | None
    rule: Rule
    group: Group
    param_shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In a file."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_padded(self) -> bool:
        """Whether a file may hold the values padded or with extra dimensions of 1: A_log."""
        return self.name.endswith(".A_log")

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of `shape` can fill the place: A_log as [H], [>= H] or [1, 1, H, 1]."""
        if shape == self.shape or not self.is_padded:
            return shape == self.shape
        (num_heads,) = self.param_shape
        return (len(shape) == 1 and shape[0] >= num_heads) or shape == (1, 1, num_heads, 1)


def tensor_specs(config: K3Config, *, packed: bool | None = None) -> Iterator[TensorSpec]:
    """Tensors of a file of this model, experts one after the other. `packed` overrides what the config says."""
    for num_experts, specs in groupby(param_specs(config, packed=packed), key=lambda spec: spec.num_experts):
        if num_experts is None:
            for s in specs:
                yield TensorSpec(s.name, s.file_shape, s.dtype, s.param, None, s.rule, s.group, s.shape)
            continue
        stacked = list(specs)
        for expert in range(num_experts):
            for s in stacked:
                name, shape = s.name.replace("{}", str(expert)), s.file_shape
                yield TensorSpec(name, shape, s.dtype, s.param, expert, s.rule, s.group, shape)


def param_specs(config: K3Config, *, packed: bool | None = None) -> Iterator[ParamSpec]:
    """Parameters of K3Model(config). Errors: ConfigError for a dtype that no file of ours has."""
    if packed is not None and packed != config.are_experts_packed:
        config = config.with_(are_experts_packed=packed)
    builder = _Builder(config)
    yield builder.embedding()
    for layer in range(config.num_layers):
        yield from builder.layer(layer, group=None, has_residual_mix=config.attn_res_block_size is not None)
    yield from builder.after_layers()
    for layer in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        yield from builder.mtp_layer(layer)
    if config.vision is not None:
        yield from builder.vision(config.vision)


class _Builder:
    """Writes specs of one config. Stateless after construction."""

    def __init__(self, config: K3Config) -> None:
        if config.dtype not in CONFIG_DTYPES:
            raise ConfigError(f"dtype {config.dtype!r} is not one of {', '.join(CONFIG_DTYPES)}")
        self.config = config
        self.dtype = CONFIG_DTYPES[config.dtype]
        self.wide: Dtype = "fp64" if self.dtype == "fp64" else "fp32"  # what stays at accumulation precision
        self.prefix = LANGUAGE_PREFIX if config.has_language_prefix else ""

    def embedding(self) -> ParamSpec:
        c = self.config
        return self._text("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), "globals", "rows")

    def after_layers(self) -> Iterator[ParamSpec]:
        c = self.config
        yield self._text("model.norm.weight", (c.hidden_size,), "globals")
        if c.attn_res_block_size is not None:
            yield self._text("model.output_attn_res_norm.weight", (c.hidden_size,), "globals")
            yield self._text("model.output_attn_res_proj.weight", (1, c.hidden_size), "globals")
        if not c.tie_word_embeddings:
            yield self._text("lm_head.weight", (c.vocab_size, c.hidden_size), "globals", "rows")

    def mtp_layer(self, layer: int) -> Iterator[ParamSpec]:
        """An MTP layer: its own embedding and head around one layer without residual mixes."""
        c, at = self.config, f"model.layers.{layer}."
        width = c.hidden_size
        if not c.is_mtp_shared:
            yield self._text(f"{at}embed_tokens.weight", (c.vocab_size, width), "mtp", "rows")
        for norm in ("enorm", "hnorm"):
            yield self._text(f"{at}{norm}.weight", (width,), "mtp")
        yield self._text(f"{at}eh_proj.weight", (width, 2 * width), "mtp")
        yield from self.layer(layer, group="mtp", has_residual_mix=False)
        yield self._text(f"{at}shared_head.norm.weight", (width,), "mtp")
        if not c.is_mtp_shared:
            yield self._text(f"{at}shared_head.head.weight", (c.vocab_size, width), "mtp", "rows")

    def layer(self, layer: int, *, group: Group | None, has_residual_mix: bool) -> Iterator[ParamSpec]:
        """One layer. `group` replaces the groups of its parts; past the last layer (MTP) it is MLA and MoE."""
        c, at = self.config, f"model.layers.{layer}."
        is_mtp = layer >= c.num_layers
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self._text(f"{at}{norm}.weight", (c.hidden_size,), group or "layer")
        if has_residual_mix:
            for place in ("self_attention_res", "mlp_res"):
                yield self._text(f"{at}{place}_norm.weight", (c.hidden_size,), group or "layer")
                yield self._text(f"{at}{place}_proj.weight", (1, c.hidden_size), group or "layer")
        attention = f"{at}self_attn."
        if is_mtp or c.kind(layer) == "mla":
            yield from self._mla(attention, group)
        else:
            yield from self._kda(attention, group)
        if c.num_experts > 0 if is_mtp else c.has_experts(layer):
            yield from self._moe(f"{at}block_sparse_moe.", group)
        else:
            yield from self._mlp(f"{at}mlp.", c.intermediate_size, group or "dense")

    def _kda(self, at: str, group: Group | None) -> Iterator[ParamSpec]:
        c = self.config
        heads, width, hidden = c.kda_num_heads, c.kda_width, c.hidden_size
        kda, every = group or "kda", group or "layer"
        for stream in "qkv":
            yield self._text(f"{at}{stream}_proj.weight", (width, hidden), kda, "heads", heads)
        for stream in "qkv":
            name = f"{at}{stream}_conv1d.weight"
            yield self._text(name, (width, 1, c.conv_size), kda, "heads", heads, dtype=self.wide)
        yield self._text(f"{at}f_a_proj.weight", (c.kda_head_dim, hidden), kda)
        yield self._text(f"{at}f_b_proj.weight", (width, c.kda_head_dim), kda, "heads", heads)
        yield self._text(f"{at}b_proj.weight", (heads, hidden), kda, "heads", heads)
        # K3 pads A_log to head_dim with zeros; Kimi-Linear keeps dimensions to broadcast over
        padded = (max(heads, c.kda_head_dim),) if c.has_language_prefix else (1, 1, heads, 1)
        yield self._text(f"{at}A_log", (heads,), kda, "heads", heads, dtype=self.wide, file_shape=padded)
        yield self._text(f"{at}dt_bias", (width,), kda, "heads", heads, dtype=self.wide)
        yield self._text(f"{at}o_norm.weight", (c.kda_head_dim,), kda, dtype=self.wide)
        if c.is_kda_gate_full_rank:
            yield self._text(f"{at}g_proj.weight", (width, hidden), every, "heads", heads)
        else:
            yield self._text(f"{at}g_a_proj.weight", (c.kda_head_dim, hidden), kda)
            yield self._text(f"{at}g_b_proj.weight", (width, c.kda_head_dim), kda, "heads", heads)
        yield self._text(f"{at}o_proj.weight", (hidden, width), every, "head_cols", heads)

    def _mla(self, at: str, group: Group | None) -> Iterator[ParamSpec]:
        c = self.config
        heads, hidden, values = c.num_heads, c.hidden_size, c.num_heads * c.v_head_dim
        mla, every = group or "mla", group or "layer"
        queries = heads * c.qk_head_dim
        if c.q_lora_rank is None:
            yield self._text(f"{at}q_proj.weight", (queries, hidden), mla, "heads", heads)
        else:
            yield self._text(f"{at}q_a_proj.weight", (c.q_lora_rank, hidden), mla)
            yield self._text(f"{at}q_a_layernorm.weight", (c.q_lora_rank,), mla)
            yield self._text(f"{at}q_b_proj.weight", (queries, c.q_lora_rank), mla, "heads", heads)
        yield self._text(f"{at}kv_a_proj_with_mqa.weight", (c.kv_row_width, hidden), mla)
        yield self._text(f"{at}kv_a_layernorm.weight", (c.kv_lora_rank,), mla)
        expanded = heads * (c.qk_nope_head_dim + c.v_head_dim)
        yield self._text(f"{at}kv_b_proj.weight", (expanded, c.kv_lora_rank), mla, "heads", heads)
        if c.has_mla_gate:
            yield self._text(f"{at}g_proj.weight", (values, hidden), every, "heads", heads)
        yield self._text(f"{at}o_proj.weight", (hidden, values), every, "head_cols", heads)

    def _mlp(self, at: str, intermediate: int, group: Group) -> Iterator[ParamSpec]:
        hidden = self.config.hidden_size
        for name in ("gate_proj", "up_proj"):
            yield self._text(f"{at}{name}.weight", (intermediate, hidden), group, "rows")
        yield self._text(f"{at}down_proj.weight", (hidden, intermediate), group, "cols")

    def _moe(self, at: str, group: Group | None) -> Iterator[ParamSpec]:
        c, moe = self.config, group or "moe"
        yield self._text(f"{at}gate.weight", (c.num_experts, c.hidden_size), moe)
        yield self._text(f"{at}gate.e_score_correction_bias", (c.num_experts,), moe, dtype=self.wide)
        if c.latent_size is not None:
            yield self._text(f"{at}routed_expert_down_proj.weight", (c.latent_size, c.hidden_size), moe)
            if c.has_latent_norm:
                yield self._text(f"{at}routed_expert_norm.weight", (c.latent_size,), moe)
            yield self._text(f"{at}routed_expert_up_proj.weight", (c.hidden_size, c.latent_size), moe)
        if c.num_shared_experts:
            shared = c.num_shared_experts * c.expert_intermediate_size
            yield from self._mlp(f"{at}shared_experts.", shared, moe)
        for matrix in EXPERT_MATRICES:
            sizes = (c.expert_intermediate_size, c.expert_width)
            rows, cols = sizes[::-1] if matrix == "w2" else sizes
            if c.are_experts_packed:
                yield self._experts(at, matrix, "packed", (rows, cols // 2), group)
                yield self._experts(at, matrix, "scale", (rows, cols // MXFP4_BLOCK), group)
            else:
                yield self._experts(at, matrix, "", (rows, cols), group)

    def _experts(self, at: str, matrix: str, part: str, shape: tuple[int, int], group: Group | None) -> ParamSpec:
        """One matrix of all experts of a layer: dense (`part` empty), or the packed values or scales of MXFP4."""
        suffix = f"_{part}" if part else ""
        return ParamSpec(
            param=f"{at}experts.{matrix}{suffix}",
            name=f"{self.prefix}{at}experts.{{}}.{matrix}.weight{suffix}",
            shape=(self.config.num_experts, *shape),
            file_shape=shape,
            dtype="uint8" if part else self.dtype,
            rule="expert",
            group=group or "experts",
            num_experts=self.config.num_experts,
        )

    def vision(self, v: VisionConfig) -> Iterator[ParamSpec]:
        """Tower and projector. Their names have no prefix; every rank holds all of them."""
        for name, shape in tower_shapes(v):
            yield self._plain("vision_tower." + name, shape, "vision")
        for name, shape in projector_shapes(v, self.config.hidden_size):
            yield self._plain("mm_projector." + name, shape, "projector")

    def _plain(self, name: str, shape: tuple[int, ...], group: Group) -> ParamSpec:
        return ParamSpec(name, name, shape, shape, self.dtype, "replicated", group)

    def _text(
        self,
        param: str,
        shape: tuple[int, ...],
        group: Group,
        rule: Rule = "replicated",
        num_heads: int | None = None,
        *,
        dtype: Dtype | None = None,
        file_shape: tuple[int, ...] | None = None,
    ) -> ParamSpec:
        name = self.prefix + param
        return ParamSpec(param, name, shape, file_shape or shape, dtype or self.dtype, rule, group, num_heads)
