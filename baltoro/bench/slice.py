"""One rank's slice of K3, a step of it: KDA, latent attention and experts from the model's own classes.

    read -> KDA -> read -> MLA -> read -> MoE        three depth reads over 8 bank rows, pending additions included

Widths are the published ones: attention and shared experts as a rank of eight holds them (12 heads, 768 of 6144),
router and latent projections whole, 112 of 896 experts resident, and every pick among them. Weights are random, in the
published dtypes. State, cache and inputs lie as an engine would have them.
Bytes: every weight that a step must read (of the experts those that are hit), states read and written, keys read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from baltoro.config import set_environment
from baltoro.errors import InvariantError
from baltoro.kernels.dispatch import SWITCH, kernels_for
from baltoro.kernels.spans import Spans
from baltoro.model.attnres import Stream
from baltoro.model.cache_map import CacheMap
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.model.kda import KDA
from baltoro.model.layer import DecoderLayer
from baltoro.model.linear import RMSNorm
from baltoro.model.mla import MLA
from baltoro.model.mlp import MLP
from baltoro.model.moe import Experts, MoE, Router
from baltoro.model.state import CacheViews

PAGE = 64


@dataclass(frozen=True, slots=True)
class SliceShape:
    """Two layers of `config`, the first KDA, the second MLA with experts; `experts` the router knows, of which
    `config.num_experts` are resident; `shared` the rank's width of the shared experts; `bank` rows of depth; `keys` a
    request."""

    config: K3Config
    experts: int
    shared: int
    bank: int
    keys: int


def published_shape(keys: int = 4096) -> SliceShape:
    """A rank of eight of K3."""
    config = K3Config(
        vocab_size=8, hidden_size=7168, num_layers=2, mla_layers=(1,), kda_num_heads=12, kda_head_dim=128,
        gate_lower_bound=-5.0, is_kda_gate_full_rank=True, num_heads=12, kv_lora_rank=512, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, has_mla_gate=True, intermediate_size=8,
        hidden_act="situ", situ_beta=4.0, situ_linear_beta=25.0, num_experts=112, num_active_experts=16,
        num_shared_experts=1, expert_intermediate_size=3072, latent_size=3584, has_latent_norm=True,
        first_dense_layers=1, are_experts_packed=True, attn_res_block_size=12, rms_norm_eps=1e-5,
    )  # fmt: skip
    return SliceShape(config, experts=896, shared=768, bank=8, keys=keys)


Measure = Callable[[Callable[[], object], bool], float]
"""(work, is it to be captured) -> microseconds of one."""
READS, SMALL = ("attnres_read",), ("rms_norm", "situ_glu", "mla_enter", "mla_leave")
FEW = ("linear", "norm_linear")


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: everything before it, and this."""

    name: str
    forced: tuple[str, ...] = ()
    is_merged: bool = True
    is_captured: bool = True
    is_permuted: bool = True
    is_forked: bool = False


LADDER = (
    Rung("P0 references, eager", ("all",), is_merged=False, is_captured=False, is_permuted=False),
    Rung("P1 fast rows of the dispatch table", READS + SMALL + FEW, False, False, False),
    Rung("P2 projections of one input in one product", READS + SMALL + FEW, True, False, False),
    Rung("P3 captured graph", READS + SMALL + FEW, is_permuted=False),
    Rung("P4 experts in the kernels' order", READS + SMALL + FEW),
    Rung("P5 depth reads with addition and norm", SMALL + FEW),
    Rung("P6 norms, activation, both ends of latent attention in one launch each", FEW),
    Rung("P7 products of few rows"),
    Rung("P8 shared experts beside the routed", is_forked=True),
)


