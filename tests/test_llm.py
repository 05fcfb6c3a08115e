"""LLM and `baltoro generate` on a tiny K3 in a folder: order, stops, chat, pictures, errors, the bar."""

from __future__ import annotations

import base64
import gc
import io
import json
from pathlib import Path

import msgspec
import pytest
from PIL import Image
from typer.testing import CliRunner

from baltoro.chat.tokenizer import MEDIA_PAD, Tokenizer
from baltoro.cli import app
from baltoro.errors import ConfigError, ContextLengthError, RequestError
from baltoro.llm import LLM
from baltoro.model.adapter import save_adapter
from baltoro.model.build import new_model
from baltoro.model.weights import save_model
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3, tiny_vision

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: byte vocabulary, random weights."""
    path, tokenizer = tmp_path_factory.mktemp("model"), Tokenizer.of_bytes()
    end, pad = tokenizer.eos_ids[0], tokenizer.special(MEDIA_PAD)
    vision = tiny_vision(patch_size=6)
    config = tiny_k3(vocab_size=tokenizer.vocab_size, eos_token_id=end, media_token_id=pad, vision=vision)
    save_model(new_model(config, seed=1, std=0.2, decay="slow"), path)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, page_size=16, max_running=3, max_waiting=2, max_context=600, is_poisoned=True)


def _is_clean(llm: LLM) -> bool:
    llm.engine.audit()
    llm.engine.flush()
    return not llm.engine.has_work and llm.engine.stats()["pages_used"] == 0


def test_an_adapter_of_a_folder_is_selected_by_name(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, max_loras=1, max_lora_rank=3, max_context=200) as one:
        config = one.engine.model_config
        save_adapter(random_adapter(config, 3), tmp_path, config)
        base = one.generate("hello", GREEDY)[0].token_ids
        with pytest.raises(RequestError, match="'mine' is not loaded"):
            one.generate("hello", GREEDY, adapter="mine")
        one.load_adapter("mine", tmp_path)
        assert one.generate("hello", GREEDY, adapter="mine")[0].token_ids != base
        assert one.chat([{"role": "user", "content": "hi"}], GREEDY, adapter="mine")[0].finish_reason
        assert one.generate("hello", GREEDY)[0].token_ids == base
        one.unload_adapter("mine")
        with pytest.raises(RequestError, match="none is loaded"):
            one.generate("hello", GREEDY, adapter="mine")


def test_closing_lets_go_of_the_disk_folder_and_the_next_one_finds_what_lies_there(
    folder: Path, tmp_path: Path
) -> None:
    options = {"host_cache_bytes": 200_000, "disk_cache_dir": str(tmp_path), "memory_bytes": 400_000, "page_size": 16}
    prompts = [f"{i} " * 120 for i in range(12)]
    with LLM(folder, **options) as one:
        first = [one.generate(prompt, GREEDY)[0] for prompt in prompts]
        with pytest.raises(ConfigError, match="another process"):
            LLM(folder, **options)
        assert one.engine.stats()["disk_written_total"]
    one.close()
    two = LLM(folder, **options)
    again = [two.generate(prompt, GREEDY)[0] for prompt in prompts[:6]]
    assert any(answer.num_cached_tokens for answer in again), "from files: nothing else was there"
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first[:6]]
    del two  # as good as closing it
    gc.collect()
    LLM(folder, **options).close()


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """More prompts than the line takes, of very different lengths; each equals its own run."""
    prompts = [f"{'word ' * (9 - i)}{i}" for i in range(9)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i, ignore_eos=True) for i in range(9)]
    together = llm.generate(prompts, params)
    assert [len(c.token_ids) for c in together] == [1 + i for i in range(9)]
    for prompt, one, answer in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, one)
        assert alone.token_ids == answer.token_ids and alone.prompt_token_ids == tuple(llm.tokenizer.encode(prompt))
    assert _is_clean(llm)


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("some text")
    answers = [*llm.generate("some text", GREEDY), *llm.generate(ids, GREEDY), *llm.generate([ids], GREEDY)]
    assert len({answer.token_ids for answer in answers}) == 1
    assert answers[0].text == llm.tokenizer.decode(answers[0].token_ids, skip_special=True)
    control = llm.generate("<|end_of_msg|>", GREEDY)[0]
    assert len(control.prompt_token_ids) > 1, "names of control tokens in text are text"


def test_ids_logprobs_and_text_are_trimmed_together_at_a_stop_string(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=40, logprobs=2, min_tokens=30, logit_bias=_letters(llm))
    (whole,) = llm.generate("x", params)
    stop = whole.text[10:13]
    at = whole.text.index(stop)
    (cut,) = llm.generate("x", msgspec.structs.replace(params, stop=(stop,), min_tokens=0))
    assert cut.finish_reason == "stop" and cut.text == whole.text[:at]
    assert cut.token_ids == whole.token_ids[:at]
    assert cut.logprobs == whole.logprobs[:at] and cut.top_logprobs == whole.top_logprobs[:at]  # type: ignore[index]


def _letters(llm: LLM) -> dict[int, float]:
    """A bias to lower-case letters, one id each."""
    return {llm.tokenizer.encode(chr(code))[0]: 40.0 for code in range(ord("a"), ord("z") + 1)}


def test_n_answers_stand_together(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=8, prompt_logprobs=1)
    answers = llm.generate(["abc", "defg"], params, n=3)
    assert [len(a.prompt_token_ids) for a in answers] == [3, 3, 3, 4, 4, 4]
    assert len({a.token_ids for a in answers[:3]}) == 3
    assert all(a.prompt_logprobs is not None and len(a.prompt_logprobs) == 3 for a in answers[:3])
    assert answers == [
        msgspec.structs.replace(again, request_id=answer.request_id)
        for answer, again in zip(answers, llm.generate(["abc", "defg"], params, n=3), strict=True)
    ]


def test_chat_takes_the_answer_apart(llm: LLM) -> None:
    """The grammar of response_format forces a random model through the protocol's markers."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wish = {"type": "json_schema", "json_schema": {"name": "pick", "schema": schema}}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=120)
    talk = [{"role": "user", "content": "pick"}]
    (answer,) = llm.chat(talk, params, thinking=False, response_format=wish)
    assert json.loads(answer.text) in ({"a": 1}, {"a": 2})
    assert answer.finish_reason == "stop" and answer.reasoning is None
    first, second = llm.chat([talk, talk], params, thinking=False, response_format=wish)
    assert first.text == second.text == answer.text


