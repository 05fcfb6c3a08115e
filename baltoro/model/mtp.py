"""Multi-token prediction: one more decoder layer that guesses the token after the next one.

In: the hidden state of each token before the target's final norm (or the previous MTP layer's), and the id of the
token that follows it. Out: the hidden state from which the next step goes on, and logits of the token after that.
Invariants: a row is a token of the step's spans and keeps its position; AttnRes is off, the residual is the plain sum.
The embedding and the head are the layer's own tensors, even where a file repeats the target's.
Limit: no cache of its own yet, so `predict` is for training; drafting with it is the engine's business (engine/spec).
Source: spec/k3.md 4.1; tensor names 2.9.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baltoro.errors import ShapeError
from baltoro.model.attnres import Stream
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.model.layer import DecoderLayer
from baltoro.model.linear import Linear, RMSNorm, WeightOnly


class SharedHead(nn.Module):
    """Norm and head over the layer's hidden state."""

    def __init__(self, config: K3Config, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> logits [..., X]."""
        out: Tensor = self.head(self.norm(hidden))
        return out


class MTPLayer(DecoderLayer):
    """MTP layer `index` (0-based): an ordinary MLA + MoE layer with an entrance and a head.

    As a DecoderLayer it is called as any other, on a Stream; `predict` is the whole of it.
    """

    def __init__(self, config: K3Config, index: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(config, config.num_layers + index, dtype=dtype, device=device, has_attn_res=False)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = WeightOnly(config.vocab_size, hidden, dtype=dtype, device=device)
        self.enorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.hnorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.eh_proj = Linear(2 * hidden, hidden, dtype=dtype, device=device)
        self.shared_head = SharedHead(config, dtype=dtype, device=device)

    def predict(
        self, ctx: ForwardContext, hidden: Tensor, next_tokens: Tensor, *, step: int = 0
    ) -> tuple[Tensor, Tensor]:
        """One step: (logits [M, X] of rows `ctx.logit_rows` or all T, hidden state [T, D] for the next step).

        hidden [T, D]; next_tokens int64 [T], the token `step + 1` places after each row's own. After `step` earlier
        steps a row stands at its position + step.
        Errors: ShapeError if the rows disagree or the step has a cache.
        """
        num_tokens = ctx.spans.num_tokens
        if hidden.shape[0] != num_tokens or next_tokens.shape != (num_tokens,):
            shapes = f"{tuple(hidden.shape)} hidden rows and {tuple(next_tokens.shape)} next tokens"
            raise ShapeError(f"{shapes} for {num_tokens} tokens")
        if ctx.cache is not None:
            raise ShapeError("an MTP layer has no rows in the cache: give it a context without one")
        stream = self(Stream(self.enter(ctx, hidden, next_tokens, step=step)), ctx)
        out: Tensor = stream.settled().prefix
        return self.shared_head(out if ctx.logit_rows is None else out[ctx.logit_rows]), out

    def enter(self, ctx: ForwardContext, hidden: Tensor, next_tokens: Tensor, *, step: int = 0) -> Tensor:
        """[T, D]: normed embedding and normed hidden state, embedding first, through eh_proj.

        A row that stands at position 0 has zeros for its embedding, as in the published engine.
        """
        is_first = (ctx.spans.positions + step == 0).unsqueeze(-1)
        embedding = F.embedding(next_tokens, self.embed_tokens.weight).masked_fill(is_first, 0.0)
        out: Tensor = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        return out


def predict_ahead(
    layers: nn.ModuleList, ctx: ForwardContext, hidden: Tensor, next_tokens: tuple[Tensor, ...]
) -> list[Tensor]:
    """Logits of len(next_tokens) steps, each on the hidden state of the one before.

    next_tokens[s] [T] is the (s + 1)-th token after each row; step s uses layer s mod the number of layers.
    """
    logits = []
    for step, tokens in enumerate(next_tokens):
        layer = layers[step % len(layers)]
        assert isinstance(layer, MTPLayer)
        out, hidden = layer.predict(ctx, hidden, tokens, step=step)
        logits.append(out)
    return logits
