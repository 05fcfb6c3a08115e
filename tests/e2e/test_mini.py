"""The mini model of the box: its size, its parts, and what it was trained for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baltoro.llm import LLM
from baltoro.model.config import K3Config
from baltoro.protocol.sampling import SamplingParams
from scripts.data.check_mini import WORDINGS, check_sums

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "models/mini"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MINI, dtype="float32")


def test_the_folder_is_under_four_megabytes_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in MINI.iterdir()}
    assert sum(files.values()) < 4_000_000
    assert set(files) == {"README.md", "config.json", "model.safetensors", "tiktoken.model", "tokenizer_config.json"}


def test_it_is_the_model_of_the_recipe_packed_in_bf16() -> None:
    from baltoro.config import load_config
    from baltoro.trainer.config import TrainConfig

    recipe = load_config(TrainConfig, ROOT / "recipes/mini.toml").model
    assert K3Config.load(MINI) == recipe.with_(are_experts_packed=True, dtype="bfloat16")
    assert json.loads((MINI / "config.json").read_text())["model_type"] == "kimi_k3"


@pytest.mark.slow
@pytest.mark.parametrize(("thinking", "at_least"), [(True, 85), (False, 100)], ids=["thinking", "no thinking"])
def test_sums_of_digits_are_right_as_often_as_the_card_says(llm: LLM, thinking: bool, at_least: int) -> None:
    right, wrong = check_sums(llm, WORDINGS[0], thinking=thinking)
    assert right >= at_least, wrong


@pytest.mark.slow
def test_thinking_is_said_before_the_answer(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "What is 3 + 4?"}], SamplingParams(temperature=0.0, max_tokens=120))[
        0
    ]
    assert answer.finish_reason == "stop" and answer.text == "3 + 4 = 7." and "3 + 4 = 7." in (answer.reasoning or "")


@pytest.mark.slow
def test_it_continues_documentation_like_documentation(llm: LLM) -> None:
    """Not whether it is true, only that it has learnt how such pages go on."""
    prompt = "   Return True if the argument is a string, False otherwise.\n\n   New in version"
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=6))[0]
    assert answer.text.startswith((" 3.", " 2."))
