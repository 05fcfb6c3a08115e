from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Lab
from tests.server.fake import Reply, logprob

PATH = "/generate"


async def test_text_or_ids_come_back_as_text_and_ids(lab: Lab) -> None:
    ids = lab.say("hi ü")
    for body in ({"text": "ab"}, {"input_ids": [97, 98]}):
        out = await lab.post(PATH, body)
        assert (out["text"], out["output_ids"]) == ("hi ü", ids[:-1])
        meta = out["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, len(ids))
        assert meta["finish_reason"] == {"type": "stop", "matched": None}
        assert lab.submit.token_ids == (97, 98)


async def test_a_stream_is_cumulative(lab: Lab) -> None:
    lab.say("abc", is_ended=False, finish="length")
    events = await lab.events(PATH, {"text": "x", "sampling_params": {"max_new_tokens": 3}})
    assert [e["text"] for e in events] == ["a", "ab", "abc"]
    assert [e["meta_info"]["finish_reason"] for e in events] == [None, None, {"type": "length", "length": 3}]


async def test_lists_and_several_answers_come_as_lists(lab: Lab) -> None:
    lab.engine.script = lambda request, index: Reply([[request.token_ids[0]], [48 + index]])
    out = await lab.post(PATH, {"text": ["x", "y"], "sampling_params": {"n": 2}})
    assert [o["text"] for o in out] == ["x0", "x1", "y0", "y1"]
    assert [o["text"] for o in await lab.post(PATH, {"input_ids": [[97]]})] == ["a0"]
    events = await lab.events(PATH, {"text": ["x", "y"]})
    assert {e["index"] for e in events} == {0, 1}


async def test_logprobs_of_prompt_and_answer(lab: Lab) -> None:
    lab.say("hi")
    body = {"text": "abc", "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    meta = (await lab.post(PATH, body))["meta_info"]
    assert meta["output_token_logprobs"] == [[logprob(104), 104, None], [logprob(105), 105, None]]
    assert meta["input_token_logprobs"] == [[logprob(98), 98, None], [logprob(99), 99, None]]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]
    body["return_text_in_logprobs"] = True
    assert (await lab.post(PATH, body))["meta_info"]["output_token_logprobs"][0][2] == "h"


async def test_what_ended_the_text_can_be_kept(lab: Lab) -> None:
    ids = lab.say("hi")
    out = await lab.post(PATH, {"text": "a", "sampling_params": {"no_stop_trim": True}})
    assert (out["text"], out["output_ids"]) == ("hi", ids)
    out = await lab.post(PATH, {"text": "a", "sampling_params": {"no_stop_trim": True, "skip_special_tokens": False}})
    assert out["text"] == "hi<|end_of_msg|>"
    lab.engine.script = lambda *_: Reply([[97], [98]], num_trimmed=1)
    out = await lab.post(PATH, {"text": "a", "sampling_params": {"stop": "b", "no_stop_trim": True}})
    assert (out["text"], out["meta_info"]["finish_reason"]) == ("ab", {"type": "stop", "matched": "b"})


async def test_fields_reach_the_engine(lab: Lab) -> None:
    asked = {"temperature": 0.5, "top_k": 3, "max_new_tokens": 7, "min_new_tokens": 2, "sampling_seed": 4}
    await lab.post(PATH, {"text": "a", "rid": "mine", "sampling_params": asked | {"json_schema": '{"type": "object"}'}})
    params = lab.submit.params
    assert (params.temperature, params.top_k, params.max_tokens, params.min_tokens, params.seed) == (0.5, 3, 7, 2, 4)
    assert lab.submit.request_id == "mine" and lab.submit.grammar is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"text": 5}, "text"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"top_p": "x"}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "x" * 5000}, "text"),
    ],
)
async def test_a_wrong_value_is_400_with_its_param(lab: Lab, body: dict[str, Any], param: str) -> None:
    status, error = await lab.error(PATH, body)
    assert (status, error["param"]) == (400, param), error
