"""Adapter files: names of both spellings, one strict check, a round trip, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from baltoro.errors import WeightsError
from baltoro.model.adapter import (
    CONFIG_NAME,
    LAYOUT,
    LAYOUT_KEY,
    WEIGHTS_NAME,
    Adapter,
    adapter_from_bytes,
    adapter_from_tensors,
    load_adapter,
    save_adapter,
)
from baltoro.model.adapter_names import PEFT_PREFIX, adapter_sites, factor_name
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3, tiny_kimi_linear

CONFIG = tiny_k3()
FIELDS: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, LAYOUT_KEY: LAYOUT}
O_PROJ = "language_model.model.layers.0.self_attn.o_proj"


def same(one: Adapter, other: Adapter) -> bool:
    assert one.factors.keys() == other.factors.keys()
    pairs = [(f, other.factors[module]) for module, f in one.factors.items()]
    return all(torch.equal(x.a, y.a) and torch.equal(x.b, y.b) and x.scale == y.scale for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_saved_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = random_adapter(CONFIG, 3, dtype=dtype)
    save_adapter(adapter, tmp_path, CONFIG)
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
    assert all(
        name.startswith(f"{PEFT_PREFIX}language_model.model.layers.") for name in load_file(tmp_path / WEIGHTS_NAME)
    )
    loaded = load_adapter(tmp_path, CONFIG)
    assert same(loaded, adapter) and loaded.digest() == adapter.digest() and loaded.settings == adapter.settings


@pytest.mark.parametrize("prefix", ["", PEFT_PREFIX])
@pytest.mark.parametrize("root", ["", "language_model."])
def test_names_are_taken_with_and_without_prefixes(prefix: str, root: str) -> None:
    adapter = random_adapter(CONFIG, 3)
    wire = adapter.tensors(CONFIG)
    assert f"{O_PROJ}.lora_A.weight" in wire
    assert wire["language_model.model.layers.1.block_sparse_moe.experts.w2.lora_A.weight"].shape == (11, 3, 64)
    assert wire["language_model.model.layers.1.block_sparse_moe.experts.w2.lora_B.weight"].shape == (1, 32, 3)
    assert wire["language_model.model.layers.1.block_sparse_moe.experts.w3.lora_A.weight"].shape == (1, 3, 32)
    names = {prefix + root + name.removeprefix("language_model."): tensor for name, tensor in wire.items()}
    assert same(adapter_from_tensors(names, FIELDS, CONFIG), adapter)
    assert same(adapter_from_bytes(save(names), FIELDS, CONFIG), adapter)


def test_sites_are_every_linear_layer_of_the_issue() -> None:
    last = {(s.module.rpartition("layers.")[2].split(".", 1)[1]) for s in adapter_sites(CONFIG).values()}
    attention = {"q", "k", "v", "f_a", "f_b", "b", "g", "o", "q_a", "q_b", "kv_b"}
    moe = {"routed_expert_down_proj", "routed_expert_up_proj", "experts.w1", "experts.w2", "experts.w3"}
    assert last == (
        {f"self_attn.{name}_proj" for name in attention}
        | {"self_attn.kv_a_proj_with_mqa"}
        | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        | {f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
        | {f"block_sparse_moe.{name}" for name in moe}
    )
    packed = adapter_sites(CONFIG.with_(are_experts_packed=True))
    assert packed == adapter_sites(CONFIG)
    assert "model.layers.1.self_attn.g_b_proj" in adapter_sites(tiny_kimi_linear())
    assert adapter_sites(CONFIG.with_(num_mtp_layers=1)).keys() == adapter_sites(CONFIG).keys()


def good() -> dict[str, Tensor]:
    return random_adapter(CONFIG, 3, wants=lambda site: site.module.endswith("0.self_attn.o_proj")).tensors(CONFIG)


def test_errors_name_the_tensor() -> None:
    a, b = f"{O_PROJ}.lora_A.weight", f"{O_PROJ}.lora_B.weight"
    tensors = good()
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({}, "no tensors"),
        ({a: tensors[a]}, rf"{b} is missing"),
        (tensors | {"model.layers.0.self_attn.x_proj.lora_A.weight": tensors[a]}, r"x_proj\.lora_A"),
        (tensors | {f"{O_PROJ}.weight": tensors[a]}, r"o_proj\.weight"),
        (tensors | {PEFT_PREFIX + a: tensors[a]}, r"given twice: base_model\.model\..*lora_A"),
        (tensors | {a: tensors[a][:2]}, r"lora_A\.weight is \[2, 24\].*must be \[3, 24\]"),
        (tensors | {b: tensors[b].T.contiguous()}, r"lora_B\.weight is \[3, 40\].*must be \[40, 3\]"),
        (tensors | {b: tensors[b].to(torch.int32)}, r"lora_B\.weight is torch\.int32"),
        (tensors | {b: tensors[b] / 0}, r"lora_B\.weight has values that are not finite"),
    ]
    for given, words in cases:
        with pytest.raises(WeightsError, match=words):
            adapter_from_tensors(given, FIELDS, CONFIG)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "at least 1"),
        ({"r": "many"}, "needs numbers"),
        ({"lora_alpha": None}, "needs numbers"),
        ({"lora_alpha": float("nan")}, "finite"),
    ],
)
def test_a_config_that_means_another_formula_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        adapter_from_tensors(good(), FIELDS | fields, CONFIG)


def test_the_layout_of_experts_must_be_declared() -> None:
    """A packed layout that is guessed loads fine and maps experts wrongly; spec/training.md B.2.9."""
    adapter = random_adapter(CONFIG, 3, wants=lambda site: site.num_experts is not None)
    undeclared = {k: v for k, v in FIELDS.items() if k != LAYOUT_KEY}
    with pytest.raises(WeightsError, match="layout must be declared"):
        adapter_from_tensors(adapter.tensors(CONFIG), undeclared, CONFIG)
    per_expert = adapter.tensors(CONFIG)
    name = next(n for n in per_expert if n.endswith("w1.lora_A.weight"))
    per_expert[name] = per_expert[name].expand(11, -1, -1)
    with pytest.raises(WeightsError, match=r"w1\.lora_A\.weight is \[11, 3, 32\].*must be \[1, 3, 32\]"):
        adapter_from_tensors(per_expert, FIELDS, CONFIG)


def test_patterns_and_rank_stabilisation_are_pefts() -> None:
    config = tiny_kimi_linear()
    sites = adapter_sites(config)
    wide, narrow = sites["model.layers.0.self_attn.o_proj"], sites["model.layers.0.self_attn.q_proj"]
    tensors = {factor_name(wide, s): torch.ones(wide.shape(s, 9)) for s in "AB"}
    tensors |= {factor_name(narrow, s): torch.ones(narrow.shape(s, 4)) for s in "AB"}
    fields: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"o_proj": 9}}
    got = adapter_from_tensors(tensors, fields | {"alpha_pattern": {"layers.0.self_attn.q_proj": 2}}, config)
    assert (got.factors[wide.module].scale, got.factors[narrow.module].scale) == (8 / 9, 2 / 4)
    assert got.rank == 9
    got = adapter_from_tensors(tensors, fields | {"use_rslora": True}, config)
    assert got.factors[wide.module].scale == 8 / 3


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"no {CONFIG_NAME}"):
        load_adapter(tmp_path, CONFIG)
    (tmp_path / CONFIG_NAME).write_text("{")
    with pytest.raises(WeightsError, match=f"no {WEIGHTS_NAME}"):
        load_adapter(tmp_path, CONFIG)
    save_file(good(), tmp_path / WEIGHTS_NAME)
    with pytest.raises(WeightsError, match="not valid JSON"):
        load_adapter(tmp_path, CONFIG)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(FIELDS))
    load_adapter(tmp_path, CONFIG)
    data = (tmp_path / WEIGHTS_NAME).read_bytes()
    (tmp_path / WEIGHTS_NAME).write_bytes(data[:-8])
    with pytest.raises(WeightsError, match=r"cut short|spans|ends"):
        load_adapter(tmp_path, CONFIG)
    with pytest.raises(WeightsError, match="no safetensors file"):
        adapter_from_bytes(data[:-8], FIELDS, CONFIG)


def test_every_byte_counts_in_the_digest() -> None:
    adapter = random_adapter(CONFIG, 3)
    before = adapter.digest()
    one = next(iter(adapter.factors.values()))
    one.b.view(-1)[-1] += 1e-6
    assert adapter.digest() != before
