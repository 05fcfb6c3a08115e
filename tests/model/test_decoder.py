"""The whole model: cutting, packing, training and serving are one function of the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.spans import Spans
from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext, train_context
from baltoro.model.decoder import K3Model
from baltoro.model.names import tensor_specs
from baltoro.model.weights import load_model, save_model
from tests.model.harness import Harness, random_tokens
from tests.tiny import tiny_k3, tiny_kimi_linear

CONFIGS = {"k3": tiny_k3(), "k3-packed": tiny_k3(are_experts_packed=True), "kimi-linear": tiny_kimi_linear()}


@pytest.fixture(params=CONFIGS, scope="module")
def model(request: pytest.FixtureRequest) -> K3Model:
    return new_model(CONFIGS[request.param], dtype=torch.float64, std=0.2, decay="slow", seed=1)


def whole(model: K3Model, tokens: list[int]) -> Tensor:
    """Logits of one training-style forward."""
    with torch.no_grad():
        return model(train_context(torch.tensor(tokens), (len(tokens),)))


CUTS = [(), (1,), (2,), (63,), (64,), (65, 1, 1, 1), (100, 50), (7,) * 30, (149,), (1,) * 160]


@pytest.mark.parametrize("cuts", CUTS)
def test_any_cut_gives_the_logits_of_one_pass(model: K3Model, cuts: tuple[int, ...]) -> None:
    tokens = random_tokens(160, model.config.vocab_size)
    got = Harness(model, 1).run(0, tokens, cuts)
    torch.testing.assert_close(got, whole(model, tokens), atol=1e-9, rtol=0)


def test_packed_spans_equal_solo_runs(model: K3Model) -> None:
    prompts = [random_tokens(n, model.config.vocab_size, seed=n) for n in (70, 130, 5, 1)]
    harness = Harness(model, 4)
    got: list[list[Tensor]] = [[] for _ in prompts]
    schedule = [[(0, 33), (1, 64), (3, 1)], [(0, 1), (1, 40), (2, 4)], [(2, 1), (0, 36), (1, 26)]]
    done = [0] * 4
    for step in schedule:
        work = [(r, prompts[r][done[r] : done[r] + n]) for r, n in step]
        for (r, n), logits in zip(step, harness.step(work), strict=True):
            got[r].append(logits)
            done[r] += n
    for r, prompt in enumerate(prompts):
        torch.testing.assert_close(torch.cat(got[r]), whole(model, prompt), atol=1e-9, rtol=0)


def test_packed_training_documents_do_not_see_each_other(model: K3Model) -> None:
    a, b = random_tokens(37, model.config.vocab_size, 1), random_tokens(81, model.config.vocab_size, 2)
    packed = model(train_context(torch.tensor(a + b), (37, 81)))
    torch.testing.assert_close(packed[37:], whole(model, b), atol=1e-9, rtol=0)


def test_page_size_does_not_matter(model: K3Model) -> None:
    tokens = random_tokens(90, model.config.vocab_size)
    results = [Harness(model, 1, page_size=size).run(0, tokens, (50, 1, 1, 20)) for size in (1, 16, 64)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-10, rtol=0)


def test_a_lost_state_shows(model: K3Model) -> None:
    """The models used for these tests would show a state that was zeroed or left one span behind."""
    tokens = random_tokens(140, model.config.vocab_size)
    good = Harness(model, 1).run(0, tokens, (128,))
    for name in ("recurrent", "conv"):
        harness = Harness(model, 1)
        harness.run(0, tokens[:128], ())
        for view in getattr(harness.views, name):
            view.zero_()
        bad = torch.cat([harness.step([(0, [token])])[0] for token in tokens[128:]])
        assert (bad - good[128:]).abs().max() > 1e-2, name


def test_layer_0_ignores_its_attention_mix(model: K3Model) -> None:
    if model.config.attn_res_block_size is None:
        pytest.skip("plain residual")
    tokens = random_tokens(20, model.config.vocab_size)
    before = whole(model, tokens)
    layer = model.model.layers[0]
    saved = layer.self_attention_res_proj.weight.clone()
    with torch.no_grad():
        layer.self_attention_res_proj.weight.fill_(3.0)
        after = whole(model, tokens)
        layer.self_attention_res_proj.weight.copy_(saved)
    assert torch.equal(before, after)


def test_merged_projections_change_nothing(model: K3Model) -> None:
    tokens = random_tokens(70, model.config.vocab_size)
    before, names = whole(model, tokens), {name: tensor.clone() for name, tensor in model.tensors().items()}
    merged = new_model(model.config, dtype=torch.float64, std=0.2, decay="slow", seed=1).merge()
    torch.testing.assert_close(Harness(merged, 1).run(0, tokens, (64, 1, 1)), before, atol=1e-10, rtol=0)
    for name, tensor in merged.tensors().items():
        assert torch.equal(tensor, names[name]), name
    with torch.no_grad():
        merged.model.layers[0].self_attn.k_proj.weight.zero_()
    assert not torch.allclose(whole(merged, tokens), before), "weights written in place are not seen"


def test_logit_rows_pick_rows(model: K3Model) -> None:
    tokens = torch.tensor(random_tokens(9, model.config.vocab_size))
    rows = torch.tensor([8, 2])
    with torch.no_grad():
        all_rows = model(ForwardContext(tokens, Spans.build([9])))
        picked = model(ForwardContext(tokens, Spans.build([9]), logit_rows=rows))
    torch.testing.assert_close(picked, all_rows[rows], atol=1e-12, rtol=0)


def test_gradients_reach_every_trained_parameter() -> None:
    config = tiny_k3(vision=None)
    model = new_model(config, dtype=torch.float64, std=0.2, decay="slow")
    tokens = torch.tensor(random_tokens(150, config.vocab_size))
    model(train_context(tokens, (100, 50))).square().mean().backward()
    unused = {"model.layers.0.self_attention_res_norm.weight", "model.layers.0.self_attention_res_proj.weight"}
    silent = {n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())}
    assert silent == unused


@pytest.mark.parametrize("config", [tiny_k3(), tiny_kimi_linear()], ids=["k3", "kimi-linear"])
def test_bf16_stays_near_fp32(config: K3Config) -> None:
    """With every expert active: rounding also flips borderline picks of a random router, which is not an error."""
    config = config.with_(num_active_experts=config.num_experts)
    rounded = new_model(config, dtype=torch.bfloat16, std=0.1, decay="slow")
    reference = new_model(config, std=0.1, decay="slow")
    reference.load_state_dict(rounded.state_dict())
    tokens = random_tokens(80, config.vocab_size)
    exact, rough = whole(reference, tokens), whole(rounded, tokens).float()
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=-1).median() > 0.99


def test_contexts_that_cannot_be_are_refused() -> None:
    tokens = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeError, match="needs a cache"):
        ForwardContext(tokens, Spans.build([3], [5]))
    with pytest.raises(ShapeError, match="rows of spans"):
        ForwardContext(tokens, Spans.build([2]))
    with pytest.raises(ShapeError, match="length 1"):
        ForwardContext(tokens, Spans.build([3]), num_decodes=1)


def test_shared_mtp_embeddings_are_one_tensor_in_memory_and_file(tmp_path: Path) -> None:
    config = tiny_k3(num_mtp_layers=1, is_mtp_shared=True, vision=None)
    model = new_model(config, std=0.1)
    save_model(model, tmp_path)
    again = load_model(tmp_path, dtype=torch.float32)
    assert again.config == config
    layer = again.model.layers[config.num_layers]
    assert layer.embed_tokens.weight is again.model.embed_tokens.weight
    assert layer.shared_head.head.weight is again.lm_head.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not any("shared_head.head" in spec.name for spec in tensor_specs(config))
