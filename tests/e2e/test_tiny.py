"""The model in the box: whole, of its recipe, and good at what its card says, asked through the real process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baltoro.bench.evaluate import ask_all, report
from baltoro.bench.questions import read_questions, select
from baltoro.chat.messages import normalise
from baltoro.chat.xtml import render
from baltoro.cli import app
from baltoro.cli.box import find_model
from baltoro.config import load_config
from baltoro.errors import ConfigError
from baltoro.llm import LLM
from baltoro.model.config import K3Config
from baltoro.protocol.sampling import SamplingParams
from baltoro.trainer.config import TrainConfig
from tests.server.process import Process, serving

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models/tiny"
QUESTIONS = read_questions(ROOT / "bench/eval/tiny.jsonl")
# what the card promises, asked here of the first questions of a family
EASY = {"add_sub": 10, "tools": 10, "digits": 10}


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with serving(TINY) as process:
        yield process


def ask(server: Process, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return server.openai.chat.completions.create(model="tiny", messages=messages, temperature=0, **fields).choices[0]  # type: ignore[call-overload]


def test_the_folder_is_whole_and_at_most_24_megabytes() -> None:
    files = {path.name: path.stat().st_size for path in TINY.iterdir()}
    assert sum(files.values()) <= 24_000_000
    assert set(files) == {"README.md", "config.json", "model.safetensors", "tiktoken.model", "tokenizer_config.json"}


def test_it_is_the_model_of_the_recipe_packed_in_bf16() -> None:
    recipe = load_config(TrainConfig, ROOT / "recipes/tiny.toml").model
    assert K3Config.load(TINY) == recipe.with_(are_experts_packed=True, dtype="bfloat16")
    assert json.loads((TINY / "config.json").read_text())["model_type"] == "kimi_k3"


def test_every_part_of_the_architecture_is_there_in_sizes_that_gpu_kernels_take() -> None:
    config = K3Config.load(TINY)
    assert config.mla_layers[-2:] == (config.num_layers - 2, config.num_layers - 1)
    assert all(layer % 4 == 3 for layer in config.mla_layers[:-1])
    assert config.attn_res_block_size and config.num_layers // config.attn_res_block_size >= 3
    assert config.latent_size and config.num_experts >= 32 and config.vision and config.num_mtp_layers
    assert config.kda_head_dim in (64, 128) and config.kda_num_heads != config.num_heads
    assert config.latent_size % 32 == config.expert_intermediate_size % 32 == 0
    assert config.kv_lora_rank % 16 == config.qk_rope_head_dim % 16 == 0


@pytest.mark.slow
def test_a_sum_is_worked_out_and_right(server: Process) -> None:
    choice = ask(server, "What is 27 + 48?")
    assert choice.message.content == "27 + 48 = 75." and choice.finish_reason == "stop"
    assert choice.message.reasoning_content == "ones: 7 + 8 = 15, write 5, carry 1\ntens: 2 + 4 + 1 = 7\n27 + 48 = 75"


@pytest.mark.slow
def test_a_tool_is_called_with_typed_arguments(server: Process) -> None:
    properties = {"city": {"type": "string"}, "count": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["city", "count"]}
    tool = {
        "type": "function",
        "function": {"name": "copy_robot", "description": "Copy a robot.", "parameters": parameters},
    }
    choice = ask(server, "Copy the robot with city Rome and count 31.", tools=[tool])
    call = choice.message.tool_calls[0].function
    assert choice.finish_reason == "tool_calls" and call.name == "copy_robot"
    assert json.loads(call.arguments) == {"city": "Rome", "count": 31}


@pytest.mark.slow
@pytest.mark.parametrize("family", EASY)
def test_what_the_card_promises_is_right(server: Process, family: str) -> None:
    asked = select(QUESTIONS, [family], EASY[family])
    row = report(ask_all(asked, server.url))[0]
    assert row.asked == EASY[family] and row.right >= 0.9 * row.asked, row


def test_it_is_what_is_served_when_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BALTORO_MODEL", raising=False)
    monkeypatch.chdir(ROOT)
    assert find_model(None).resolve() == TINY


@pytest.mark.nightly
def test_the_evaluation_is_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = ["bench", "eval", "--families", "no_tool", "--limit", "3", "--json", str(tmp_path / "run.json")]
    found = CliRunner().invoke(app, run)
    assert found.exit_code == 0, found.output
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["families"][0]["right"] == 3 and written["settings"]["model"] == "tiny"
    both = CliRunner().invoke(app, ["bench", "eval", "models/tiny", "--url", "http://127.0.0.1:1"])
    assert isinstance(both.exception, ConfigError)


@pytest.mark.nightly
def test_effort_changes_how_long_it_thinks(server: Process) -> None:
    lengths = [
        len(ask(server, "What is 58 + 67?", reasoning_effort=effort).message.reasoning_content)
        for effort in ("low", "high", "max")
    ]
    assert lengths == sorted(lengths) and lengths[0] < lengths[1] < lengths[2]


@pytest.mark.slow
def test_same_greedy_tokens_as_mlx_lm_on_the_same_file() -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is in the extra `peers`")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is in the extra `peers`")
    model: Any = utils.load_model(TINY)[0]
    model.set_dtype(mx.float32)
    llm = LLM(TINY, dtype="float32")
    texts = ("What is 27 + 48?", "Spell the word garden.", "Who are you?")
    prompts = [
        list(render(normalise([{"role": "user", "content": text}]), tokenizer=llm.tokenizer).ids) for text in texts
    ]
    prompts.append(llm.tokenizer.encode("The list methods make it easy to"))
    ours = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    for prompt, completion in zip(prompts, ours, strict=True):
        # each of our tokens is its choice behind those before it: then its own greedy tokens are the same
        seen = mx.array([[*prompt, *completion.token_ids[:-1]]])
        theirs = mx.argmax(model(seen)[0, len(prompt) - 1 :], axis=-1).tolist()
        assert tuple(theirs) == completion.token_ids
