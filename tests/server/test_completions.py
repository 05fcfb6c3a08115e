from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.conftest import Lab, MakeLab
from tests.server.fake import Reply, logprob

PATH = "/v1/completions"


async def test_text_comes_back_whole_and_streamed_alike(lab: Lab) -> None:
    lab.say("hello wörld")
    whole = await lab.post(PATH, {"prompt": "a"})
    assert whole["choices"] == [{"index": 0, "text": "hello wörld", "logprobs": None, "finish_reason": "stop"}]
    assert whole["usage"]["prompt_tokens"] == 1
    events = await lab.events(PATH, {"prompt": "a", "stream_options": {"include_usage": True}})
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "hello wörld"
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 2) + ["stop"]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1


async def test_no_usage_event_unless_asked(lab: Lab) -> None:
    assert all(e["choices"] and "usage" not in e for e in await lab.events(PATH, {"prompt": "a"}))


@pytest.mark.parametrize("per_step", [1, 2, 3, 7])
async def test_no_event_ends_inside_a_character(lab: Lab, per_step: int) -> None:
    text = "日本語 🌍 café"
    lab.say(text, per_step=per_step)
    events = await lab.events(PATH, {"prompt": "a"})
    assert "".join(e["choices"][0]["text"] for e in events) == text
    assert not any("�" in e["choices"][0]["text"] for e in events)


async def test_broken_bytes_at_the_end_become_a_replacement_character(lab: Lab) -> None:
    lab.engine.script = lambda *_: Reply([[97], [0xE6], [0x97]], finish="length")
    assert (await lab.post(PATH, {"prompt": "a"}))["choices"][0]["text"] == "a\ufffd"


@pytest.mark.parametrize("stop", ["low", ["xyz", "lo w", "low"]])
async def test_nothing_of_a_stop_string_is_ever_sent(lab: Lab, stop: Any) -> None:
    ids = [*b"hel", *b"ye", 108, 262]  # "helye", "l", "lo w": the stop string begins inside what was held
    lab.engine.script = lambda *_: Reply([[i] for i in ids[:-2]] + [[262]], num_trimmed=1)
    stop = "o w" if stop == "low" else stop
    events = await lab.events(PATH, {"prompt": "a", "stop": stop})
    text = "".join(e["choices"][0]["text"] for e in events)
    whole = (await lab.post(PATH, {"prompt": "a", "stop": stop}))["choices"][0]
    assert whole["text"] == text == ("helyel" if stop == "o w" else "helye")
    assert whole["stop_reason"] == ("o w" if stop == "o w" else "lo w")
    assert lab.submit.params.stop == ((stop,) if isinstance(stop, str) else tuple(stop))


async def test_several_prompts_and_answers_keep_their_places(lab: Lab) -> None:
    lab.engine.script = lambda request, index: Reply([[request.token_ids[0]], [48 + index]])
    body = {"prompt": ["x", "y"], "n": 2}
    whole = await lab.post(PATH, body)
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "x0"), (1, "x1"), (2, "y0"), (3, "y1")]
    assert whole["usage"]["prompt_tokens"] == 2 and whole["usage"]["completion_tokens"] == 8
    texts = dict.fromkeys(range(4), "")
    for event in await lab.events(PATH, body):
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "x0", 1: "x1", 2: "y0", 3: "y1"}


async def test_logprobs_and_echo(lab: Lab) -> None:
    lab.say("hi")
    out = (await lab.post(PATH, {"prompt": "abc", "echo": True, "logprobs": 1}))["choices"][0]
    assert out["text"] == "abchi"
    logprobs = out["logprobs"]
    assert logprobs["tokens"] == list("abchi")
    assert logprobs["token_logprobs"] == [None, *(logprob(ord(c)) for c in "bchi")]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][-1] == {"a": -0.5}
    streamed = await lab.events(PATH, {"prompt": "abc", "echo": True, "logprobs": 1})
    parts = [e["choices"][0]["logprobs"] for e in streamed]
    assert {key: [x for part in parts for x in part[key]] for key in logprobs} == logprobs


async def test_fields_reach_the_engine(lab: Lab) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    extra = {"seed": 5, "stop_token_ids": [3], "logit_bias": {"4": -1}, "priority": 2, "cache_salt": "s", "n": 3}
    await lab.post(PATH, {"prompt": [1, 2], "model": "tiny", **fields, **extra})
    params = lab.submit.params
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.seed, params.stop_token_ids, params.logit_bias) == (5, (3,), {4: -1.0})
    assert (lab.submit.token_ids, lab.submit.priority, lab.submit.cache_salt, lab.submit.n) == ((1, 2), 2, "s", 3)


async def test_defaults_come_from_the_settings(make_lab: MakeLab) -> None:
    lab = await make_lab(default_sampling={"temperature": 0.6}, default_max_tokens=17)
    await lab.post(PATH, {"prompt": "a"})
    assert (lab.submit.params.temperature, lab.submit.params.max_tokens) == (0.6, 17)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"logprobs": 99}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ],
)
async def test_a_wrong_value_is_400_with_its_param(lab: Lab, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        status, error = await lab.error(PATH, {"prompt": "a", "stream": stream, **fields})
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert lab.engine.submits == []


async def test_a_model_that_is_not_here_is_404(lab: Lab) -> None:
    status, error = await lab.error(PATH, {"prompt": "a", "model": "gpt-9"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error")])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_an_error_reply_even_when_streamed(
    lab: Lab, status: int, kind: str, stream: bool
) -> None:
    lab.engine.script = lambda *_: Reply([[]], finish="error", error="no", error_status=status)
    found, error = await lab.error(PATH, {"prompt": "a", "stream": stream})
    assert (found, error["type"], error["message"]) == (status, kind, "no")


async def test_an_engine_lost_in_mid_stream_is_an_event_and_the_stream_ends(lab: Lab) -> None:
    lab.say("abc", stall_at=2)
    async with asyncio.timeout(5):
        waiting = asyncio.create_task(lab.http.post(PATH, json={"prompt": "a", "stream": True}))
        await lab.engine.until(lambda: bool(lab.engine.submits))
        await lab.worker.query()  # what was sent before the answer is here
        lab.worker.lose("exit code 1")
        reply = await waiting
    assert b'"service_unavailable"' in reply.content
    assert b"[DONE]" not in reply.content
