"""Names: the tables of spec/k3.md section 2, the published index, and K3Model's own parameters."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from baltoro.errors import ConfigError
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.names import CONFIG_DTYPES, TensorSpec, param_specs, tensor_specs
from tests.tiny import tiny_k3, tiny_kimi_linear

CONFIGS: dict[str, K3Config] = {
    "k3": tiny_k3(),
    "packed": tiny_k3(are_experts_packed=True),
    "float64": tiny_k3(dtype="float64"),
    "bfloat16": tiny_k3(dtype="bfloat16"),
    "mtp": tiny_k3(num_mtp_layers=2, num_layers=6, mla_layers=(3, 5), moe_layer_freq=5),
    "tied": tiny_k3(tie_word_embeddings=True, vision=None),
    "few-options": tiny_k3(has_mla_gate=False, q_lora_rank=None, attn_res_block_size=None, has_latent_norm=False),
    "dense": tiny_k3(num_experts=0, num_active_experts=0),
    "no-shared": tiny_k3(num_shared_experts=0, latent_size=None),
    "kimi-linear": tiny_kimi_linear(),
}


def by_name(config: K3Config, *, packed: bool | None = None) -> dict[str, TensorSpec]:
    specs = list(tensor_specs(config, packed=packed))
    named = {spec.name: spec for spec in specs}
    assert len(named) == len(specs), "a name twice"
    return named


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_parameters_are_those_of_the_model(config: K3Config) -> None:
    words = {getattr(torch, name): word for name, word in CONFIG_DTYPES.items()} | {torch.uint8: "uint8"}
    model = K3Model(config, getattr(torch, config.dtype), "meta")
    theirs = {name: (tuple(t.shape), words[t.dtype]) for name, t in model.state_dict().items()}
    assert {spec.param: (spec.shape, spec.dtype) for spec in param_specs(config)} == theirs


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_place_is_filled_by_exactly_one_tensor(config: K3Config) -> None:
    places = Counter((spec.param, spec.index) for spec in by_name(config).values())
    assert set(places.values()) == {1}
    expected = {
        (spec.param, index)
        for spec in param_specs(config)
        for index in ([None] if spec.num_experts is None else range(spec.num_experts))
    }
    assert set(places) == expected


def test_count_formula_of_the_spec() -> None:
    config = tiny_k3(are_experts_packed=True)
    layers, kda, mla, dense, experts = 7, 4, 3, 1, 11
    moe = layers - dense
    text = 5 + 8 * layers + 12 * kda + 6 * mla + 3 * dense + (8 + 6 * experts) * moe
    assert len(by_name(config)) == text + 3 + 6 * 2 + 3


def test_a_log_is_padded_to_head_dim_and_accepted_in_every_known_form() -> None:
    spec = by_name(tiny_k3())["language_model.model.layers.0.self_attn.A_log"]
    assert (spec.shape, spec.param_shape, spec.dtype) == ((8,), (3,), "fp32")
    assert [spec.accepts(s) for s in [(3,), (8,), (99,), (1, 1, 3, 1)]] == [True] * 4
    assert [spec.accepts(s) for s in [(2,), (3, 1), (1, 1, 4, 1), (1, 3, 1, 1)]] == [False] * 4


def test_a_log_of_more_heads_than_channels_is_not_cut() -> None:
    spec = by_name(tiny_k3(kda_num_heads=9))["language_model.model.layers.0.self_attn.A_log"]
    assert (spec.shape, spec.param_shape) == ((9,), (9,))


def test_a_log_of_kimi_linear_keeps_its_broadcast_dimensions() -> None:
    spec = by_name(tiny_kimi_linear())["model.layers.0.self_attn.A_log"]
    assert (spec.shape, spec.param_shape) == ((1, 1, 3, 1), (3,))


def test_only_a_log_may_have_another_shape_than_the_table() -> None:
    spec = by_name(tiny_k3())["language_model.model.layers.0.self_attn.dt_bias"]
    assert spec.accepts((24,)) and not spec.accepts((25,)) and not spec.accepts((1, 1, 24, 1))


def test_experts_are_stacked_in_the_model_and_single_in_the_file() -> None:
    named = by_name(tiny_k3(), packed=True)
    spec = named["language_model.model.layers.2.block_sparse_moe.experts.10.w2.weight_packed"]
    assert (spec.param, spec.index) == ("model.layers.2.block_sparse_moe.experts.w2_packed", 10)
    assert (spec.shape, spec.dtype, spec.rule) == ((32, 32), "uint8", "expert")
    assert named[spec.name.replace("packed", "scale")].shape == (32, 2)


def test_packed_overrides_the_config() -> None:
    dense = by_name(tiny_k3(are_experts_packed=True), packed=False)
    assert dense.keys() == by_name(tiny_k3()).keys()
    with pytest.raises(ConfigError, match="multiples of 32"):
        by_name(tiny_k3(latent_size=40), packed=True)


def test_mtp_layers_have_their_own_embedding_and_head_and_no_residual_mix() -> None:
    config = tiny_k3(num_mtp_layers=1)
    at = "language_model.model.layers.7."
    names = {name.removeprefix(at) for name in by_name(config) if name.startswith(at)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight"} <= names
    assert not [name for name in names if "_res_" in name]
    assert by_name(config).keys() - by_name(tiny_k3()).keys() == {at + name for name in names}


def test_ranks_share_parameters_by_head_row_and_expert() -> None:
    config = tiny_k3(are_experts_packed=True, num_mtp_layers=1)
    expected = {
        ("heads", 3): "q_proj k_proj v_proj q_conv1d k_conv1d v_conv1d f_b_proj b_proj A_log dt_bias g_proj",
        ("head_cols", 3): "o_proj",
        ("heads", 5): "q_b_proj kv_b_proj g_proj",
        ("head_cols", 5): "o_proj",
        ("rows", None): "embed_tokens lm_head head gate_proj up_proj",
        ("cols", None): "down_proj",
        ("expert", None): "w1_packed w1_scale w2_packed w2_scale w3_packed w3_scale",
    }
    found: dict[tuple[str, int | None], set[str]] = {}
    for spec in param_specs(config):
        if spec.rule != "replicated":
            name = spec.param.removesuffix(".weight").rpartition(".")[2]
            found.setdefault((spec.rule, spec.num_heads), set()).add(name)
    assert found == {rule: set(names.split()) for rule, names in expected.items()}
    low_rank = [spec for spec in param_specs(tiny_kimi_linear()) if ".g_" in spec.param]
    assert {spec.param.split(".")[-2]: spec.rule for spec in low_rank} == {
        "g_a_proj": "replicated",
        "g_b_proj": "heads",
    }


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ConfigError, match="'int8' is not one of bfloat16"):
        list(param_specs(tiny_k3(dtype="int8")))


@pytest.mark.slow
def test_names_of_the_published_index(k3_data: Path) -> None:
    with gzip.open(k3_data / "model.safetensors.index.json.gz", "rt") as file:
        index: dict[str, Any] = json.load(file)
    specs = by_name(K3Config.load(k3_data))
    assert specs.keys() == index["weight_map"].keys()
    assert len(specs) == 497_220
    assert sum(spec.num_bytes for spec in specs.values()) == index["metadata"]["total_size"] == 1_560_860_324_864
    assert Counter(spec.group for spec in specs.values()) == {
        "globals": 5, "layer": 744, "kda": 828, "mla": 144, "dense": 3, "moe": 92 * 8, "experts": 92 * 6 * 896,
        "vision": 165, "projector": 3,
    }  # fmt: skip


@pytest.mark.slow
def test_parameters_of_the_published_model(k3_data: Path) -> None:
    config = K3Config.load(k3_data)
    theirs = {name: tuple(t.shape) for name, t in K3Model(config, torch.bfloat16, "meta").state_dict().items()}
    assert {spec.param: spec.shape for spec in param_specs(config)} == theirs