def test_chat_reads_pictures(llm: LLM) -> None:
    def answer(color: str) -> tuple[int, ...]:
        data = io.BytesIO()
        Image.new("RGB", (40, 25), color).save(data, "PNG")
        url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        (found,) = llm.chat([{"role": "user", "content": content}], GREEDY)
        assert found.prompt_token_ids.count(llm.tokenizer.special(MEDIA_PAD)) == 4 * 3
        return found.token_ids

    assert answer("red") == answer("red") != answer("blue")


def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    seen: list[TokenDelta] = []
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "x" * 600], GREEDY, on_tokens=seen.append)
    with pytest.raises(RequestError, match="2 params for 1 prompts"):
        llm.generate(["fine"], [GREEDY, GREEDY])
    assert not seen and _is_clean(llm)


def test_who_stops_waiting_leaves_a_clean_engine(llm: LLM) -> None:
    def interrupt(delta: TokenDelta) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d", "e", "f", "g"], GREEDY, on_tokens=interrupt)
    assert _is_clean(llm)
    assert len(llm.generate("a", GREEDY)) == 1


def test_the_bar_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err and "24 tokens" in err


def test_an_unknown_option_is_named(folder: Path) -> None:
    with pytest.raises(Exception, match="did you mean page_size"):
        LLM(folder, page_sise=4)


def test_generate_verb_prints_text_or_json(folder: Path, llm: LLM) -> None:
    words = ["generate", "--model", str(folder), "--temperature", "0", "--max-tokens", "12", "--json", "ab", "cd"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    wanted = llm.generate(["ab", "cd"], GREEDY)
    assert [line["token_ids"] for line in lines] == [list(answer.token_ids) for answer in wanted]
    assert lines[0]["finish_reason"] == wanted[0].finish_reason
    plain = CliRunner().invoke(app, ["generate", "--model", str(folder), "--max-tokens", "3", "--chat", "hi"])
    assert plain.exit_code == 0 and plain.stdout.startswith("<think>")
