"""K3, whole: embed (and picture features), layers, last mix, norm, head. A plain loop over layers.

In: a ForwardContext. Out: logits [M, X] in the activation dtype (rows of `ctx.logit_rows`, or all T).
Module names are the published tensor names without the optional `language_model.` prefix, so that `state_dict` keys
and files map one to one; only routed experts are stacked.
Source: spec/k3.md 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baltoro.errors import ShapeError
from baltoro.kernels.kda.grid import CHUNK
from baltoro.kernels.moe.experts import can_be_fixed
from baltoro.model.attnres import Stream, depth_query, mix, until_changes
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.model.kda import KDA
from baltoro.model.layer import DecoderLayer
from baltoro.model.linear import Linear, RMSNorm, WeightOnly
from baltoro.model.mla import MLA
from baltoro.model.mlp import MLP
from baltoro.model.moe import Experts, MoE
from baltoro.model.mtp import MTPLayer
from baltoro.model.published import Published
from baltoro.model.vision import Projector, VisionTower


class Decoder(nn.Module):
    """Embedding, layers and final norm. MTP layers follow the decoder's in `layers`; the loop stops before them."""

    def __init__(self, config: K3Config, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        self.has_attn_res = config.attn_res_block_size is not None
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = WeightOnly(config.vocab_size, hidden, dtype=dtype, device=device)
        layers: list[nn.Module] = [DecoderLayer(config, i, dtype=dtype, device=device) for i in range(self.num_layers)]
        layers += [MTPLayer(config, k, dtype=dtype, device=device) for k in range(config.num_mtp_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        if self.has_attn_res:
            self.output_attn_res_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
            self.output_attn_res_proj = Linear(hidden, 1, dtype=dtype, device=device)

    def forward(self, embeddings: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, D], the state before the final norm."""
        stream = Stream(embeddings)
        for layer in self.layers[: self.num_layers]:
            stream = layer(stream, ctx)
        return self.leave(stream.settled(), ctx)

    def look_ahead(self) -> None:
        """After the layers' `merge`: each read knows the queries of those after it, for long prefills."""
        if self.has_attn_res:
            layers = [layer for layer in self.layers[: self.num_layers] if isinstance(layer, DecoderLayer)]
            ahead = until_changes([one for layer in layers for one in layer.reads()])
            for n, layer in enumerate(layers):
                layer.look_ahead(ahead[2 * n], ahead[2 * n + 1])

    def leave(self, stream: Stream, ctx: ForwardContext) -> Tensor:
        """[T, D]: what the last layer's stream hands to the final norm."""
        if self.has_attn_res:
            query = depth_query(self.output_attn_res_norm, self.output_attn_res_proj)
            return mix(stream, query, self.output_attn_res_norm.eps, ctx)
        assert stream.prefix is not None
        return stream.prefix


class K3Model(nn.Module):
    """The model of a config: text decoder, head and, if the config has one, vision tower with projector."""

    def __init__(
        self, config: K3Config, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = Decoder(config, dtype=dtype, device=device)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        if config.is_mtp_shared:
            for layer in self.model.layers[config.num_layers :]:
                assert isinstance(layer, MTPLayer)
                layer.embed_tokens, layer.shared_head.head = self.model.embed_tokens, self.lm_head
        if config.vision is not None:
            self.vision_tower = VisionTower(config.vision, dtype=dtype, device=device)
            self.mm_projector = Projector(config.vision, config.hidden_size, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.norm.weight.device

    @property
    def state_chunk(self) -> int:
        """Inside a span a state can be kept at absolute positions that are multiples of this (see `Snapshot`)."""
        return CHUNK

    def merge(self, *, may_copy: bool = True) -> K3Model:
        """Prepare for inference on the device where the weights are: projections of one input become one product.

        Parameters stay what they are (views); training afterwards would see no gradient for them, which a frozen base
        does not need. `may_copy` False, for a base that others map too: only what lies end to end is joined.
        """
        shared = {moe.shared_experts for moe in self.modules() if isinstance(moe, MoE) and moe.has_shared}
        for module in self.modules():
            # shared experts read what their router reads, and are merged with it
            if isinstance(module, DecoderLayer | KDA | MLA | MoE | MLP) and module not in shared:
                module.merge(may_copy=may_copy)
        self.model.look_ahead()
        return self

    def can_fix_adapters(self, num_tokens: int) -> bool:
        """Whether terms of adapters can be had in fixed form (`AdapterRows.fixed`) in steps of so many tokens."""
        every = (module for module in self.modules() if isinstance(module, Experts) and module.lora)
        return all(can_be_fixed(experts.weights(), num_tokens) for experts in every)

    def unpack_experts(self) -> K3Model:
        """Turn packed routed experts into ordinary weights of the model's dtype, layer by layer: what a CPU computes
        with fastest, for 7.5 times their memory in FP32."""
        for module in self.modules():
            if isinstance(module, Experts):
                module.unpack(self.dtype)
        self.config = self.config.with_(are_experts_packed=False)
        return self

    def tile_experts(self) -> dict[str, int]:
        """Put packed routed experts into tiles, layer by layer: the order that a GPU's products read (kernels/moe).

        Returns how many layers lie how: "tiled", or why not. Whatever order they lie in, `tensors` has the published
        bytes, while `stored` and state_dicts name what lies there.
        """
        found = Counter(module.tile() or "tiled" for module in self.modules() if isinstance(module, Experts))
        return dict(found)

    def stored(self) -> dict[str, Tensor]:
        """What lies in memory, by name, shared parameters under the model's own name only."""
        names = ("embed_tokens.weight", "shared_head.head.weight")
        mtp = range(self.config.num_layers, self.config.num_layers + self.config.num_mtp_layers)
        again = {f"model.layers.{i}.{name}" for i in mtp for name in names} if self.config.is_mtp_shared else set()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in again}

    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and buffer by name, as a file holds them. Of experts in tiles a copy is made on access; the
        copies of one layer are kept until those of another are asked for, and what is written to them is lost."""
        stored = self.stored()
        tiled = {name: m for name, m in self.named_modules() if isinstance(m, Experts) and m.is_tiled}
        return Published(stored, tiled) if tiled else stored

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Logits [M, X]."""
        hidden = self.hidden(ctx)
        return self.logits(hidden if ctx.logit_rows is None else hidden[ctx.logit_rows])

    def hidden(self, ctx: ForwardContext) -> Tensor:
        """[T, D], the state before the final norm: what MTP and drafts read."""
        return self.model(self.embed(ctx), ctx)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head over any rows of `hidden`."""
        normed = self.model.norm(hidden)
        if self.config.tie_word_embeddings:
            return F.linear(normed, self.model.embed_tokens.weight)
        return self.lm_head(normed)  # type: ignore[no-any-return]

    def embed(self, ctx: ForwardContext) -> Tensor:
        """Token embeddings, with picture features in the place of media pads."""
        embeddings = F.embedding(ctx.tokens, self.model.embed_tokens.weight)
        if ctx.media is None:
            return embeddings
        if self.config.vision is None:
            raise ShapeError("the step carries pictures but the model has no vision tower")
        features = self.features(ctx.media.pixels, ctx.media.grids)
        return embeddings.index_copy(0, ctx.media.rows, features[ctx.media.picks].to(embeddings.dtype))

    def features(self, pixels: Tensor, grids: tuple[tuple[int, int, int], ...]) -> Tensor:
        """[X, D]: projected features of pictures, row-major, items concatenated."""
        return self.mm_projector(self.vision_tower(pixels.to(self.dtype), grids))  # type: ignore[no-any-return]
