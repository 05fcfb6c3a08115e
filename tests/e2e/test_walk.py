"""The model in the box, through the real process with the official client, and beside mlx-lm on the same file."""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baltoro.chat.messages import normalise
from baltoro.chat.xtml import render
from baltoro.llm import LLM
from baltoro.protocol.sampling import SamplingParams
from tests.server.process import Process, serving

pytestmark = pytest.mark.slow

MINI = Path(__file__).parents[2] / "models" / "mini"
PAIRS = [(0, 0), (1, 9), (2, 3), (3, 4), (4, 4), (5, 8), (6, 1), (7, 5), (8, 9), (9, 2)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=120)


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with serving(MINI, "--dtype", "float32") as process:
        yield process


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MINI, dtype="float32")


def question(a: int, b: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"What is {a} + {b}?"}]


def is_right(a: int, b: int, answer: str) -> bool:
    return answer.rstrip(".").split()[-1:] == [str(a + b)]


def streamed(server: Process, a: int, b: int, *, thinking: bool) -> str:
    parts = server.openai.chat.completions.create(
        model="mini",
        messages=question(a, b),  # type: ignore[arg-type]
        temperature=0,
        max_tokens=120,
        stream=True,
        extra_body={"chat_template_kwargs": {"thinking": thinking}},
    )
    return "".join(c.delta.content or "" for part in parts for c in part.choices)


@pytest.mark.parametrize("thinking", [True, False])
def test_several_clients_at_once_get_right_sums_streamed(server: Process, thinking: bool) -> None:
    with ThreadPoolExecutor(len(PAIRS)) as pool:
        answers = list(pool.map(lambda pair: streamed(server, *pair, thinking=thinking), PAIRS))
    wrong = [(a, b, said) for (a, b), said in zip(PAIRS, answers, strict=True) if not is_right(a, b, said)]
    assert len(wrong) <= 1, wrong  # how many of all hundred are right is counted in test_mini.py


def test_the_stream_is_what_generate_says(server: Process, llm: LLM) -> None:
    for a, b in PAIRS[:4]:
        assert streamed(server, a, b, thinking=True) == llm.chat(question(a, b), GREEDY)[0].text


def test_real_text_goes_on_sensibly(server: Process, llm: LLM) -> None:
    """The language reference that every Python carries: far better than chance, and what it writes is words."""
    text = pydoc_data.topics.topics["for"][200:1100]
    ids = llm.tokenizer.encode(text)
    scored = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
    assert scored.prompt_logprobs is not None
    given = [logprob for logprob in scored.prompt_logprobs if logprob is not None]
    loss = -sum(given) / len(given)
    assert loss < 0.6 * math.log(llm.tokenizer.vocab_size)
    reply = server.openai.completions.create(model="mini", prompt=text, max_tokens=40, temperature=0)
    going_on = reply.choices[0].text
    assert (len(going_on) > 40 and going_on.isprintable()) or "\n" in going_on
    assert going_on == llm.generate([ids], SamplingParams(max_tokens=40, temperature=0.0))[0].text


def test_same_greedy_tokens_as_mlx_lm_on_the_same_file(llm: LLM) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is in the extra `peers`")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is in the extra `peers`")
    model: Any = utils.load_model(MINI)[0]
    model.set_dtype(mx.float32)
    prompts = [list(render(normalise(question(a, b)), tokenizer=llm.tokenizer).ids) for a, b in PAIRS[:3]]
    prompts.append(llm.tokenizer.encode("The dictionary keeps its"))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    ours = llm.generate(prompts, params)
    for prompt, completion in zip(prompts, ours, strict=True):
        # each of our tokens is its choice behind those before it: then its own greedy tokens are the same
        seen = mx.array([[*prompt, *completion.token_ids[:-1]]])
        theirs = mx.argmax(model(seen)[0, len(prompt) - 1 :], axis=-1).tolist()
        assert tuple(theirs) == completion.token_ids
