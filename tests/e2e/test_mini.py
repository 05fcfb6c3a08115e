"""The mini model of the box: its size, its parts, and what it was trained for."""

from __future__ import annotations

import json
import math
import random
import re
import zlib
from collections import Counter
from pathlib import Path
from pydoc_data import topics

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
@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "no thinking"])
def test_sums_of_digits_are_right_in_every_wording(llm: LLM, thinking: bool) -> None:
    for wording in WORDINGS:
        right, wrong = check_sums(llm, wording, thinking=thinking)
        assert right == 100, (wording, wrong)


@pytest.mark.slow
def test_thinking_is_said_before_the_answer(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "What is 3 + 4?"}], SamplingParams(temperature=0.0, max_tokens=120))[
        0
    ]
    assert answer.finish_reason == "stop" and answer.text == "3 + 4 = 7." and "3 + 4 = 7" in (answer.reasoning or "")


PAGE = topics.topics["try"][:1500]
STARTS = (
    "The list methods make it easy to",
    "The *encoding* argument is the name of the",
    "This module provides",
    "   Return True if the argument is a string, False otherwise.\n\n   New in version",
)


def words(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Za-z]{2,}", text)]


@pytest.mark.slow
def test_it_continues_documentation_in_its_words_and_without_going_in_circles(llm: LLM) -> None:
    """Not whether it is true, only that it goes on as such pages go on. Sampled as one samples a model: the likeliest
    token each time drives a model of this size into a loop."""
    known = set(words("\n".join(topics.topics.values())))
    params = [SamplingParams(max_tokens=80, temperature=0.7, top_p=0.9, seed=seed) for seed in range(3)]
    found: list[str] = []
    for one in params:
        for answer in llm.generate(list(STARTS), one):
            found += words(answer.text)
            runs = Counter(zip(*(words(answer.text)[at:] for at in range(4)), strict=False))
            assert not runs or runs.most_common(1)[0][1] <= 3, answer.text
    assert len(found) > 200 and sum(word in known for word in found) > 0.9 * len(found)


@pytest.mark.slow
def test_real_text_surprises_it_less_than_the_same_words_in_disorder(llm: LLM) -> None:
    """Bits a byte of a page about `try`, far below what a compressor needs, and of its words shuffled."""

    def bits(text: str) -> float:
        ids = llm.tokenizer.encode(text)
        answer = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
        assert answer.prompt_logprobs is not None
        return -sum(value for value in answer.prompt_logprobs if value is not None) / math.log(2) / len(text.encode())

    mixed = PAGE.split(" ")
    random.Random(0).shuffle(mixed)
    assert bits(PAGE) < 2.1 < 2.6 < bits(" ".join(mixed))
    assert bits(PAGE) < 8 * len(zlib.compress(PAGE.encode(), 9)) / len(PAGE) - 0.6
