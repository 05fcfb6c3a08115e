"""The worker against a bare socket: the contract of protocol/worker.py, its ends, and what happens when either dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from baltoro.engine.engine import Engine
from baltoro.engine.line import ParentLine
from baltoro.engine.worker import Worker, serve
from baltoro.errors import ConfigError
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import (
    WIRE_VERSION,
    Abort,
    Ack,
    Deltas,
    Dying,
    Flush,
    FromEngine,
    Hello,
    Query,
    Shutdown,
    Submit,
    ToEngine,
)
from tests.engine.stub import expected, make_engine

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class Server:
    """The other end: a bound ROUTER that speaks to one engine."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.context = zmq.Context.instance()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self.engine = b""

    def receive(self, timeout_ms: int = 30_000) -> FromEngine:
        assert self.socket.poll(timeout_ms), "no message came"
        self.engine, frame = self.socket.recv_multipart()
        return msgspec.msgpack.decode(frame, type=FromEngine)

    def send(self, message: ToEngine) -> None:
        self.socket.send_multipart([self.engine, msgspec.msgpack.encode(message)])

    def until_ended(self, *names: str) -> dict[str, list[TokenDelta]]:
        """Deltas of these requests (one completion each) until all have ended."""
        deltas: dict[str, list[TokenDelta]] = {name: [] for name in names}
        while not all(found and found[-1].finish_reason for found in deltas.values()):
            message = self.receive()
            assert isinstance(message, Deltas), message
            for delta in message.items:
                deltas[delta.request_id].append(delta)
        return deltas


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    end = Server(f"ipc://{tmp_path}/engine")
    yield end
    end.socket.close()


@pytest.fixture
def start(server: Server) -> Iterator[Callable[..., Engine]]:
    """Run a worker on a scripted engine in a thread; it is told to leave at the end."""
    lines, threads = [], []

    def run(**options: object) -> Engine:
        engine = make_engine(**options)
        lines.append(ParentLine(server.address))
        threads.append(threading.Thread(target=Worker(lines[0], engine).work))
        threads[0].start()
        hello = server.receive()
        assert isinstance(hello, Hello) and hello.version == WIRE_VERSION
        assert hello.info["model"]["max_context"] == engine.plan.max_context  # type: ignore[index]
        assert hello.info["memory"]["num_pages"] == 40  # type: ignore[index]
        assert hello.info["process"] == {"id": os.getpid(), "start_bytes": 0}
        return engine

    yield run
    server.send(Shutdown(is_draining=False))
    threads[0].join(timeout=30)
    assert not threads[0].is_alive()
    lines[0].__exit__(None, None, None)


def test_several_requests_stream_back_to_the_server(server: Server, start: Callable[..., Engine]) -> None:
    start()
    prompts = {f"r{i}": tuple(range(i, 3 * i + 2)) for i in range(5)}
    for name, prompt in prompts.items():
        server.send(Submit(request_id=name, token_ids=prompt, params=GREEDY))
    deltas = server.until_ended(*prompts)
    for name, prompt in prompts.items():
        assert [t for d in deltas[name] for t in d.token_ids] == expected(prompt, GREEDY)


def test_a_refused_request_is_answered_for_each_completion(server: Server, start: Callable[..., Engine]) -> None:
    start(max_context=150, max_waiting=1, num_slots=1)
    params = SamplingParams(temperature=0.0, max_tokens=140)
    server.send(Submit(request_id="too long", token_ids=(1,) * 150, params=params, n=2))
    message = server.receive()
    assert isinstance(message, Deltas)
    assert [(d.index, d.finish_reason, d.error_status) for d in message.items] == [(0, "error", 400), (1, "error", 400)]
    assert "150 together" in str(message.items[0].error)
    for name in ("runs", "waits", "crowd"):
        server.send(Submit(request_id=name, token_ids=(1, 2), params=params))
        if name == "runs":
            server.receive()
    deltas = server.until_ended("runs", "waits", "crowd")
    assert deltas["crowd"][-1].error_status == 429
    assert deltas["runs"][-1].finish_reason == deltas["waits"][-1].finish_reason == "length"


