"""Stable LatentMoE: router, latent down, routed experts, latent norm, latent up, shared experts.

In: x [T, D], the normed layer input. Out: [T, D]. Router and shared experts see x; routed experts see the latent.
Without a latent size the experts work on x itself (ordinary MoE).
Experts are stacked: dense parameters [E, out, in], or the checkpoint's packed MXFP4 bytes, dequantised on use; `tile`
puts these into the order that a device's kernels read, under names of its own.
Source: spec/k3.md 3.7, 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from baltoro.kernels.lora.experts import ExpertDelta, ExpertFactors
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.moe.permute import empty, fits_bf16, permute_experts, published
from baltoro.kernels.moe.products import AnyExperts, ExpertWeights, Packed, TiledExperts
from baltoro.kernels.moe.reference import weigh
from baltoro.kernels.precision import acc_dtype, wide_linear
from baltoro.model import aside
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.model.linear import Factors, Linear, RMSNorm, product
from baltoro.model.merged import add_loras, merge_rows
from baltoro.model.mlp import MLP, activation_of


class Router(nn.Module):
    """Scores in the accumulate dtype: a bf16 product flips borderline picks.

    `observer`, when set, is told logits' scores [T, E] (sigmoid or softmax) and picked ids [T, A] of a training
    forward (balancing). `index`: its place among the decoder's layers with experts, for routes that are kept or
    replayed; None, in an MTP layer: neither.
    """

    def __init__(
        self, config: K3Config, index: int | None = None, *, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.observer: Callable[[Tensor, Tensor], None] | None = None
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device))
        bias = torch.empty(config.num_experts, dtype=acc_dtype(dtype), device=device)
        # not trained by gradient: balancing sets it
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [T, E] in the accumulate dtype."""
        return wide_linear(x, self.weight)

    def choose(self, logits: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """ids int64 [T, A] and weights [T, A] in the accumulate dtype. Writes routes: to the cache if it keeps them."""
        ids, weights = ctx.kernels.route(
            logits,
            self.e_score_correction_bias,
            top_k=self.config.num_active_experts,
            activation=self.config.router_activation,
            is_renormalised=self.config.is_router_renormalised,
            scaling=self.config.routed_scaling_factor,
            num_groups=self.config.num_expert_groups,
            num_top_groups=self.config.num_top_groups,
        )
        if self.index is not None and ctx.routes is not None:
            ids = ctx.routes.replace(self.index, ids)
            weights = weigh(
                logits,
                ids,
                activation=self.config.router_activation,
                is_renormalised=self.config.is_router_renormalised,
                scaling=self.config.routed_scaling_factor,
            )
        if self.index is not None and ctx.cache is not None and ctx.cache.views.routes:
            ctx.cache.views.routes[self.index].index_copy_(0, ctx.cache.kv_rows, ids.to(torch.int16))
        if self.observer is not None and ctx.is_training:
            is_sigmoid = self.config.router_activation == "sigmoid"
            scores = torch.sigmoid(logits) if is_sigmoid else torch.softmax(logits, dim=-1)
            self.observer(scores.detach(), ids)
        return ids, weights


MATRICES = ("w1", "w2", "w3")
TILES = ("first_packed", "first_scale", "second_packed", "second_scale")  # as in `TiledExperts`


class Experts(nn.Module):
    """The stacked weights of all routed experts of a layer: w1 gate, w3 up [E, F, M], w2 down [E, M, F].

    Packed ones lie in the published order (`w1_packed`, `w1_scale`, ...) or in tiles (TILES): the names of the buffers
    say which, so that bytes of one order are never loaded as the other.
    """

    def __init__(self, config: K3Config, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.is_packed, self.is_tiled = config.are_experts_packed, False
        self.width, self.inner = config.expert_width, config.expert_intermediate_size
        self.lora: dict[str, Factors] = {}  # by matrix; no part of the base's state_dict
        width, hidden, count = config.expert_width, config.expert_intermediate_size, config.num_experts
        for name, rows, columns in (("w1", hidden, width), ("w2", width, hidden), ("w3", hidden, width)):
            if self.is_packed:
                packed = torch.empty(count, rows, columns // 2, dtype=torch.uint8, device=device)
                scale = torch.empty(count, rows, columns // 32, dtype=torch.uint8, device=device)
                self.register_buffer(f"{name}_packed", packed)
                self.register_buffer(f"{name}_scale", scale)
            else:
                weight = nn.Parameter(torch.empty(count, rows, columns, dtype=dtype, device=device))
                self.register_parameter(name, weight)

    @torch.no_grad()
    def unpack(self, dtype: torch.dtype) -> None:
        """Keep the values that packed weights stand for, in `dtype`, instead of the packed ones."""
        weights = self.weights()
        for name in MATRICES if self.is_packed else ():
            dense = getattr(weights, name).dense(slice(None), dtype)
            self.register_parameter(name, nn.Parameter(dense, requires_grad=False))
        self._drop()
        self.is_packed = self.is_tiled = False

    @torch.no_grad()
    def tile(self) -> str:
        """Put packed weights into tiles; a copy of this layer's is held meanwhile. Returns "", or why they stay."""
        weights = self.weights()
        if isinstance(weights, TiledExperts):
            return ""
        if not self.is_packed:
            return "dense"
        if not fits_bf16(weights):
            return "a scale is beyond what products of tiles take"
        self._hold(permute_experts(weights))
        return ""

    def expect_tiles(self) -> None:
        """Buffers for tiles in the place of the packed ones, without their bytes."""
        packed: Tensor = self.get_buffer("w1_packed")
        self._hold(empty(len(packed), self.width, self.inner, packed.device))

    def published(self, name: str) -> Packed:
        """w1, w2 or w3 of packed experts in the published order: a copy if they lie in tiles."""
        matrix = getattr(self.weights(), name)
        return matrix if isinstance(matrix, Packed) else published(matrix)

    def weights(self) -> AnyExperts:
        """What the expert product takes."""
        if self.is_tiled:
            first, first_scale, second, second_scale = (self.get_buffer(name) for name in TILES)
            return TiledExperts(first, first_scale, second, second_scale, self.width, self.inner)
        return ExpertWeights(w1=self._matrix("w1"), w3=self._matrix("w3"), w2=self._matrix("w2"))

    def _hold(self, tiles: TiledExperts) -> None:
        self._drop()
        for name in TILES:
            self.register_buffer(name, getattr(tiles, name))
        self.is_tiled = True

    def _drop(self) -> None:
        """Forget packed weights."""
        packed = TILES if self.is_tiled else [f"{name}_{part}" for name in MATRICES for part in ("packed", "scale")]
        for name in packed if self.is_packed else ():
            delattr(self, name)

    def delta(self, rows: AdapterRows | None) -> ExpertDelta | None:
        """The terms of adapters in this step; None if no row has any here."""
        if rows is None or not self.lora:
            return None
        if rows.shares is None and not any(rows.among(factors.active) for factors in self.lora.values()):
            return None
        w1, w3, w2 = (self.lora[name] for name in ("w1", "w3", "w2"))
        return ExpertDelta(_for_kernels(w1), _for_kernels(w3), _for_kernels(w2), rows)

    def _matrix(self, name: str) -> Tensor | Packed:
        if self.is_packed:
            return Packed(getattr(self, f"{name}_packed"), getattr(self, f"{name}_scale"))
        weight: Tensor = getattr(self, name)
        return weight


class MoE(nn.Module):
    """One mixture of experts; `index` as in Router."""

    def __init__(
        self, config: K3Config, index: int | None = None, *, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__()
        self.activation = activation_of(config)
        self.gate = Router(config, index, dtype=dtype, device=device)
        self.experts = Experts(config, dtype=dtype, device=device)
        self.has_latent, self.has_norm = config.latent_size is not None, config.has_latent_norm
        if self.has_latent:
            width, hidden = config.expert_width, config.hidden_size
            self.routed_expert_down_proj = Linear(hidden, width, dtype=dtype, device=device)
            if self.has_norm:
                self.routed_expert_norm = RMSNorm(width, config.rms_norm_eps, dtype=dtype, device=device)
            self.routed_expert_up_proj = Linear(width, hidden, dtype=dtype, device=device)
        self.is_forked = True
        self.has_shared = config.num_shared_experts > 0
        if self.has_shared:
            intermediate = config.num_shared_experts * config.expert_intermediate_size
            self.shared_experts = MLP(config, intermediate, dtype=dtype, device=device)
        self._merged: Tensor | None = None

    def merge(self, *, may_copy: bool = True) -> None:
        """Prepare for inference: one product for all that reads x in x's dtype."""
        self._merged = merge_rows(self._readers, may_copy=may_copy)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        rows = ctx.adapter_rows
        logits, z, branch = self._project(x, ctx)
        # beside the routed experts, which wait for the choice; for one row both only wait for bytes (238 us a slice of
        # K3 for one token, 232 one after the other; 958 and 964 for 64)
        is_beside = self.is_forked and len(x) > 1
        shared = None if branch is None else aside.start(branch, x.device) if is_beside else branch
        ids, weights = self.gate.choose(logits, ctx)
        delta, options = self.experts.delta(rows), {}
        routed = ctx.kernels.expert_product
        if delta is not None:
            routed, options = ctx.kernels.expert_product_lora, {"delta": delta}
        y = routed(
            z,
            ids,
            weights,
            self.experts.weights(),
            activation=self.activation,
            fake_weights=ctx.fake_quant.weights,
            fake_activations=ctx.fake_quant.activations,
            **options,
        )
        if self.has_latent:
            y = self._raise(y, ctx)
        return y if shared is None else y + shared()

    @property
    def _readers(self) -> list[Linear | Router]:
        """What reads x, in the order of `_project`."""
        readers: list[Linear | Router] = [self.gate]
        if self.has_latent:
            readers.append(self.routed_expert_down_proj)
        if self.has_shared:
            readers += [self.shared_experts.gate_proj, self.shared_experts.up_proj]
        return readers

    def _raise(self, y: Tensor, ctx: ForwardContext) -> Tensor:
        """The routed experts' sum through the latent norm, back to the width of x."""
        up = self.routed_expert_up_proj
        if self.has_norm and ctx.adapter_rows is None and not ctx.is_training:
            norm = self.routed_expert_norm
            return ctx.kernels.norm_linear(y, norm.weight, up.weight, norm.eps)
        raised: Tensor = up(self.routed_expert_norm(y) if self.has_norm else y, ctx.adapter_rows)
        return raised

    def _project(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Callable[[], Tensor] | None]:
        """Router logits, the routed experts' input, what makes the shared experts' output (None without any)."""
        rows = ctx.adapter_rows
        if self._merged is None:
            z = self.routed_expert_down_proj(x, rows) if self.has_latent else x
            return self.gate(x), z, partial(self.shared_experts, x, rows) if self.has_shared else None
        readers = self._readers
        sizes = [reader.weight.shape[0] for reader in readers]
        if acc_dtype(x.dtype) == x.dtype:
            merged = add_loras(product(x, self._merged), readers, x, rows)
            logits, *parts = torch.split(merged, sizes, dim=-1)
        else:
            logits, rest = ctx.kernels.router_linear(x, self._merged, sizes[0])
            parts = list(torch.split(add_loras(rest, readers[1:], x, rows), sizes[1:], dim=-1))
        z = parts.pop(0) if self.has_latent else x
        return logits, z, partial(self.shared_experts.finish, parts[0], parts[1], rows) if self.has_shared else None


def _for_kernels(factors: Factors) -> ExpertFactors:
    return ExpertFactors(factors.a, factors.b, factors.scale, factors.active)
