"""Arithmetic of a model: parameters, bytes of weights, of cache per token and per request, FLOPs. No torch.

In: a K3Config and the number of tensor-parallel ranks. Out: `Sizes` of one rank; `fit` into its memory.
Read by the planner, by docs, by tests, and printed by `baltoro sizes`.
Invariants: everything follows from the config through names.py and parallel/shard.py; nothing is measured.
Not here: room for activations, graphs and libraries, which is measured when an engine starts.
Source: spec/k3.md 2 (parameters), 3.4 and 3.5 (caches); docs/design.md section 4 (worked numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from baltoro.model.config import K3Config
from baltoro.model.names import CONFIG_DTYPES, DTYPE_BYTES, ParamSpec, param_specs
from baltoro.parallel.shard import owned_heads, owned_shape

VISION_GROUPS = ("vision", "projector")
EMBEDDING = "model.embed_tokens.weight"
CONTEXTS = (4_096, 32_768, 131_072, 1_048_576)  # context lengths that `fit` answers for


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One model on `tp` ranks. Bytes per rank are those of rank 0, which holds the most.

    Parameters are counted as the file holds them: A_log with its padding, an MXFP4 value as one, its scale as none.
    Active ones are those that a token passes through; the embedding table is only looked up.
    FLOPs count a multiplication and an addition as two; a training step has three times those of the forward.
    """

    tp: int
    text_parameters: int
    active_parameters: int  # with the embedding table
    active_parameters_without_embedding: int
    mtp_parameters: int
    vision_parameters: int  # tower and projector
    num_tensors: int  # in the files
    file_bytes: int
    weight_bytes_per_rank: int
    kv_bytes_per_token: int  # the latent is on every rank, whatever tp is
    recurrent_bytes_per_request: int
    conv_bytes_per_request: int
    flops_per_token: int  # all but attention over the context
    flops_per_context_token: int  # MLA: more for each token that a token sees, heads expanded

    @property
    def state_bytes_per_request(self) -> int:
        """What one slot takes on one rank."""
        return self.recurrent_bytes_per_request + self.conv_bytes_per_request

    def request_bytes(self, num_tokens: int) -> int:
        """Cache of one request of `num_tokens` tokens on one rank."""
        return self.state_bytes_per_request + num_tokens * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the memory of one rank has room for beside the weights; without activations.

    `free_bytes` is negative, and nothing fits, if the weights alone are too large.
    """

    memory_bytes: int
    free_bytes: int
    max_tokens: int | None  # of one request that has the memory for itself; None: as many as it likes (no MLA layer)
    max_requests: tuple[tuple[int, int], ...]  # (context length, requests of that length at once)


def measure(config: K3Config, *, tp: int = 1) -> Sizes:
    """Sizes of `config` on `tp` ranks. Errors: ConfigError if heads do not divide over them."""
    specs = list(param_specs(config))
    text = [spec for spec in specs if spec.group not in (*VISION_GROUPS, "mtp")]
    embedding = sum(num_parameters(spec) for spec in text if spec.param == EMBEDDING)
    active = sum(_num_active(spec, config) for spec in text)
    # a tied table is looked up and multiplied with: it is the head too
    without = active if config.tie_word_embeddings else active - embedding
    kda_heads = len(owned_heads(config.kda_num_heads, size=tp, rank=0))
    dtype = CONFIG_DTYPES[config.dtype]
    activation = DTYPE_BYTES[dtype]
    state = DTYPE_BYTES["fp64" if dtype == "fp64" else "fp32"]
    num_kda, num_mla, head_dim = len(config.kda_layers), len(config.mla_layers), config.kda_head_dim
    history = (config.conv_size - 1) * 3 * kda_heads * head_dim
    return Sizes(
        tp=tp,
        text_parameters=sum(map(num_parameters, text)),
        active_parameters=active,
        active_parameters_without_embedding=without,
        mtp_parameters=sum(num_parameters(spec) for spec in specs if spec.group == "mtp"),
        vision_parameters=sum(num_parameters(spec) for spec in specs if spec.group in VISION_GROUPS),
        num_tensors=sum(spec.num_experts or 1 for spec in specs),
        file_bytes=sum(_file_elements(spec) * DTYPE_BYTES[spec.dtype] for spec in specs),
        weight_bytes_per_rank=sum(_rank_bytes(spec, tp) for spec in specs),
        kv_bytes_per_token=num_mla * config.kv_row_width * activation,
        recurrent_bytes_per_request=num_kda * kda_heads * head_dim * head_dim * state,
        conv_bytes_per_request=num_kda * history * activation,
        flops_per_token=2 * without + num_kda * _kda_flops(config),
        flops_per_context_token=num_mla * 2 * config.num_heads * (config.qk_head_dim + config.v_head_dim),
    )


def fit(sizes: Sizes, memory_bytes: int, *, contexts: tuple[int, ...] = CONTEXTS) -> Fit:
    """How many requests and tokens find room in `memory_bytes` of each rank."""
    free = memory_bytes - sizes.weight_bytes_per_rank
    for_tokens, per_token = free - sizes.state_bytes_per_request, sizes.kv_bytes_per_token
    most = max(0, for_tokens // per_token) if per_token else None
    return Fit(
        memory_bytes=memory_bytes,
        free_bytes=free,
        max_tokens=most if for_tokens >= 0 else 0,
        max_requests=tuple((length, max(0, free // sizes.request_bytes(length))) for length in contexts),
    )


def num_parameters(spec: ParamSpec) -> int:
    """Values that the parameter stands for."""
    if spec.dtype != "uint8":
        return _file_elements(spec)
    return 2 * _file_elements(spec) if spec.param.endswith("_packed") else 0


def _file_elements(spec: ParamSpec) -> int:
    return prod(spec.file_shape) * (spec.num_experts or 1)


def _num_active(spec: ParamSpec, config: K3Config) -> int:
    """Values that one token passes through."""
    count = num_parameters(spec)
    return count if spec.num_experts is None else count // spec.num_experts * config.num_active_experts


def _rank_bytes(spec: ParamSpec, tp: int) -> int:
    shape = owned_shape(spec.shape, spec.rule, num_heads=spec.num_heads, size=tp)
    return prod(shape) * DTYPE_BYTES[spec.dtype]


def _kda_flops(config: K3Config) -> int:
    """Of the recurrence and the convolutions of one layer; its matrices are among the parameters.

    Per head and state element: decay 1, read 2, write 2, query 2.
    """
    return 7 * config.kda_num_heads * config.kda_head_dim**2 + 3 * 2 * config.conv_size * config.kda_width
