"""KDA layer: projections, short convolutions, gate, recurrence, gated norm, output projection.

In: x [T, D], the normed layer input, packed spans. Out: [T, D].
State: decode rows advance their slot in place, draft windows leave it and record their inputs; prefill spans read their
slot (zeros when they start at 0), write the state after their last token to it, and to other slots what the step's
snapshots ask for. Training has no state and starts every span at zero.
Source: spec/k3.md 3.4.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from baltoro.kernels.kda.enter import Mixed
from baltoro.kernels.kda.fused_reference import MixerWeights
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.precision import acc_dtype
from baltoro.model.cache_map import CacheMap
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.model.linear import Linear, RMSNorm, WeightOnly, product
from baltoro.model.merged import add_loras, merge_rows

ROW_STEP = 8
"""Rows of the merged projection come in multiples of so many: with another number of columns cuBLAS takes kernels of
older cards (4096 x 7168 times 6284 columns on an H200: 1440 us, of which 520 are needed)."""


class KDA(nn.Module):
    """Kimi Delta Attention of one layer. `index`: its place among the KDA layers, which picks the view of the cache."""

    def __init__(self, config: K3Config, index: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.index = index
        self.num_heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.lower_bound = config.gate_lower_bound
        width, hidden, acc = config.kda_width, config.hidden_size, acc_dtype(dtype)
        self.q_proj = Linear(hidden, width, dtype=dtype, device=device)
        self.k_proj = Linear(hidden, width, dtype=dtype, device=device)
        self.v_proj = Linear(hidden, width, dtype=dtype, device=device)
        self.q_conv1d = WeightOnly(width, 1, config.conv_size, dtype=acc, device=device)
        self.k_conv1d = WeightOnly(width, 1, config.conv_size, dtype=acc, device=device)
        self.v_conv1d = WeightOnly(width, 1, config.conv_size, dtype=acc, device=device)
        self.f_a_proj = Linear(hidden, self.head_dim, dtype=dtype, device=device)
        self.f_b_proj = Linear(self.head_dim, width, dtype=dtype, device=device)
        self.b_proj = Linear(hidden, self.num_heads, dtype=dtype, device=device)
        self.is_gate_full_rank = config.is_kda_gate_full_rank
        if self.is_gate_full_rank:
            self.g_proj = Linear(hidden, width, dtype=dtype, device=device)
        else:
            self.g_a_proj = Linear(hidden, self.head_dim, dtype=dtype, device=device)
            self.g_b_proj = Linear(self.head_dim, width, dtype=dtype, device=device)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=acc, device=device))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=acc, device=device))
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=acc, device=device)
        self.o_proj = Linear(width, hidden, dtype=dtype, device=device)
        self._merged: Tensor | None = None
        self._conv_weight: Tensor | None = None

    def merge(self, *, may_copy: bool = True) -> None:
        """Prepare for inference: one product for all that reads x, one convolution weight."""
        self._merged = merge_rows(self._readers, may_copy=may_copy, step=ROW_STEP)
        joined = merge_rows([self.q_conv1d, self.k_conv1d, self.v_conv1d], may_copy=may_copy)
        self._conv_weight = None if joined is None else joined.squeeze(1)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        rows = ctx.adapter_rows
        qkv, f, b, gate = self._project(x, rows)
        if not self.is_gate_full_rank:
            gate = self.g_b_proj(gate, rows)
        heads = (self.num_heads, self.head_dim)
        raw, gate = torch.unflatten(self.f_b_proj(f, rows), -1, heads), torch.unflatten(gate, -1, heads)
        split, parts = ctx.num_decode_rows, []
        if split:
            parts.append(self._decode(qkv[:split], raw[:split], b[:split], gate[:split], ctx))
        if split < len(x):
            parts.append(self._prefill(qkv[split:], raw[split:], b[split:], gate[split:], ctx))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(out.flatten(1), rows)  # type: ignore[no-any-return]

    @property
    def _readers(self) -> list[Linear]:
        """Everything that reads x, in the order of `_project`: beta last, whose few columns would shift those of others
        away from multiples of 16 bytes."""
        gate = self.g_proj if self.is_gate_full_rank else self.g_a_proj
        return [self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, gate, self.b_proj]

    def _project(self, x: Tensor, rows: AdapterRows | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q | k | v, the gate's low rank, beta's logits, and the output gate (or its low rank)."""
        if self._merged is None:
            q, k, v, f, gate, b = (linear(x, rows) for linear in self._readers)
            return torch.cat([q, k, v], dim=-1), f, b, gate
        *sizes, gate_size, heads = [len(reader.weight) for reader in self._readers]
        out, num = product(x, self._merged), sum(sizes) + gate_size + heads
        merged = add_loras(out if out.shape[-1] == num else out[..., :num], self._readers, x, rows)
        qkv, f, gate, b = torch.split(merged, [sum(sizes[:3]), sizes[3], gate_size, heads], dim=-1)
        return qkv, f, b, gate

    def _join_conv(self) -> Tensor:
        """[3HK, W]: the three depthwise weights over the channels q | k | v."""
        return torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)

    @property
    def _weights(self) -> MixerWeights:
        conv = self._join_conv() if self._conv_weight is None else self._conv_weight
        bias = self.dt_bias.view(self.num_heads, self.head_dim)
        scale, norm = self.head_dim**-0.5, self.o_norm
        return MixerWeights(conv, self.A_log, bias, norm.weight, norm.eps, self.lower_bound, scale)

    def _decode(self, qkv: Tensor, raw: Tensor, b: Tensor, gate: Tensor, ctx: ForwardContext) -> Tensor:
        """The decode rows, one token each, their slots in place: [N, H, V]. Of draft windows [N * W, H, V]: the slots
        are read, and what a fold needs is recorded."""
        assert ctx.cache is not None
        views, slots = ctx.cache.views, ctx.cache.slots[: ctx.num_decodes]
        history, state = views.conv[self.index], views.recurrent[self.index]
        if ctx.windows is None:
            return ctx.kernels.kda_decode(qkv, raw, b, gate, self._weights, history, state, slots)
        rows = [torch.unflatten(part, 0, (-1, ctx.window)) for part in (qkv, raw, b, gate)]
        records = ctx.windows.records.layer(self.index)
        return ctx.kernels.kda_verify(*rows, self._weights, history, state, slots, records).flatten(0, 1)

    def _prefill(self, qkv: Tensor, raw: Tensor, b: Tensor, gate: Tensor, ctx: ForwardContext) -> Tensor:
        """All other rows, and every row of training: [T, H, V]."""
        weights = self._weights
        mixed = self._enter(qkv, raw, b, weights, ctx)
        out = self._recur(*mixed, ctx)
        return ctx.kernels.gated_rms_norm(out, gate, weights.norm, weights.norm_eps, qkv.dtype)

    def _enter(self, qkv: Tensor, raw: Tensor, b: Tensor, weights: MixerWeights, ctx: ForwardContext) -> Mixed:
        """What the recurrence takes; reads and writes the conv history."""
        if ctx.cache is None:
            return ctx.kernels.kda_enter(qkv, raw, b, weights, spans=ctx.spans, history=None)[0]
        history, borders = ctx.cache.views.conv[self.index], ctx.prefill_borders
        before = _entering(history, ctx.cache, ctx)
        mixed, after = ctx.kernels.kda_enter(qkv, raw, b, weights, spans=ctx.prefill, history=before, borders=borders)
        _leave(history, after, ctx)
        return mixed

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ctx: ForwardContext) -> Tensor:
        """The delta rule over the spans: [T, H, V] in the accumulate dtype."""
        run = partial(
            ctx.kernels.kda_chunk, q, k, v, g, beta, scale=self.head_dim**-0.5, is_bounded=self.lower_bound is not None
        )
        if ctx.cache is None:
            return run(spans=ctx.spans, state=None)[0]
        state = ctx.cache.views.recurrent[self.index]
        before = _entering(state, ctx.cache, ctx)
        out, after = run(spans=ctx.prefill, state=before, borders=ctx.prefill_borders)
        _leave(state, after, ctx)
        return out


def _entering(rows: Tensor, cache: CacheMap, ctx: ForwardContext) -> Tensor | None:
    """What prefill spans find in their slots: zeros for a span that starts at 0, whatever an old owner left there.
    None where all are zeros."""
    if ctx.is_prefill_fresh:
        return None
    found = rows[cache.slots[ctx.num_decodes :]]
    if all(ctx.prefill.starts):
        return found
    fresh = ctx.prefill_is_fresh.view(-1, *([1] * (found.dim() - 1)))
    return found.masked_fill_(fresh, 0)


def _leave(rows: Tensor, after: Tensor, ctx: ForwardContext) -> None:
    """Write what prefill spans leave, `after` [N + B, ...], to their slots and to those of the snapshots."""
    rows[ctx.state_slots] = after.to(rows.dtype)
    if ctx.end_copies is not None:
        source, target = ctx.end_copies
        rows[target] = rows[source]
