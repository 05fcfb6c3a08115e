"""One layer: attention, then MLP or experts, each reading the depth mix and adding to the stream.

In and out: a Stream. Without AttnRes this is an ordinary pre-norm layer.
Source: spec/k3.md 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from baltoro.model.attnres import Stream, depth_query, mix, read
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.model.kda import KDA
from baltoro.model.linear import Linear, RMSNorm
from baltoro.model.mla import MLA
from baltoro.model.mlp import MLP
from baltoro.model.moe import MoE


class DecoderLayer(nn.Module):
    """Layer `layer` (0-based) of the decoder. An MTP block passes `has_attn_res=False` and `layer >= num_layers`."""

    def __init__(
        self,
        config: K3Config,
        layer: int,
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        has_attn_res: bool | None = None,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        is_mtp = layer >= config.num_layers
        if is_mtp or config.kind(layer) == "mla":
            index = len(config.mla_layers) + layer - config.num_layers if is_mtp else config.mla_layers.index(layer)
            self.self_attn: KDA | MLA = MLA(config, index, dtype=dtype, device=device)
        else:
            self.self_attn = KDA(config, config.kda_layers.index(layer), dtype=dtype, device=device)
        self.has_experts = config.num_experts > 0 if is_mtp else config.has_experts(layer)
        if self.has_experts:
            place = None if is_mtp else config.expert_layers.index(layer)
            self.block_sparse_moe = MoE(config, place, dtype=dtype, device=device)
        else:
            self.mlp = MLP(config, config.intermediate_size, dtype=dtype, device=device)
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        block = config.attn_res_block_size
        self.has_attn_res = block is not None if has_attn_res is None else has_attn_res
        self.opens_block = self.has_attn_res and block is not None and layer % block == 0
        if self.has_attn_res:
            for name in ("self_attention_res", "mlp_res"):
                self.add_module(f"{name}_norm", RMSNorm(hidden, eps, dtype=dtype, device=device))
                self.add_module(f"{name}_proj", Linear(hidden, 1, dtype=dtype, device=device))
        self._queries: dict[str, Tensor] = {}
        self._ahead: dict[str, Tensor] = {}

    def merge(self, *, may_copy: bool = True) -> None:
        """Prepare for inference: the depth queries are products of two parameters that no longer change. They are
        vectors, kept whatever `may_copy` says."""
        if self.has_attn_res:
            names = ("self_attention_res", "mlp_res")
            self._queries = {
                n: depth_query(getattr(self, f"{n}_norm"), getattr(self, f"{n}_proj")).detach() for n in names
            }

    def reads(self) -> list[tuple[Tensor, bool]]:
        """After `merge`: (query, does the bank change behind it) of both reads, in order."""
        return [(self._queries["self_attention_res"], self.opens_block), (self._queries["mlp_res"], False)]

    def look_ahead(self, of_attention: Tensor, of_mlp: Tensor) -> None:
        """Queries [n, D] of each read and of those after it that see the same bank."""
        self._ahead = {"self_attention_res": of_attention, "mlp_res": of_mlp}

    def forward(self, stream: Stream, ctx: ForwardContext) -> Stream:
        return self.feed(self.attend(stream, ctx), ctx)

    def attend(self, stream: Stream, ctx: ForwardContext) -> Stream:
        """The first half: attention."""
        stream, h = self._read(stream, "self_attention_res", self.input_layernorm, ctx)
        if self.opens_block:
            stream = stream.open_block(is_stacked=self._is_fused(h))
        return self._write(stream, self.self_attn(h, ctx))

    def feed(self, stream: Stream, ctx: ForwardContext) -> Stream:
        """The second half: MLP or experts."""
        stream, h = self._read(stream, "mlp_res", self.post_attention_layernorm, ctx)
        return self._write(stream, self.block_sparse_moe(h, ctx) if self.has_experts else self.mlp(h, ctx.adapter_rows))

    def _is_fused(self, x: Tensor) -> bool:
        """Whether a read adds, mixes and norms in one operation: on a GPU, after `merge`, no gradient wanted."""
        return bool(self._queries) and x.is_cuda and not torch.is_grad_enabled()

    def _write(self, stream: Stream, update: Tensor) -> Stream:
        return stream.hold(update) if self._is_fused(update) else stream.add(update)

    def _read(self, stream: Stream, name: str, norm: RMSNorm, ctx: ForwardContext) -> tuple[Stream, Tensor]:
        """(stream, the sub-layer's normed input)."""
        if not self.has_attn_res:
            stream = stream.settled()
            assert stream.prefix is not None, "a plain residual stream always has a running sum"
            return stream, norm(stream.prefix)
        own: RMSNorm = getattr(self, f"{name}_norm")
        query = self._queries.get(name)
        if query is None:
            query = depth_query(own, getattr(self, f"{name}_proj"))
        if stream.bank and self._is_fused(stream.bank[0]):
            return read(stream, query, own.eps, norm, ctx, self._ahead.get(name))
        stream = stream.settled()
        return stream, norm(mix(stream, query, own.eps, ctx))