def test_abort_ends_a_running_request(server: Server, start: Callable[..., Engine]) -> None:
    engine = start()
    server.send(Submit(request_id="a", token_ids=(1, 2), params=SamplingParams(max_tokens=150)))
    first = server.receive()
    assert isinstance(first, Deltas) and first.items[0].finish_reason is None
    server.send(Abort("a"))
    assert server.until_ended("a")["a"][-1].finish_reason == "abort"
    server.send(Query("q"))
    answer = server.receive()
    assert isinstance(answer, Ack) and answer.call_id == "q"
    assert answer.info["num_running_reqs"] == answer.info["pages_used"] == 0
    assert engine.stats()["num_aborted_reqs"] == 1


def test_calls_are_answered(server: Server, start: Callable[..., Engine]) -> None:
    start()
    server.send(Flush("f"))
    assert server.receive() == Ack(call_id="f")


def test_draining_finishes_what_runs_and_refuses_the_rest(server: Server, start: Callable[..., Engine]) -> None:
    start()
    server.send(Submit(request_id="a", token_ids=(1, 2), params=SamplingParams(temperature=0.0, max_tokens=60)))
    server.receive()
    server.send(Shutdown(is_draining=True))
    server.send(Submit(request_id="late", token_ids=(1,), params=GREEDY))
    deltas = server.until_ended("a", "late")
    assert deltas["a"][-1].finish_reason == "length"
    assert deltas["late"][-1].error_status == 503


def test_a_model_that_cannot_be_loaded_is_told(server: Server) -> None:
    def build() -> Engine:
        raise ConfigError("config.json lacks vocab_size")

    with pytest.raises(ConfigError):
        serve(server.address, build)
    assert server.receive() == Dying("ConfigError: config.json lacks vocab_size")


def _spawn(kind: str, address: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.engine.worker_process", kind, address]
    return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_broken_invariant_ends_the_process_with_its_reason(server: Server) -> None:
    process = _spawn("leaking", server.address)
    assert isinstance(server.receive(), Hello)
    server.send(Submit(request_id="a", token_ids=(1, 2), params=GREEDY))
    messages = [server.receive()]
    while not isinstance(messages[-1], Dying):
        messages.append(server.receive())
    assert messages[-1] == Dying("LeakError: pages [7]: leaked: neither free nor held")
    assert process.wait(timeout=30) != 0


@pytest.mark.slow
def test_sigterm_drains(server: Server) -> None:
    process = _spawn("plain", server.address)
    assert isinstance(server.receive(), Hello)
    server.send(Submit(request_id="a", token_ids=(1, 2), params=SamplingParams(temperature=0.0, max_tokens=100)))
    server.receive()
    process.send_signal(signal.SIGTERM)
    assert server.until_ended("a")["a"][-1].finish_reason == "length"
    assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_an_orphan_ends_itself(server: Server) -> None:
    parent = _spawn("orphan", server.address)
    assert parent.stdout is not None and parent.stdin is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    assert isinstance(server.receive(), Hello)
    parent.kill()
    parent.wait(timeout=30)
    gone = select.poll()
    gone.register(child, select.POLLIN)
    assert gone.poll(15_000), "the worker outlived its parent"
    os.close(child)


def test_a_worker_that_drains_finishes_its_disk_tier(server: Server, tmp_path: Path) -> None:
    options = {"prefix_cache": True, "hash_endpoint": 4, "track_interval": 8, "host_cache_bytes": 6_000}
    options |= {"disk_cache_dir": str(tmp_path / "prefixes")}

    def drain() -> None:
        assert isinstance(server.receive(), Hello)
        for name in "abcdefghi":
            prompt = tuple((ord(name) * 7 + at) % 50 for at in range(60))
            server.send(Submit(request_id=name, token_ids=prompt, params=GREEDY))
        server.send(Shutdown())

    client = threading.Thread(target=drain)
    client.start()
    serve(server.address, lambda: make_engine(**options))  # in the main thread: it listens for SIGTERM
    client.join(30)
    again = make_engine(**options)  # the folder is free
    assert again.stats()["disk_entries"] == len(list((tmp_path / "prefixes").glob("*.prefix"))) > 0  # type: ignore[operator]
    again.close()
