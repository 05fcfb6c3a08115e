"""The MTP layer: names, the zeroed first embedding, the recurrence, and the whole against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.spans import Spans
from baltoro.model.build import new_model
from baltoro.model.cache_map import CacheMap
from baltoro.model.context import ForwardContext, train_context
from baltoro.model.decoder import K3Model
from baltoro.model.mtp import MTPLayer, predict_ahead
from baltoro.model.state import CacheViews
from tests.tiny import tiny_k3, tiny_kimi_linear

CONFIG = tiny_k3(num_mtp_layers=2, vision=None)
LENGTHS = (5, 1, 8)
NUM_TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def model() -> K3Model:
    return new_model(CONFIG, dtype=torch.float64, seed=2, std=0.25, decay="slow")


@pytest.fixture
def ctx() -> ForwardContext:
    return train_context(ids(11), LENGTHS)


def ids(seed: int) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))


def state(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((NUM_TOKENS, CONFIG.hidden_size), generator=generator, dtype=torch.float64)


def layer_of(model: K3Model, index: int = 0) -> MTPLayer:
    layer = model.model.layers[CONFIG.num_layers + index]
    assert isinstance(layer, MTPLayer)
    return layer


def test_names_are_the_published_ones_behind_the_decoder_layers(model: K3Model) -> None:
    prefix = f"model.layers.{CONFIG.num_layers + 1}."
    names = {name.removeprefix(prefix) for name in model.state_dict() if name.startswith(prefix)}
    own = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
    layer = {"input_layernorm", "post_attention_layernorm"}
    attention = {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"}
    attention |= {"g_proj", "o_proj"}
    experts = {"gate", "routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj"}
    experts |= {f"shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    expected = {f"{name}.weight" for name in own | layer | {f"self_attn.{name}" for name in attention}}
    expected |= {f"block_sparse_moe.{name}.weight" for name in experts}
    expected |= {f"block_sparse_moe.{name}" for name in ("gate.e_score_correction_bias",)}
    expected |= {f"block_sparse_moe.experts.{name}" for name in ("w1", "w2", "w3")}
    assert names == expected
    assert f"model.layers.{CONFIG.num_layers + 2}.enorm.weight" not in model.state_dict()


def test_shapes(model: K3Model, ctx: ForwardContext) -> None:
    layer = layer_of(model)
    assert layer.eh_proj.weight.shape == (40, 80)
    assert layer.embed_tokens.weight.shape == layer.shared_head.head.weight.shape == (131, 40)
    logits, hidden = layer.predict(ctx, state(0), ids(1))
    assert logits.shape == (NUM_TOKENS, 131)
    assert hidden.shape == (NUM_TOKENS, 40)


def test_only_wanted_rows_get_logits(model: K3Model, ctx: ForwardContext) -> None:
    layer, rows = layer_of(model), torch.tensor([4, 13])
    some = ForwardContext(ctx.tokens, ctx.spans, logit_rows=rows, is_training=True)
    logits, hidden = layer.predict(some, state(0), ids(1))
    every, same = layer.predict(ctx, state(0), ids(1))
    torch.testing.assert_close(logits, every[rows])
    assert torch.equal(hidden, same)


def test_embedding_comes_first_and_is_zero_at_position_0(model: K3Model, ctx: ForwardContext) -> None:
    layer, hidden = layer_of(model), state(0)
    entered = layer.enter(ctx, hidden, ids(1))
    from_embedding, from_hidden = layer.eh_proj.weight.split(40, dim=1)
    without = layer.hnorm(hidden) @ from_hidden.T
    starts = [0, 5, 6]
    assert torch.equal(ctx.spans.positions[starts], torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(entered[starts], without[starts])
    added = layer.enorm(layer.embed_tokens.weight[ids(1)]) @ from_embedding.T
    rest = [row for row in range(NUM_TOKENS) if row not in starts]
    torch.testing.assert_close((entered - without)[rest], added[rest])
    # a second step has moved every row off position 0
    torch.testing.assert_close(layer.enter(ctx, hidden, ids(1), step=1) - without, added)


def test_prediction_equals_plain_formulas(model: K3Model, ctx: ForwardContext) -> None:
    layer, hidden, following = layer_of(model, 1), state(3), ids(4)
    logits, out = layer.predict(ctx, hidden, following)
    first = 0
    for length in LENGTHS:
        rows = slice(first, first + length)
        want_logits, want = plain(dict(layer.named_parameters()), hidden[rows], following[rows])
        torch.testing.assert_close(out[rows], want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(logits[rows], want_logits, rtol=1e-10, atol=1e-10)
        first += length


def plain(w: dict[str, Tensor], hidden: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """One document through one MTP layer: token by token, head by head, expert by expert."""
    eps, c = CONFIG.rms_norm_eps, CONFIG

    def norm(x: Tensor, name: str, eps: float = eps) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T

    def situ(gate: Tensor, up: Tensor) -> Tensor:
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)

    embedding = w["embed_tokens.weight"][following].clone()
    embedding[0] = 0
    h = product(torch.cat([norm(embedding, "enorm"), norm(hidden, "hnorm")], dim=-1), "eh_proj")

    x = norm(h, "input_layernorm")
    q = product(norm(product(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", c.mla_norm_eps), "self_attn.q_b_proj")
    row = product(x, "self_attn.kv_a_proj_with_mqa")
    latent, shared = (
        norm(row[:, : c.kv_lora_rank], "self_attn.kv_a_layernorm", c.mla_norm_eps),
        row[:, c.kv_lora_rank :],
    )
    expanded = product(latent, "self_attn.kv_b_proj")
    attended = torch.zeros(len(x), c.num_heads * c.v_head_dim, dtype=x.dtype)
    per_head = c.qk_nope_head_dim + c.v_head_dim
    for head in range(c.num_heads):
        mine = expanded[:, head * per_head : (head + 1) * per_head]
        key = torch.cat([mine[:, : c.qk_nope_head_dim], shared], dim=-1)
        for t in range(len(x)):
            query = q[t, head * c.qk_head_dim : (head + 1) * c.qk_head_dim]
            weights = torch.softmax(key[: t + 1] @ query / math.sqrt(c.qk_head_dim), dim=0)
            attended[t, head * c.v_head_dim : (head + 1) * c.v_head_dim] = weights @ mine[: t + 1, c.qk_nope_head_dim :]
    h = h + product(attended * torch.sigmoid(product(x, "self_attn.g_proj")), "self_attn.o_proj")

    x, moe = norm(h, "post_attention_layernorm"), "block_sparse_moe."
    scores = torch.sigmoid(product(x, moe + "gate"))
    z, summed = product(x, moe + "routed_expert_down_proj"), []
    for t in range(len(x)):
        best = torch.topk(scores[t] + w[moe + "gate.e_score_correction_bias"], c.num_active_experts).indices
        share = scores[t, best] / scores[t, best].sum() * c.routed_scaling_factor
        w1, w2, w3 = (w[f"{moe}experts.w{i}"] for i in (1, 2, 3))
        summed.append(sum(share[j] * (w2[e] @ situ(w1[e] @ z[t], w3[e] @ z[t])) for j, e in enumerate(best)))
    routed = product(norm(torch.stack(summed), moe + "routed_expert_norm"), moe + "routed_expert_up_proj")
    gate, up = (product(x, f"{moe}shared_experts.{name}_proj") for name in ("gate", "up"))
    h = h + routed + product(situ(gate, up), moe + "shared_experts.down_proj")
    return product(norm(h, "shared_head.norm"), "shared_head.head"), h


def test_later_steps_go_on_from_the_hidden_state_and_take_turns_of_layers(model: K3Model, ctx: ForwardContext) -> None:
    layers = model.model.layers[CONFIG.num_layers :]
    following = (ids(1), ids(2), ids(3))
    got = predict_ahead(layers, ctx, state(0), following)
    hidden = state(0)
    for step, index in enumerate((0, 1, 0)):
        logits, hidden = layer_of(model, index).predict(ctx, hidden, following[step], step=step)
        assert torch.equal(got[step], logits)
    assert not torch.allclose(got[0], got[2])


def test_decoder_does_not_run_mtp_layers(ctx: ForwardContext) -> None:
    plain_model = new_model(CONFIG, dtype=torch.float64, seed=2, std=0.25, decay="slow")
    before = plain_model(ctx)
    with torch.no_grad():
        for weight in layer_of(plain_model).parameters():
            weight.fill_(math.nan)
    assert torch.equal(before, plain_model(ctx))


def test_gradient_reaches_every_trained_tensor_and_the_target(model: K3Model, ctx: ForwardContext) -> None:
    target = model.hidden(ctx)
    target.retain_grad()
    logits, _ = layer_of(model).predict(ctx, target, ids(1))
    F.cross_entropy(logits, ids(2)).backward()
    for name, weight in layer_of(model).named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None and float(weight.grad.abs().max()) > 0, name
    assert target.grad is not None and bool((target.grad.abs().amax(dim=1) > 0).all())
    model.zero_grad(set_to_none=True)


def test_kimi_linear_has_the_same_mtp_layer() -> None:
    config = tiny_kimi_linear(num_mtp_layers=1)
    small = new_model(config, dtype=torch.float64, seed=1, std=0.2, decay="slow")
    layer = small.model.layers[config.num_layers]
    ctx = train_context(ids(11), LENGTHS)
    logits, hidden = layer.predict(ctx, small.hidden(ctx), ids(1))
    assert logits.shape == (NUM_TOKENS, config.vocab_size)
    assert bool(hidden.isfinite().all())


def test_rows_that_do_not_fit_and_caches_are_refused(model: K3Model, ctx: ForwardContext) -> None:
    layer = layer_of(model)
    with pytest.raises(ShapeError, match="hidden rows"):
        layer.predict(ctx, state(0)[:-1], ids(1))
    with pytest.raises(ShapeError, match="next tokens"):
        layer.predict(ctx, state(0), ids(1)[:-1])
    nothing = torch.zeros(1, dtype=torch.int64)
    cache = CacheMap(nothing, nothing, nothing[None], 4, CacheViews((), (), ()))
    cached = ForwardContext(torch.zeros(1, dtype=torch.int64), Spans.build((1,)), cache=cache)
    with pytest.raises(ShapeError, match="cache"):
        layer.predict(cached, state(0)[:1], ids(1)[:1])
