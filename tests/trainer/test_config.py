"""Recipes: what is refused, and with which words; the recipes of the repository parse."""

from __future__ import annotations

from pathlib import Path

import pytest

from baltoro.config import load_config
from baltoro.errors import ConfigError
from baltoro.trainer.config import StageConfig, TrainConfig
from tests.trainer.harness import tiny_recipe

ROOT = Path(__file__).resolve().parents[2]
MIX = {"prose": 1.0}


def test_stage_of_a_step_follows_the_fractions() -> None:
    config = tiny_recipe(Path("data"))
    assert [config.stage_index(step) for step in range(7)] == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps"),
        ({"stages": ()}, "stages"),
        ({"stages": (StageConfig(until=0.5, max_length=8, mix=MIX),)}, "until"),
        ({"stages": (StageConfig(until=1.0, max_length=65, mix=MIX),)}, "max_length"),
        ({"stages": (StageConfig(until=1.0, max_length=8, mix={}),)}, "mix"),
        ({"stages": (StageConfig(until=1.0, max_length=8, mix={"prose": -1.0}),)}, "mix"),
    ],
)
def test_recipe_that_cannot_run_names_the_key(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_recipe(Path("data"), **changes)


def test_quantised_stage_needs_whole_blocks() -> None:
    model = tiny_recipe(Path("data")).model.with_(expert_intermediate_size=48)
    with pytest.raises(ConfigError, match="multiples of 32"):
        tiny_recipe(Path("data"), model=model)


@pytest.mark.parametrize(
    "path",
    sorted(set((ROOT / "recipes").glob("*.toml")) - set((ROOT / "recipes").glob("rl-*.toml"))),
    ids=lambda path: path.name,
)
def test_recipes_parse(path: Path) -> None:
    config = load_config(TrainConfig, path)
    assert config.data.builder is None or (ROOT / config.data.builder).is_file()


def test_mini_has_every_part_of_the_architecture() -> None:
    model = load_config(TrainConfig, ROOT / "recipes/mini.toml").model
    assert model.kda_num_heads != model.kda_head_dim
    assert model.mla_layers[-2:] == (model.num_layers - 2, model.num_layers - 1)
    assert model.attn_res_block_size is not None and model.num_layers / model.attn_res_block_size >= 3
    assert model.latent_size and model.has_latent_norm and model.num_shared_experts and model.first_dense_layers == 1
    assert model.q_lora_rank and model.has_mla_gate and model.is_kda_gate_full_rank and model.gate_lower_bound == -5.0
    assert model.vision is not None and model.num_mtp_layers == 1 and model.hidden_act == "situ"
