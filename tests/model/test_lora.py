"""Adapters beside the base: nothing for a zero one, the merged model's output for any other, on every module type."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from baltoro.errors import ConfigError, WeightsError
from baltoro.model.adapter import Adapter
from baltoro.model.adapter_names import AdapterSite, adapter_sites
from baltoro.model.build import new_model
from baltoro.model.context import ForwardContext, train_context
from baltoro.model.decoder import K3Model
from baltoro.model.lora import AdapterBank, add_adapters, merge_adapter
from tests.model.adapters import random_adapter, without_b
from tests.model.harness import Harness, random_tokens
from tests.tiny import tiny_k3, tiny_kimi_linear

F64 = torch.float64
CONFIGS = {"k3": tiny_k3(vision=None), "kimi_linear": tiny_kimi_linear()}
# a picker of sites for each kind of module; together they are all
KINDS = {
    "kda q k v": r"(q|k|v)_proj",
    "kda gate": r"(f_a|f_b|b)_proj",
    "output gate": r"(g|g_a|g_b)_proj",
    "o": r"o_proj",
    "mla query": r"(q_a|q_b)_proj",
    "mla kv_a": r"kv_a_proj_with_mqa",
    "mla kv_b": r"kv_b_proj",
    "mlp": r"(gate|up|down)_proj",
    "latent": r"routed_expert_\w+",
    "experts": r"experts",
}


def _is_kind(site: AdapterSite, kind: str) -> bool:
    last = site.module.rpartition(".")[2]
    if kind == "experts" or site.num_experts is not None:
        return kind == "experts" and site.num_experts is not None
    return re.fullmatch(KINDS[kind], last) is not None


@cache
def _model(name: str, dtype: torch.dtype = F64, *, packed: bool = False) -> K3Model:
    config = CONFIGS[name].with_(are_experts_packed=packed)
    return new_model(config, dtype=dtype, seed=3, std=0.1, decay="slow")


def _with_bank(name: str, dtype: torch.dtype = F64, *, packed: bool = False) -> tuple[K3Model, AdapterBank]:
    model = copy.deepcopy(_model(name, dtype, packed=packed))
    return model, add_adapters(model, 3, 6)


def _packed_run(model: K3Model, lengths: tuple[int, ...], adapters: tuple[int, ...] | None) -> torch.Tensor:
    tokens = torch.tensor(random_tokens(sum(lengths), model.config.vocab_size))
    ctx = train_context(tokens, lengths, adapters=adapters)
    with torch.no_grad():
        return model(ForwardContext(ctx.tokens, ctx.spans, adapters=adapters))


def test_every_linear_layer_is_of_one_kind() -> None:
    for config in CONFIGS.values():
        for site in adapter_sites(config).values():
            assert sum(_is_kind(site, kind) for kind in KINDS) == 1, site


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "packed"),
    [("k3", torch.float32, False), ("k3", torch.bfloat16, True), ("kimi_linear", torch.float32, False)],
)
def test_a_zero_adapter_changes_no_bit(name: str, dtype: torch.dtype, packed: bool, merged: bool) -> None:
    """At all sites at once: training form, cached prefill, decode, mixed with other rows; spec/training.md B.2.1."""
    model, bank = _with_bank(name, dtype, packed=packed)
    bank.install(2, without_b(random_adapter(model.config, 5)))
    model = model.merge() if merged else model
    without = _packed_run(model, (9, 30, 5), None)
    assert torch.equal(_packed_run(model, (9, 30, 5), (2, 0, 2)), without)
    assert torch.equal(_packed_run(model, (9, 30, 5), (2, 2, 2)), without)
    prompts = [random_tokens(12, model.config.vocab_size, seed=n) for n in range(2)]
    outs = []
    for slots in (None, (2, 0), (2, 2)):
        harness = Harness(model, 2)
        harness.adapters = slots
        steps = [[(0, prompts[0][:7]), (1, prompts[1][:9])], [(1, prompts[1][9:10]), (0, prompts[0][7:])]]
        outs.append(torch.cat([out for work in steps for out in harness.step(work)]))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_is_what_merging_it_would_be(name: str, kind: str) -> None:
    """Each kind of site alone; prefill, cached prefill and decode (absorbed kv_b); neighbours are not touched."""
    model, bank = _with_bank(name)
    adapter = random_adapter(model.config, 4, wants=lambda site: _is_kind(site, kind))
    if not adapter.factors:
        pytest.skip("this family has no such layer")
    bank.install(1, adapter)
    merged = copy.deepcopy(_model(name))
    merge_adapter(merged, adapter)
    prompt = random_tokens(40, model.config.vocab_size)
    wanted, base = Harness(merged, 1).run(0, prompt, (40,)), Harness(_model(name), 1).run(0, prompt, (40,))
    assert (wanted - base).abs().max() > 1e-4
    for is_merged in (False, True):
        model = model.merge() if is_merged else model
        for cuts in ((13, 20), (30, *(1,) * 10)):
            harness = Harness(model, 2)
            harness.adapters = (1, 0)
            torch.testing.assert_close(harness.run(0, prompt, cuts), wanted, atol=1e-11, rtol=0)
            torch.testing.assert_close(harness.run(1, prompt, cuts), base, atol=1e-11, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_several_adapters_and_ranks_do_not_mix(packed: bool) -> None:
    model, bank = _with_bank("k3", packed=packed)
    for slot, rank in ((1, 1), (2, 6), (3, 3)):
        bank.install(slot, random_adapter(model.config, rank, seed=slot))
    lengths, slots = (7, 20, 3, 11, 1), (3, 1, 0, 2, 1)
    together = _packed_run(model, lengths, slots)
    tokens = torch.tensor(random_tokens(sum(lengths), model.config.vocab_size)).split(lengths)
    for part, length, slot, out in zip(tokens, lengths, slots, together.split(lengths), strict=True):
        ctx = train_context(part, (length,), adapters=(slot,))
        with torch.no_grad():
            torch.testing.assert_close(model(ctx), out, atol=1e-11, rtol=0)


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_the_error_does_not_grow_with_the_rank(rank: int) -> None:
    """fp32 beside fp32 against a float64 merge; spec/training.md B.2.2."""
    model = copy.deepcopy(_model("k3", torch.float32))
    adapter = random_adapter(model.config, rank, std=0.1 / rank**0.25, alpha=rank)
    add_adapters(model, 1, 32).install(1, adapter)
    merged = copy.deepcopy(model).to(F64)
    merged.dtype = F64
    merge_adapter(merged, adapter)
    got, wanted = _packed_run(model, (60,), (1,)).double(), _packed_run(merged, (60,), None)
    change = (wanted - _packed_run(_model("k3", torch.float32), (60,), None)).abs().max()
    assert change > 0.05
    assert (got - wanted).abs().max() < 2e-4 * change


def test_each_expert_gets_its_own_factors() -> None:
    """B of expert e is a constant of its own, and so is the change of a token that is sent there; B.2.9."""
    from baltoro.kernels.lora.experts import ExpertDelta, ExpertFactors
    from baltoro.kernels.lora.rows import AdapterRows
    from baltoro.kernels.moe.experts import expert_product
    from baltoro.kernels.moe.products import ExpertWeights

    num, width, hidden, rank = 5, 4, 6, 3
    zero = ExpertWeights(
        torch.zeros(num, hidden, width), torch.zeros(num, hidden, width), torch.zeros(num, width, hidden)
    )
    scale, mark = torch.ones(1), torch.arange(1.0, num + 1)
    z = torch.ones(20, width)
    ids = torch.randint(0, num, (20, 1), generator=torch.Generator().manual_seed(0))
    rows = AdapterRows.build((1,), (20,))
    assert rows is not None

    def factors(a: torch.Tensor, b: torch.Tensor) -> ExpertFactors:
        return ExpertFactors(a.unsqueeze(0), b.unsqueeze(0), scale, {1})

    ones = factors(torch.ones(1, rank, width), torch.ones(num, hidden, rank))
    marked = factors(torch.ones(1, rank, width), torch.ones(num, hidden, rank) * mark.view(-1, 1, 1))
    out = factors(torch.ones(num, rank, hidden), torch.ones(1, width, rank))
    marked_out = factors(torch.ones(num, rank, hidden) * mark.view(-1, 1, 1), torch.ones(1, width, rank))
    for w1, w3, w2 in ((marked, ones, out), (ones, marked, out), (ones, ones, marked_out)):
        y = expert_product(
            z, ids, torch.ones(20, 1), zero, activation=lambda gate, up: gate * up, delta=ExpertDelta(w1, w3, w2, rows)
        )
        base = (rank * width) ** 2 * hidden * rank
        assert torch.equal(y, (base * mark[ids[:, 0]]).unsqueeze(1).expand(-1, width))


@pytest.mark.parametrize("form", ["gathered", "grouped"])
def test_gradients_of_factors_are_those_of_the_merged_weight(form: str) -> None:
    """Plain parameters of the bank, through the whole model: dW of W + scale B A, carried on to A and B."""
    model, bank = _with_bank("k3")
    adapter = random_adapter(model.config, 3, dtype=F64)
    bank.install(1, adapter)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in bank.parameters():
        parameter.requires_grad_(True)
    lengths = (3, 5) if form == "gathered" else (30, 11)
    tokens = torch.tensor(random_tokens(sum(lengths), model.config.vocab_size))
    model(train_context(tokens, lengths, adapters=(1, 1))).square().mean().backward()
    merged = copy.deepcopy(_model("k3"))
    merge_adapter(merged, adapter)
    merged(train_context(tokens, lengths)).square().mean().backward()
    params = dict(merged.named_parameters())
    for module, one in adapter.factors.items():
        factors = bank.factors[module]
        weight = params.get(f"{module}.weight", params.get(module))
        assert weight is not None and weight.grad is not None, module
        assert factors.a.grad is not None and factors.b.grad is not None, module
        d_b = one.scale * (weight.grad @ one.a.transpose(-1, -2))
        d_a = one.scale * (one.b.transpose(-1, -2) @ weight.grad)
        for got, wanted, whole in (
            (factors.a.grad[0, ..., :3, :], d_a, one.a),
            (factors.b.grad[0, ..., :3], d_b, one.b),
        ):
            wanted = wanted.sum(0, keepdim=True) if wanted.dim() == 3 and whole.shape[0] == 1 else wanted
            torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-8)
        assert wanted.abs().max() > 0


def test_a_base_looks_the_same_with_a_bank() -> None:
    model, _ = _with_bank("k3")
    assert model.state_dict().keys() == _model("k3").state_dict().keys()
    assert len(list(model.parameters())) == len(list(_model("k3").parameters()))


def test_a_slot_is_replaced_in_place() -> None:
    model, bank = _with_bank("k3")
    places = [p.data_ptr() for p in bank.parameters()]
    bank.install(1, random_adapter(model.config, 6))
    small = random_adapter(model.config, 2, seed=5, wants=lambda site: _is_kind(site, "o"))
    bank.install(1, small)
    assert [p.data_ptr() for p in bank.parameters()] == places
    fresh, other = _with_bank("k3")
    other.install(1, small)
    assert torch.equal(_packed_run(model, (20,), (1,)), _packed_run(fresh, (20,), (1,)))
    read = bank.read(1, small)
    assert all(torch.equal(read.factors[m].b.float(), f.b) for m, f in small.factors.items())


def test_what_does_not_fit_is_refused() -> None:
    model, bank = _with_bank("k3")
    with pytest.raises(WeightsError, match="rank 7, slots hold 6"):
        bank.install(1, random_adapter(model.config, 7))
    bank = add_adapters(model, 1, 4, has_experts=False)
    with pytest.raises(WeightsError, match=r"experts\.w1 .*lora_experts"):
        bank.install(1, random_adapter(model.config, 2))
    with pytest.raises(ConfigError, match="at least 1"):
        add_adapters(model, 0, 4)


def test_merging_into_a_quantised_base_is_refused_with_the_reason() -> None:
    model = copy.deepcopy(_model("k3", packed=True))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError, match="keeps about a tenth"):
        merge_adapter(model, random_adapter(model.config, 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_step_without_adapters_takes_the_base_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of an adapter is so much as looked at: slots of zero are no adapters."""
    model, bank = _with_bank("k3", torch.float32)
    bank.install(1, random_adapter(model.config, 6))

    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("baltoro.model.linear.Factors.add", fail)
    assert torch.equal(_packed_run(model, (9, 4), (0, 0)), _packed_run(_model("k3", torch.float32), (9, 4), None))


