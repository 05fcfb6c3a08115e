"""Adapters of PEFT on transformers' KimiLinear, both ways: theirs is served here, ours is loaded there.

Dense layers only: PEFT has no layout for routed experts that share a factor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baltoro.errors import WeightsError
from baltoro.model.adapter import CONFIG_NAME, Adapter, load_adapter, save_adapter
from baltoro.model.adapter_names import adapter_sites
from baltoro.model.build import new_model
from baltoro.model.decoder import K3Model
from baltoro.model.lora import add_adapters
from baltoro.model.weights import load_model, save_model
from tests.model.adapters import random_adapter
from tests.model.harness import Harness, random_tokens
from tests.tiny import tiny_kimi_linear

transformers = pytest.importorskip("transformers", reason="transformers is in the extra `dev`")
pytest.importorskip("accelerate", reason="peft needs it; both are in the extra `peers`")
peft = pytest.importorskip("peft", reason="peft is in the extra `peers`")
pytestmark = pytest.mark.slow

CONFIG = tiny_kimi_linear()
DENSE = {s.module: s for s in adapter_sites(CONFIG).values() if s.num_experts is None}
STD = 0.06  # of the base, as in test_against_transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_model(new_model(CONFIG, std=STD, decay="slow", seed=2), path)
    return path


def theirs(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def ours(folder: Path, adapter: Adapter) -> K3Model:
    model = load_model(folder, dtype=torch.float32)
    add_adapters(model, 2, adapter.rank + 1).install(2, adapter)
    return model.merge()


def logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def check_same(mine: K3Model, wanted: Tensor, base: Tensor, tokens: list[int]) -> None:
    """Prefill and decode, beside a row of the base."""
    harness = Harness(mine, 2)
    harness.adapters = (2, 0)
    assert (wanted - base).abs().max() > 0.1
    torch.testing.assert_close(harness.run(0, tokens, (20, *(1,) * 30)), wanted, atol=2e-5, rtol=0)
    torch.testing.assert_close(harness.run(1, tokens, (20, *(1,) * 30)), base, atol=2e-5, rtol=0)


def test_an_adapter_that_peft_saved_is_served(tmp_path: Path, folder: Path) -> None:
    targets = sorted({module.rpartition(".")[2] for module in DENSE})
    model, tokens = theirs(folder), random_tokens(50, CONFIG.vocab_size)
    base = logits(model, tokens)
    options = peft.LoraConfig(r=3, lora_alpha=9, target_modules=targets, rank_pattern={"o_proj": 5}, use_rslora=True)
    model = peft.get_peft_model(model, options).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(tmp_path)
    adapter = load_adapter(tmp_path, CONFIG)
    assert adapter.factors.keys() == DENSE.keys() and adapter.rank == 5
    check_same(ours(folder, adapter), logits(model, tokens), base, tokens)


def test_an_adapter_that_we_saved_is_loaded_by_peft(tmp_path: Path, folder: Path) -> None:
    adapter = random_adapter(CONFIG, 4, std=0.07, wants=lambda site: site.num_experts is None)
    save_adapter(adapter, tmp_path, CONFIG, is_theirs=True)
    model, tokens = theirs(folder), random_tokens(50, CONFIG.vocab_size)
    base = logits(model, tokens)
    model = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    check_same(ours(folder, adapter), logits(model, tokens), base, tokens)
    again = load_adapter(tmp_path, CONFIG)
    assert again.digest() == adapter.digest()


def test_our_config_is_read_with_its_own_field(tmp_path: Path) -> None:
    adapter = random_adapter(CONFIG, 2)
    save_adapter(adapter, tmp_path, CONFIG)
    assert "expert_layout" in json.loads((tmp_path / CONFIG_NAME).read_text())
    assert peft.LoraConfig.from_pretrained(tmp_path).r == 2
    with pytest.raises(WeightsError, match="no layout"):
        save_adapter(adapter, tmp_path, CONFIG, is_theirs=True)
