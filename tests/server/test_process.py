"""Everything together: `baltoro serve` as a process, a random model, the official client."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.server.process import ROOT, Process, make_model, serving, until

pytestmark = pytest.mark.slow

HI: list[Any] = [{"role": "user", "content": "hi"}]
NO_THINKING = {"chat_template_kwargs": {"thinking": False}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["city", "days"],
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Process]:
    with serving(model, "--dtype", "float64", "--max-batch-tokens", "256", "--max-running", "16") as process:
        yield process


def ask(server: Process, text: str = "hi", **options: Any) -> Any:
    extra = options.pop("extra_body", {"ignore_eos": True})
    defaults = {"temperature": 0, "max_tokens": 12, "model": "tiny"}
    messages = [{"role": "user", "content": text}]
    return server.openai.chat.completions.create(messages=messages, extra_body=extra, **(defaults | options))


def streamed(server: Process, text: str = "hi", **options: Any) -> tuple[str, str | None, Any]:
    """(reasoning and content, finish reason, usage) of a streamed answer."""
    said, finish, usage = "", None, None
    for chunk in ask(server, text, stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said += choice.delta.content or getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
    return said, finish, usage


def said(completion: Any) -> str:
    message = completion.choices[0].message
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


def test_the_http_process_has_no_torch(server: Process) -> None:
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.popen.pid, server.engine_pid())]
    assert ["libtorch" in text for text in maps] == [False, True]


def test_a_stream_is_the_whole_answer_in_pieces(server: Process) -> None:
    whole = ask(server)
    text, finish, usage = streamed(server)
    assert text == said(whole) != ""
    assert finish == whole.choices[0].finish_reason == "length"
    assert usage == whole.usage and usage.completion_tokens == 12


def test_clients_at_once_get_the_answers_they_get_alone(server: Process) -> None:
    texts = [f"number {i}: " + "x" * (i * 7 % 40) for i in range(12)]
    alone = [said(ask(server, text)) for text in texts]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda text: streamed(server, text)[0], texts))
    assert together == alone
    assert len(set(alone)) > 1


def test_200_requests_at_once_all_get_their_tokens(server: Process) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True, "temperature": 1.0}
    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=server.url, timeout=120, limits=limits) as http, ThreadPoolExecutor(200) as pool:
        replies = list(pool.map(lambda i: http.post("/v1/completions", json=body | {"seed": i}), range(200)))
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.json()["usage"]["completion_tokens"] for reply in replies} == {4}
    until(lambda: server.stats()["num_running_reqs"] == server.stats()["slots_held"] == 0)


def test_completions_and_logprobs(server: Process) -> None:
    out = server.openai.completions.create(
        model="tiny", prompt=["ab", "cd"], max_tokens=3, logprobs=2, echo=True, temperature=0, n=2
    )
    assert [choice.index for choice in out.choices] == [0, 1, 2, 3]
    first = out.choices[0]
    assert first.text.startswith("ab") and first.logprobs is not None
    assert first.logprobs.token_logprobs is not None and first.logprobs.token_logprobs[0] is None
    assert first.logprobs.token_logprobs[1:] == out.choices[1].logprobs.token_logprobs[1:]  # type: ignore[union-attr, index]


def test_a_seed_gives_the_same_answer_again(server: Process) -> None:
    answers = [said(ask(server, temperature=1.0, seed=7)) for _ in range(2)]
    others = {said(ask(server, temperature=1.0, seed=seed)) for seed in (8, 9, 10)}
    assert answers[0] == answers[1] and others != {answers[0]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call_is_one(server: Process, stream: bool) -> None:
    out = ask(
        server,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=400,
        temperature=1.0,
        seed=1,
        parallel_tool_calls=False,
        extra_body=NO_THINKING,
        stream=stream,
    )
    if stream:
        pieces = [c for chunk in out for choice in chunk.choices for c in choice.delta.tool_calls or ()]
        name, arguments = pieces[0].function.name, "".join(p.function.arguments for p in pieces)
    else:
        assert out.choices[0].finish_reason == "tool_calls"
        [call] = out.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    called = json.loads(arguments)
    assert name == "get_weather"
    assert called["city"] in ("Paris", "Rome") and 1 <= called["days"] <= 9


def test_an_answer_follows_its_schema(server: Process) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    formats: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for seed in range(3):
        out = ask(server, response_format=formats, max_tokens=300, temperature=1.0, seed=seed, extra_body=NO_THINKING)
        assert json.loads(out.choices[0].message.content)["a"] in (1, 2)
        assert out.choices[0].finish_reason == "stop"


def test_a_picture_changes_the_answer(server: Process) -> None:
    def answer(color: str) -> Any:
        out = io.BytesIO()
        Image.new("RGB", (24, 12), color).save(out, "PNG")
        url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
        parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
        return ask(server, parts, logprobs=True, extra_body={"ignore_eos": True} | NO_THINKING)  # type: ignore[arg-type]

    red, blue = answer("red"), answer("blue")
    assert red.usage.prompt_tokens == blue.usage.prompt_tokens > ask(server).usage.prompt_tokens
    assert red.choices[0].logprobs != blue.choices[0].logprobs


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_what_it_had(server: Process, stream: bool) -> None:
    body = json.dumps({"messages": HI, "max_tokens": 1900, "ignore_eos": True, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    done = server.stats()["num_finished_reqs"]
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: server.stats()["num_running_reqs"] == 1)
    until(lambda: server.stats()["num_running_reqs"] == 0)
    stats = server.stats()
    assert stats["kv_used_tokens"] == stats["slots_held"] == 0
    assert stats["num_finished_reqs"] == done + 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[1]", 400),
        (b'{"messages": 5}', 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": "x"}', 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1e9}', 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "model": "other"}', 404),
    ],
)
def test_malformed_bodies_are_told_so(server: Process, body: bytes, status: int) -> None:
    reply = server.http.post("/v1/chat/completions", content=body)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


def test_the_client_raises_its_own_errors(server: Process) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        ask(server, model="other")
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(server, "x" * 4000)


def test_health_metrics_and_models(server: Process) -> None:
    assert server.http.get("/health").status_code == server.http.get("/health_generate").status_code == 200
    assert 'baltoro:num_running_reqs{model_name="tiny"} 0.0' in server.http.get("/metrics").text
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.http.post("/flush_cache").status_code == 200


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_drains_and_ends_with_0(model: Path, signum: int) -> None:
    with serving(model) as process:
        engine = process.engine_pid()
        chunks = ask(process, stream=True, max_tokens=60)
        first = next(chunks)
        process.popen.send_signal(signum)
        rest = list(chunks)
        assert first.choices[0].delta.role == "assistant"
        assert rest[-1].choices[0].finish_reason == "length"
        assert process.popen.wait(30) == 0, "".join(process.lines)
        assert not Path(f"/proc/{engine}").exists()
        assert "Traceback" not in "".join(process.lines)


def test_a_dead_engine_is_told_and_ends_the_server_with_1(model: Path) -> None:
    with serving(model) as process:
        chunks = ask(process, stream=True, max_tokens=1900)
        next(chunks)
        os.kill(process.engine_pid(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine is gone"):
            list(chunks)
        reply = process.http.get("/health")
        assert reply.status_code == 503 and "exit code -9" in reply.json()["error"]["message"]
        assert process.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert process.popen.wait(30) == 1


def test_a_killed_server_leaves_no_engine_behind(model: Path) -> None:
    with serving(model) as process:
        engine = process.engine_pid()
        process.popen.kill()
        process.popen.wait(30)
        until(lambda: not Path(f"/proc/{engine}").exists() or "Z" in _state(engine))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def run(*arguments: str, text: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A verb that ends by itself."""
    command = [sys.executable, "-m", "baltoro", *arguments]
    given = os.environ | {"BALTORO_THREADS": "1"} | (env or {})
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=90, env=given)


def test_what_cannot_be_served_is_told_in_one_line(tmp_path: Path) -> None:
    out = run("serve", str(tmp_path))
    assert out.returncode == 2 and len(out.stderr.splitlines()) == 1 and "no config.json" in out.stderr


def test_a_model_whose_weights_do_not_load_ends_the_server(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    out = run("serve", str(tmp_path), "--port", "0")
    assert out.returncode not in (0, None) and "safetensors" in out.stderr
    assert "Traceback" not in out.stderr


def test_the_terminal_chat_starts_and_ends_a_server_of_its_own(model: Path) -> None:
    out = run("chat", "--max-tokens", "5", "--temperature", "0", text="hi\n/exit\n", env={"BALTORO_MODEL": str(model)})
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("tiny. ")