class Slice(nn.Module):
    """The layers, their cache and one step's input: the last `tokens` of each request's keys, 1 of a decode."""

    def __init__(
        self, shape: SliceShape, batch: int, *, tokens: int = 1, dtype: torch.dtype, device: str, seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = shape.config
        self.shape, self.batch, self.new, self.place = shape, batch, tokens, torch.device(device)
        self.first, self.second = (DecoderLayer(config, i, dtype=dtype, device=device) for i in range(2))
        self.moe: MoE = self.second.block_sparse_moe
        self.moe.gate = Router(replace(config, num_experts=shape.experts), dtype=dtype, device=device)
        self.moe.shared_experts = MLP(config, shape.shared, dtype=dtype, device=device)
        for layer in (self.first, self.second):
            layer.opens_block = False  # in the middle of a block
        del self.first.mlp  # no part of the slice
        _fill(self, shape)
        self._make_inputs(dtype)
        self._written = (self.views.recurrent[0], self.views.conv[0], self.views.kv[0])
        self._kept = [view.clone() for view in self._written]

    def _make_inputs(self, dtype: torch.dtype) -> None:
        config, batch, shape = self.shape.config, self.batch, self.shape
        pages = -(-shape.keys // PAGE)
        heads, width = config.kda_num_heads, config.kda_width
        acc = torch.float64 if dtype == torch.float64 else torch.float32

        def draw(*size: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(*size, dtype=kind, device=self.place)

        recurrent = draw(batch + 1, heads, config.kda_head_dim, config.kda_head_dim, kind=acc) * 0.1
        conv, kv = draw(batch + 1, config.conv_size - 1, 3 * width), draw(batch * pages + 1, PAGE, config.kv_row_width)
        self.views = CacheViews((recurrent,), (conv,), (kv,))
        order = torch.randperm(batch * pages, device=self.place) + 1
        self.table = order.view(batch, pages)
        self.slots = torch.arange(1, batch + 1, device=self.place)
        place = torch.arange(shape.keys - self.new, shape.keys, device=self.place)
        self.rows = (self.table[:, place // PAGE] * PAGE + place % PAGE).flatten()
        self.lengths = torch.full((batch,), shape.keys, device=self.place)
        total = batch * self.new
        self.tokens = torch.zeros(total, dtype=torch.int64, device=self.place)
        self.bank = draw(shape.bank, total, config.hidden_size)
        self.prefix, self.update = draw(total, config.hidden_size), draw(total, config.hidden_size)

    def prepare(self, rung: Rung) -> None:
        """Merged and in tiles as far as the rung wants; there is no way back."""
        if rung.is_merged:
            for module in (self.first, self.second, self.first.self_attn, self.second.self_attn, self.moe):
                module.merge()
        if rung.is_permuted and (reason := self.moe.experts.tile()):
            raise InvariantError(f"experts in tiles: {reason}")
        self.moe.is_forked = rung.is_forked

    def restore(self) -> None:
        """State and cache as they were at first."""
        for view, kept in zip(self._written, self._kept, strict=True):
            view.copy_(kept)

    @torch.no_grad()
    def forward(self) -> Stream:
        """One step. What the MoE wrote is still to be added where reads do that; then it is the next layer's work."""
        is_decode, start = self.new == 1, self.shape.keys - self.new
        spans = Spans.build((self.new,) * self.batch, (start,) * self.batch, device=self.place)
        lengths = self.lengths if is_decode else None
        cache = CacheMap(self.slots, self.rows, self.table, PAGE, self.views, lengths=lengths)
        ctx = ForwardContext(self.tokens, spans, cache, num_decodes=self.batch if is_decode else 0)
        stream = Stream(self.prefix, tuple(self.bank.unbind(0)), self.update, self.bank)
        return self.second.feed(self.second.attend(self.first.attend(stream, ctx), ctx), ctx)

    @torch.no_grad()
    def picks(self) -> Tensor:
        """Experts that the step's tokens pick, in order of their numbers: [T, A]."""
        seen: list[Tensor] = []
        choose = self.moe.gate.choose

        def watch(logits: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
            ids, weights = choose(logits, ctx)
            seen.append(ids)
            return ids, weights

        self.moe.gate.choose = watch  # type: ignore[method-assign]
        try:
            self()
        finally:
            self.moe.gate.choose = choose  # type: ignore[method-assign]
        return seen[0].sort(-1).values

    def num_hit(self) -> int:
        """Different ones among `picks`."""
        return len(set(self.picks().flatten().tolist()))

    def bytes_by_part(self) -> dict[str, int]:
        """What a step has to move, part by part."""
        config, kda, mla = self.shape.config, self.first.self_attn, self.second.self_attn
        size = 3 * config.expert_width * config.expert_intermediate_size
        experts = self.num_hit() * (size // 2 + size // 32)
        kv = self.views.kv[0]
        moe = sum(p.numel() * p.element_size() for p in self.moe.parameters())
        return {
            "KDA weights": _bytes(kda),
            "KDA states": 2 * self.batch * self.views.recurrent[0][0].numel() * self.views.recurrent[0].element_size(),
            "MLA weights": _bytes(mla),
            "keys": self.batch * self.shape.keys * kv.shape[-1] * kv.element_size(),
            "MoE weights beside experts": moe,
            "experts hit": experts,
        }


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@torch.no_grad()
def _fill(module: nn.Module, shape: SliceShape) -> None:
    """Random weights that keep every activation near 1; experts beyond the resident ones are never picked."""
    for one in module.modules():
        if isinstance(one, RMSNorm):
            one.weight.fill_(1.0)
        elif isinstance(one, Experts):
            for name in ("w1", "w2", "w3"):
                getattr(one, f"{name}_packed").random_(0, 256)
                getattr(one, f"{name}_scale").random_(117, 123)
        elif isinstance(one, KDA):
            one.A_log.normal_(0.0, 0.3)
            one.dt_bias.normal_(-3.0, 1.0)
        elif isinstance(one, Router):
            one.weight.normal_(0.0, 0.02)
            one.e_score_correction_bias.normal_(0.0, 0.1)
            one.e_score_correction_bias[shape.config.num_experts :] = -10.0
        elif not isinstance(one, KDA | MLA):
            for parameter in one.parameters(recurse=False):
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)


@contextmanager
def forced(*ops: str) -> Iterator[None]:
    """The references of these operations (`all` of them) within."""
    try:
        with set_environment(SWITCH, ",".join(ops)):
            kernels_for.cache_clear()
            yield
    finally:
        kernels_for.cache_clear()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rung computed: the running sum [T, D] in float64, and its picks."""

    out: Tensor
    picks: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """A measured rung. error: of the running sum, against the first rung's, of the tokens that pick the same experts
    there; flipped: how many do not. Rounding tips near ties over, and another expert is another answer."""

    name: str
    time_us: float
    share: float
    error: float
    flipped: int


def climb(
    one: Slice, rung: Rung, bytes_per_s: float, measure: Measure, against: Seen | None = None
) -> tuple[Step, Seen]:
    """(the measured rung, what it computed, for others to be held `against`). share: of the roofline, which is
    `bytes_by_part` over `bytes_per_s`."""
    with forced(*rung.forced):
        one.prepare(rung)
        one.restore()
        out = one().settled().prefix
        assert out is not None
        wide = out.double()
        one.restore()
        seen = Seen(wide, one.picks())
        floor_us = 1e6 * sum(one.bytes_by_part().values()) / bytes_per_s
        one.restore()
        time_us = measure(one, rung.is_captured)
    if against is None:
        return Step(rung.name, time_us, floor_us / time_us, 0.0, 0), seen
    same = (seen.picks == against.picks).all(-1)
    exact = against.out[same]
    gap = float((seen.out[same] - exact).norm() / exact.norm()) if len(exact) else 0.0
    return Step(rung.name, time_us, floor_us / time_us, gap, int((~same).sum())), seen
