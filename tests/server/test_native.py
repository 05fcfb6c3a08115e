from __future__ import annotations

import asyncio

import pytest

from tests.server.conftest import Lab


async def test_tokenize_and_detokenize_are_inverse(lab: Lab) -> None:
    text = "hello wörld <|open|>think<|sep|>"
    for field in ("prompt", "text"):
        out = await lab.post("/v1/tokenize", {field: text})
        assert out["count"] == len(out["tokens"])
        assert (await lab.post("/v1/detokenize", {"tokens": out["tokens"]}))["text"] == text


async def test_text_never_becomes_control_ids(lab: Lab) -> None:
    out = await lab.post("/v1/tokenize", {"prompt": "<|open|>[EOS]<|end_of_msg|>"})
    assert not any(lab.tokenizer.is_control(i) for i in out["tokens"])


async def test_a_conversation_is_tokenised_as_the_model_is_shown_it(lab: Lab) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    out = await lab.post("/v1/tokenize", body)
    assert lab.tokenizer.decode(out["tokens"]).endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
    body["chat_template_kwargs"] = {"thinking": False}  # type: ignore[assignment]
    out = await lab.post("/v1/tokenize", body)
    assert lab.tokenizer.decode(out["tokens"]).endswith("<|open|>response<|sep|>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tokenize", {}, "prompt"),
        ("/v1/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/v1/tokenize", {"prompt": 5}, "prompt"),
        ("/v1/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/v1/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": 7}, "rid"),
    ],
)
async def test_bad_bodies_are_400_with_a_param(lab: Lab, path: str, body: dict[str, object], param: str) -> None:
    status, error = await lab.error(path, body)
    assert (status, error["param"]) == (400, param)


async def test_flush_reports_what_the_engine_says(lab: Lab) -> None:
    assert (await lab.http.get("/flush_cache")).status_code == 200
    lab.engine.flush_error = "2 requests are running"
    status, error = await lab.error("/flush_cache", {})
    assert status == 400 and "2 requests" in error["message"]


@pytest.mark.parametrize("how", [{"rid": "mine"}, {"abort_all": True}])
async def test_an_aborted_request_ends_with_what_it_has(lab: Lab, how: dict[str, object]) -> None:
    lab.say("abcdef", stall_at=3)
    waiting = asyncio.create_task(lab.post("/v1/completions", {"prompt": ["x", "y"], "rid": "mine"}))
    await lab.engine.until(lambda: len(lab.engine.submits) == 2)
    await lab.post("/abort_request", how)
    choices = (await waiting)["choices"]
    assert {c["finish_reason"] for c in choices} == {"abort"}
    assert sorted(lab.engine.aborted) == ["mine:0", "mine:1"]


async def test_infos_tell_facts_but_not_the_key(lab: Lab) -> None:
    lab.engine.info = {"num_running_reqs": 0}
    info = (await lab.http.get("/server_info")).json()
    assert info["server"]["model_name"] == "tiny"
    assert info["server"]["api_key"] is None
    assert info["engine"] == {"fake": True, "adapters": {}}
    assert info["state"] == {"num_running_reqs": 0}
    assert (await lab.http.get("/model_info")).json()["vocab_size"] == lab.tokenizer.vocab_size
