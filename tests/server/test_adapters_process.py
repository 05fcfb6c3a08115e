"""Adapters through everything: `baltoro serve` as a process, an adapter from a folder and one over the wire."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import load_engine
from baltoro.model.adapter import save_adapter
from baltoro.model.config import K3Config
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.engine.stub import run, tokens_of
from tests.model.adapters import random_adapter
from tests.server.process import Process, make_model, serving

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 40, 41, 42] * 30
RANKS = {"first": 2, "second": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    config = K3Config.load(make_model(root / "tiny"))
    for seed, (name, rank) in enumerate(RANKS.items()):
        save_adapter(random_adapter(config, rank, seed=seed), root / name, config)
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    options = ("--dtype", "float64", "--max-loras", "2", "--max-lora-rank", "8")
    with serving(folder / "tiny", *options, "--lora-modules", f"one={folder / 'first'}") as process:
        yield process


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str | None, list[int]]:
    """What an engine of its own says for each adapter alone."""
    answers = {}
    for name in (None, *RANKS):
        engine = load_engine(folder / "tiny", EngineConfig(dtype="float64", max_loras=1, prefix_cache=False))
        if name is not None:
            engine.load_adapter("it", folder / name)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        adapter = None if name is None else "it"
        engine.add(Submit(request_id="r", token_ids=tuple(PROMPT), params=params, adapter=adapter))
        answers[name] = tokens_of(run(engine)["r", 0])
        engine.close()
    return answers


def generate(server: Process, adapter: str | list[str | None] | None, prompts: Any = PROMPT) -> Any:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    reply = server.http.post("/generate", json={"input_ids": prompts, "lora_path": adapter, "sampling_params": params})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_folder_at_the_start_and_tensors_later(
    server: Process, folder: Path, wanted: dict[str | None, list[int]]
) -> None:
    config = K3Config.load(folder / "tiny")
    adapter = random_adapter(config, RANKS["second"], seed=1)
    body = {
        "lora_name": "two",
        "config_dict": json.loads((folder / "second" / "adapter_config.json").read_text()),
        "serialized_tensors": base64.b64encode(save(adapter.tensors(config))).decode(),
    }
    reply = server.http.post("/load_lora_adapter_from_tensors", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["facts"]["two"]["digest"] == adapter.digest()
    answers = generate(server, ["one", None, "two", "one"], [PROMPT] * 4)
    names = ["first", None, "second", "first"]
    assert [a["output_ids"] for a in answers] == [wanted[name] for name in names]
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    assert [model.id for model in server.openai.models.list()] == ["tiny", "tiny:one", "tiny:two"]


def test_a_reload_under_the_same_name_over_http(
    server: Process, folder: Path, wanted: dict[str | None, list[int]]
) -> None:
    for version, name in enumerate(("first", "second")):
        reply = server.http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(folder / name)})
        assert reply.status_code == 200, reply.text
        answers = [generate(server, "x") for _ in range(2)]
        assert [a["output_ids"] for a in answers] == [wanted[name]] * 2, version
        assert answers[0]["meta_info"]["cached_tokens"] == 0 < answers[1]["meta_info"]["cached_tokens"]
    assert server.http.post("/unload_lora_adapter", json={"lora_name": "x"}).json()["success"]
    with pytest.raises(openai.NotFoundError, match="tiny:x is not here"):
        server.openai.completions.create(model="tiny:x", prompt=PROMPT)


def test_a_wrong_adapter_is_refused_by_name_and_hurts_nobody(
    server: Process, folder: Path, tmp_path: Path, wanted: dict[str | None, list[int]]
) -> None:
    config = K3Config.load(folder / "tiny")
    save_adapter(random_adapter(config, 9), tmp_path / "big", config)
    for path, words in ((tmp_path / "big", "slots hold 8"), (tmp_path / "none", "adapter_config.json")):
        reply = server.http.post("/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(path)})
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]
    body = {"lora_name": "bad", "config_dict": {"peft_type": "LORA", "r": 2, "lora_alpha": 2}}
    tensors = {"language_model.model.layers.0.self_attn.o_proj.lora_A.weight": torch.ones(3, 24)}
    encoded = base64.b64encode(save(tensors)).decode()
    reply = server.http.post("/load_lora_adapter_from_tensors", json=body | {"serialized_tensors": encoded})
    assert reply.status_code == 400 and "self_attn.o_proj.lora_A.weight is [3, 24]" in reply.json()["error"]["message"]
    assert generate(server, None)["output_ids"] == wanted[None]
