"""Gated NoPE latent attention: expanded for prefill and training, absorbed over the latent cache for decode.

In: x [T, D], the normed layer input. Out: [T, D].
Cache: one row per token, normed latent [R] | shared key part [Dr]; decode multiplies kv_b into the query and the
output instead of expanding the cache. A draft window is a decode with more query rows; its rows are written too, and
those of refused drafts are written again later. No position information of any kind.
In training the attention output stays in the accumulate dtype up to the gate (rounding it first moves gradients).
Source: spec/k3.md 3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.mla.expanded import key_and_value
from baltoro.kernels.mla.padded import hidden_scores, padding_of, split_groups
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans
from baltoro.model.cache_map import CacheMap
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.model.linear import Linear, RMSNorm, product
from baltoro.model.merged import add_loras, merge_rows


class MLA(nn.Module):
    """Latent attention of one layer. `index` is the layer's place among the MLA layers (which view of the cache).

    `logit_observer`, when set, is told the largest attention logit of each head [H] of a training forward (QK-clip).
    """

    def __init__(self, config: K3Config, index: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.index = index
        self.num_heads = config.num_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5
        self.has_gate = config.has_mla_gate
        self.q_rank = config.q_lora_rank
        self.logit_observer: Callable[[Tensor], None] | None = None
        hidden, heads, eps = config.hidden_size, config.num_heads, config.mla_norm_eps
        if self.q_rank is None:
            self.q_proj = Linear(hidden, heads * config.qk_head_dim, dtype=dtype, device=device)
        else:
            self.q_a_proj = Linear(hidden, self.q_rank, dtype=dtype, device=device)
            self.q_a_layernorm = RMSNorm(self.q_rank, eps, dtype=dtype, device=device)
            self.q_b_proj = Linear(self.q_rank, heads * config.qk_head_dim, dtype=dtype, device=device)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_row_width, dtype=dtype, device=device)
        self.kv_a_layernorm = RMSNorm(self.latent, eps, dtype=dtype, device=device)
        self.kv_b_proj = Linear(self.latent, heads * (self.nope + self.value), dtype=dtype, device=device)
        if self.has_gate:
            self.g_proj = Linear(hidden, heads * self.value, dtype=dtype, device=device)
        self.o_proj = Linear(heads * self.value, hidden, dtype=dtype, device=device)
        self._merged: Tensor | None = None

    def merge(self, *, may_copy: bool = True) -> None:
        """Prepare for inference: one product for all that reads x."""
        self._merged = merge_rows(self._readers, may_copy=may_copy)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        adapters = ctx.adapter_rows
        q, kv, *gate = self._project(x, adapters)
        q = self._query(q, ctx)
        if ctx.cache is not None and adapters is None and ctx.num_decode_rows == len(x):
            out = self._decode(q, kv, gate[0] if gate else None, ctx.cache, ctx)
            return self.o_proj(out)  # type: ignore[no-any-return]
        latent, shared = torch.split(kv, [self.latent, self.rope], dim=-1)
        out = self._attend(q, self.kv_a_layernorm(latent), shared, ctx).flatten(1)
        if self.has_gate:
            out = out * torch.sigmoid(gate[0]).to(out.dtype)
        return self.o_proj(out.to(x.dtype), adapters)  # type: ignore[no-any-return]

    def _query(self, q: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, H, K+Dr], from the query or from its low rank."""
        if self.q_rank is not None:
            norm, up = self.q_a_layernorm, self.q_b_proj
            if q.is_cuda and ctx.adapter_rows is None and not ctx.is_training:
                q = ctx.kernels.norm_linear(q, norm.weight, up.weight, norm.eps)
            else:
                q = up(norm(q), ctx.adapter_rows)
        return q.view(-1, self.num_heads, self.nope + self.rope)

    def _decode(self, q: Tensor, row: Tensor, gate: Tensor | None, cache: CacheMap, ctx: ForwardContext) -> Tensor:
        """A step of decodes alone, as most are: [T, H * Dv]. As `_absorbed`, in fewer operations."""
        kv, norm = cache.views.kv[self.index], self.kv_a_layernorm
        kv_b = self.kv_b_proj.weight.view(self.num_heads, self.nope + self.value, self.latent)
        query = ctx.kernels.mla_enter(q, row, norm.weight, norm.eps, kv_b, kv, ctx.kv_places)
        out = self._attend_latent(query, kv, cache, ctx)
        return ctx.kernels.mla_leave(out, kv_b, self.value, gate, q.dtype)

    def _attend_latent(self, query: Tensor, kv: Tensor, cache: CacheMap, ctx: ForwardContext) -> Tensor:
        """Absorbed queries of the decode rows [N * W, H, R+Dr] against the paged rows: [N * W, H, R]."""
        table, lengths = cache.page_table[: ctx.num_decodes], ctx.decode_lengths
        attend = partial(ctx.kernels.mla_attend_absorbed, latent=self.latent, scale=self.scale)
        if ctx.windows is None:
            return attend(query, kv, table, lengths)[0]
        turn, back = ctx.window_turn
        windows = torch.unflatten(query.index_select(0, turn), 0, (-1, ctx.window))
        return attend(windows, kv, table, lengths)[0].flatten(0, 1).index_select(0, back)

    @property
    def _readers(self) -> list[Linear]:
        """Everything that reads x: the query (or its low rank), the key-value row, the output gate if there is one."""
        query = self.q_proj if self.q_rank is None else self.q_a_proj
        return [query, self.kv_a_proj_with_mqa, *([self.g_proj] if self.has_gate else [])]

    def _project(self, x: Tensor, adapters: AdapterRows | None) -> tuple[Tensor, ...]:
        if self._merged is None:
            return tuple(linear(x, adapters) for linear in self._readers)
        merged = add_loras(product(x, self._merged), self._readers, x, adapters)
        return torch.split(merged, [linear.weight.shape[0] for linear in self._readers], dim=-1)

    def _attend(self, q: Tensor, latent: Tensor, shared: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, H, Dv]; writes the rows latent | shared to the cache first, so that a token sees itself."""
        if ctx.cache is None:
            return self._expanded(q, torch.cat([latent, shared], dim=-1), ctx.spans, ctx)
        split, kv = ctx.num_decode_rows, ctx.cache.views.kv[self.index]
        ctx.kernels.scatter_rows(kv, ctx.kv_places, latent, shared)
        parts = []
        if split:
            parts.append(self._absorbed(q[:split], kv, ctx.cache, ctx))
        if len(ctx.prefill):
            is_fresh = ctx.is_prefill_fresh
            keys = torch.cat([latent[split:], shared[split:]], -1) if is_fresh else kv[ctx.prefill_key_places]
            parts.append(self._expanded(q[split:], keys, ctx.prefill, ctx))
        return torch.cat(parts)

    def _expanded(self, q: Tensor, rows: Tensor, spans: Spans, ctx: ForwardContext) -> Tensor:
        """Ordinary attention on keys and values expanded from the rows of all tokens that the spans see."""
        latent, shared = torch.split(rows, [self.latent, self.rope], dim=-1)
        expanded = self.kv_b_proj(latent, ctx.key_adapter_rows).view(-1, self.num_heads, self.nope + self.value)
        if not ctx.is_training:
            attend = ctx.kernels.mla_attend_expanded
            return attend(q, expanded, shared, spans=spans, scale=self.scale, out_dtype=q.dtype)
        key, value = key_and_value(expanded, shared, self.nope)
        if self.logit_observer is not None:
            self.logit_observer(max_logits(q.detach(), key.detach(), spans, self.scale))
        return ctx.kernels.mla_attend(q, key, value, spans=spans, scale=self.scale, out_dtype=acc_dtype(q.dtype))

    def _absorbed(self, q: Tensor, kv: Tensor, cache: CacheMap, ctx: ForwardContext) -> Tensor:
        """Decode rows against the paged latent rows: kv_b goes into the query and into the output, and so do the
        factors of an adapter on kv_b."""
        weight = self.kv_b_proj.weight.view(self.num_heads, self.nope + self.value, self.latent)
        up_key, up_value = torch.split(weight, [self.nope, self.value], dim=1)
        q_nope, q_shared = torch.split(q, [self.nope, self.rope], dim=-1)
        # [H, N, Dn] x [H, Dn, R]: one small product per head
        q_latent = torch.bmm(q_nope.transpose(0, 1), up_key).transpose(0, 1)
        lora, rows = self.kv_b_proj.lora, ctx.decode_adapter_rows
        if lora is not None and rows is not None:
            key_factor, value_factor = self._by_head(lora.b)
            q_latent = ctx.kernels.lora_absorbed_query(
                q_latent, q_nope, lora.a, key_factor, lora.scale, rows, active=lora.active
            )
        out = self._attend_latent(torch.cat([q_latent, q_shared], dim=-1), kv, cache, ctx).to(q.dtype)
        value = torch.bmm(out.transpose(0, 1), up_value.transpose(1, 2)).transpose(0, 1)
        if lora is not None and rows is not None:
            value = ctx.kernels.lora_absorbed_value(
                value, out, lora.a, value_factor, lora.scale, rows, active=lora.active
            )
        return value

    def _by_head(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """B of kv_b [U, H * (K + V), r] as [U, H, K, r] and [U, H, V, r]."""
        by_head = b.view(b.shape[0], self.num_heads, self.nope + self.value, b.shape[-1])
        key, value = torch.split(by_head, [self.nope, self.value], dim=2)
        return key, value


def max_logits(q: Tensor, k: Tensor, spans: Spans, scale: float) -> Tensor:
    """Largest causal q.k * scale of each head, [H], over training spans (keys and queries are the same rows)."""
    padding, found = padding_of(spans), []
    queries, keys = (split_groups(x.index_select(0, padding.order), padding) for x in (q, k))
    for shape, hidden, *pair in zip(padding.shapes, hidden_scores(spans), queries, keys, strict=True):
        left, right = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in pair)  # [B, H, L, D]
        scores = torch.matmul(left, right.mT).masked_fill_(hidden.unsqueeze(1), -torch.inf)
        found.append(scores.amax(dim=(0, 2, 3)))
    # the scale is positive, so it may come last
    return torch.stack(found).amax(0).to(acc_dtype(q.dtype)) * scale
