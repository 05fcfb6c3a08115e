"""Adapters over HTTP: both spellings of the routes, selection, listing, and errors with a field."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from tests.server.conftest import Lab, MakeLab

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SUMS: dict[str, Any] = {"sums": {"path": "adapters/sums", "version": 1}}


@pytest.fixture
async def adapted(make_lab: MakeLab) -> Lab:
    """A server that was started with --lora-modules sums=adapters/sums."""
    made: Lab = await make_lab(adapters=dict(SUMS))
    return made


async def test_adapters_are_listed_beside_the_base(adapted: Lab) -> None:
    base, sums = (await adapted.http.get("/v1/models")).json()["data"]
    assert (base["id"], "parent" in base) == ("tiny", False)
    assert (sums["id"], sums["parent"], sums["root"]) == ("tiny:sums", "tiny", "adapters/sums")
    assert (await adapted.http.get("/v1/models/tiny:sums")).json() == sums
    assert (await adapted.http.get("/v1/models/tiny:other")).status_code == 404


@pytest.mark.parametrize("model", ["tiny:sums", "sums"])
async def test_model_selects_an_adapter(adapted: Lab, model: str) -> None:
    adapted.say("5")
    reply = await adapted.post("/v1/chat/completions", HI | {"model": model})
    assert (reply["model"], adapted.submit.adapter) == ("tiny:sums", "sums")
    events = await adapted.events("/v1/chat/completions", HI | {"model": model})
    assert {event["model"] for event in events} == {"tiny:sums"}
    reply = await adapted.post("/v1/completions", {"prompt": "a", "model": model})
    assert (reply["model"], adapted.submit.adapter) == ("tiny:sums", "sums")
    for base in ({}, {"model": "tiny"}):
        reply = await adapted.post("/v1/completions", {"prompt": "a"} | base)
        assert (reply["model"], adapted.submit.adapter) == ("tiny", None)


async def test_lora_path_selects_an_adapter_for_all_prompts_or_each(adapted: Lab) -> None:
    await adapted.post("/generate", {"text": ["a", "b"], "lora_path": "sums"})
    assert [s.adapter for s in adapted.engine.submits] == ["sums", "sums"]
    await adapted.post("/generate", {"text": ["a", "b"], "lora_path": [None, "sums"]})
    assert [s.adapter for s in adapted.engine.submits[2:]] == [None, "sums"]
    status, error = await adapted.error("/generate", {"text": ["a", "b"], "lora_path": ["sums"]})
    assert (status, error["param"]) == (400, "lora_path")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/chat/completions", HI | {"model": "tiny:x"}, "model", "model_not_found"),
        ("/v1/completions", {"prompt": "a", "model": "other:sums"}, "model", "model_not_found"),
        ("/generate", {"text": "a", "lora_path": "x"}, "lora_path", "adapter_not_found"),
        ("/unload_lora_adapter", {"lora_name": "x"}, "lora_name", "adapter_not_found"),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}, "lora_name", "adapter_not_found"),
    ],
)
async def test_unknown_adapters_are_404(adapted: Lab, path: str, body: Any, param: str, code: str) -> None:
    status, error = await adapted.error(path, body)
    assert (status, error["param"], error["code"]) == (404, param, code)
    assert "sums" in error["message"] and not adapted.engine.submits


async def test_load_replace_and_unload(lab: Lab) -> None:
    reply = await lab.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "x/a"})
    assert reply["success"] is True and reply["loaded_adapters"] == {"a": "x/a"}
    text = await lab.http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "x/b"})
    assert (text.status_code, text.text) == (200, "Success: LoRA adapter 'b' added successfully.")
    reply = await lab.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "y/a"})
    assert reply["loaded_adapters"] == {"a": "y/a", "b": "x/b"} and reply["facts"]["a"]["version"] == 3
    inplace = {"lora_name": "a", "lora_path": "z", "load_inplace": False}
    assert (await lab.error("/v1/load_lora_adapter", inplace))[1]["param"] == "lora_name"
    text = await lab.http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
    assert (text.status_code, text.text) == (200, "Success: LoRA adapter 'b' removed successfully.")
    assert (await lab.post("/unload_lora_adapter", {"lora_name": "a"}))["loaded_adapters"] == {}
    assert len((await lab.http.get("/v1/models")).json()["data"]) == 1


async def test_tensors_travel_as_bytes(lab: Lab) -> None:
    body = {"lora_name": "a", "config_dict": {"r": 4}, "serialized_tensors": base64.b64encode(b"bytes").decode()}
    assert (await lab.post("/load_lora_adapter_from_tensors", body))["loaded_adapters"] == {"a": ""}
    assert (lab.engine.loads[0].tensors, lab.engine.loads[0].config) == (b"bytes", {"r": 4})
    for wrong, param in (
        ({"serialized_tensors": "!"}, "serialized_tensors"),
        ({"added_tokens_config": {"x": 1}}, "added_tokens_config"),
        ({"pinned": True}, "pinned"),
        ({"config_dict": []}, "config_dict"),
    ):
        status, error = await lab.error("/load_lora_adapter_from_tensors", body | wrong)
        assert (status, error["param"]) == (400, param)


async def test_what_the_engine_refuses_is_400_in_its_words(lab: Lab) -> None:
    lab.engine.adapter_error = "o_proj.lora_A.weight is missing"
    status, error = await lab.error("/load_lora_adapter", {"lora_name": "a", "lora_path": "x"})
    assert (status, error["message"], error["param"]) == (400, "o_proj.lora_A.weight is missing", "lora_name")
    assert (await lab.error("/generate", {"text": "a", "lora_path": "a"}))[0] == 404


async def test_an_unload_waits_for_its_users_but_selects_no_more(adapted: Lab) -> None:
    """Longer than any call may take otherwise."""
    adapted.engine.is_busy = True
    waiting = asyncio.create_task(adapted.post("/unload_lora_adapter", {"lora_name": "sums"}))
    await adapted.engine.until(lambda: bool(adapted.engine.unloading))
    assert (await adapted.error("/generate", {"text": "a", "lora_path": "sums"}))[0] == 404
    await asyncio.wait({waiting}, timeout=0.5)
    assert not waiting.done()
    adapted.engine.end_unloads()
    assert (await waiting)["success"] is True


async def test_the_key_guards_the_routes(make_lab: MakeLab) -> None:
    lab = await make_lab(api_key="k")
    for path in ("/load_lora_adapter", "/v1/load_lora_adapter", "/unload_lora_adapter"):
        assert (await lab.http.post(path, json={"lora_name": "a", "lora_path": "x"})).status_code == 401
