"""The messages of adapters at the engine's end: answered in order, refused in words, unloads wait for their users."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.engine.line import ParentLine
from baltoro.engine.worker import Worker
from baltoro.model.build import new_model
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Ack, Deltas, Hello, LoadAdapter, Shutdown, Submit, UnloadAdapter
from tests.engine.test_worker import Server
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3

CONFIG = tiny_k3(vision=None, num_layers=4, mla_layers=(3,))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A worker on a tiny K3 with one adapter slot, in a thread."""
    end = Server(f"ipc://{tmp_path}/engine")
    options = EngineConfig(max_loras=1, max_lora_rank=4, max_context=200, max_running=4)
    engine = Engine(new_model(CONFIG, std=0.1).merge(), options, eos_ids=())
    line = ParentLine(end.address)
    thread = threading.Thread(target=Worker(line, engine).work)
    thread.start()
    hello = end.receive()
    assert isinstance(hello, Hello) and hello.info["adapters"] == {}
    yield end
    end.send(Shutdown(is_draining=False))
    thread.join(30)
    assert not thread.is_alive()
    line.__exit__(None, None, None)
    end.socket.close()


def load(name: str = "a", rank: int = 2) -> LoadAdapter:
    adapter = random_adapter(CONFIG, rank)
    fields = adapter.settings.to_json([])
    return LoadAdapter(call_id=f"load-{name}", name=name, tensors=save(adapter.tensors(CONFIG)), config=fields)


def ack(server: Server) -> Ack:
    while isinstance(message := server.receive(), Deltas):
        pass
    assert isinstance(message, Ack), message
    return message


def test_an_unload_is_answered_after_its_last_user(server: Server) -> None:
    server.send(load())
    answer = ack(server)
    assert answer.error is None and list(answer.info["adapters"]) == ["a"]  # type: ignore[call-overload]
    params = SamplingParams(max_tokens=20, temperature=0.0)
    server.send(Submit(request_id="r", token_ids=(1, 2, 3), params=params, adapter="a"))
    server.send(UnloadAdapter(call_id="u", name="a"))
    server.send(Submit(request_id="late", token_ids=(1, 2, 3), params=params, adapter="a"))
    order: list[str] = []
    while "u" not in order:
        message = server.receive()
        if isinstance(message, Ack):
            order.append(message.call_id)
            assert message.error is None and message.info["adapters"] == {}
        elif isinstance(message, Deltas):
            order += [f"{d.request_id} {d.finish_reason} {d.error_status}" for d in message.items if d.finish_reason]
    assert order == ["late error 400", "r length None", "u"]


def test_what_is_refused_hurts_nobody(server: Server) -> None:
    for message, words in (
        (load(rank=5), "rank 5, slots hold 4"),
        (LoadAdapter(call_id="x", name="a", path="/nowhere"), "adapter_config.json"),
        (LoadAdapter(call_id="x", name="a:b", tensors=load().tensors, config=load().config), "no name"),
        (LoadAdapter(call_id="x", name="a", tensors=b"nonsense", config=load().config), "no safetensors file"),
        (UnloadAdapter(call_id="x", name="a"), "not loaded"),
    ):
        server.send(message)
        answer = ack(server)
        assert answer.error is not None and words in answer.error and answer.error_status == 400, answer
    server.send(Submit(request_id="r", token_ids=(1, 2, 3), params=SamplingParams(max_tokens=2)))
    assert server.until_ended("r")["r"][-1].finish_reason == "length"