def test_a_wrong_number_of_slots_is_our_bug() -> None:
    from baltoro.errors import ShapeError

    with pytest.raises(ShapeError, match="2 adapter slots for 1 spans"):
        train_context(torch.tensor([1, 2]), (2,), adapters=(1, 1))


def test_keys_of_the_cache_are_expanded_through_their_readers_adapter() -> None:
    """Prefill spans that go on from a cache, of three requests in one step: kv_b sees more rows than the step has."""
    model, bank = _with_bank("k3")
    for slot in (1, 2):
        bank.install(slot, random_adapter(model.config, 3, seed=slot, wants=lambda site: _is_kind(site, "mla kv_b")))
    prompts = [random_tokens(n, model.config.vocab_size, seed=n) for n in (30, 41, 25)]
    together, slots = Harness(model, 3), (2, 0, 1)
    together.adapters = slots
    together.step([(n, prompt[:9]) for n, prompt in enumerate(prompts)])
    outs = together.step([(n, prompt[9:]) for n, prompt in enumerate(prompts)])
    for n, prompt in enumerate(prompts):
        alone = Harness(model, 1)
        alone.adapters = (slots[n],)
        torch.testing.assert_close(outs[n], alone.run(0, prompt, (len(prompt),))[9:], atol=1e-11, rtol=0)


def test_what_an_older_adapter_left_in_a_slot_counts_nowhere_in_fixed_form() -> None:
    """A slot that held factors everywhere gets an adapter of attention alone."""
    config = tiny_k3(vision=None, num_layers=4, mla_layers=(3,), are_experts_packed=True)
    model = new_model(config, dtype=torch.float64, seed=3, std=0.1)
    bank = add_adapters(model, 2, 3)
    bank.install(2, random_adapter(config, 3, seed=1, std=0.3, dtype=torch.float64))
    narrow = random_adapter(
        config, 2, seed=2, std=0.3, dtype=torch.float64, wants=lambda site: site.num_experts is None
    )
    dense = {module: one for module, one in narrow.factors.items() if ".self_attn." in module}
    bank.install(2, Adapter(narrow.settings, dense))
    by_rows = train_context(torch.arange(12), (5, 7), adapters=(0, 2))
    with torch.no_grad():
        torch.testing.assert_close(model(replace(by_rows, fixed_slots=2)), model(by_rows))
