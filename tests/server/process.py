"""A server process on a small random model, for tests that go through everything."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import torch

from baltoro.chat.tokenizer import BOS, END_OF_MSG, MEDIA_PAD
from baltoro.cli.serve import READY
from baltoro.model.build import new_model
from baltoro.model.weights import save_model
from tests.server.conftest import TOKENIZER
from tests.tiny import tiny_k3

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0


def make_model(folder: Path) -> Path:
    """A model folder: published layout, random weights, the tests' own tokenizer."""
    special = TOKENIZER.special
    config = tiny_k3(
        vocab_size=TOKENIZER.vocab_size,
        bos_token_id=special(BOS),
        eos_token_id=special(END_OF_MSG),
        media_token_id=special(MEDIA_PAD),
        pad_token_id=special("[PAD]"),
    )
    save_model(new_model(config, dtype=torch.float32, seed=3, std=0.2, decay="slow"), folder)
    TOKENIZER.save(folder)
    return folder


@dataclass
class Process:
    """A running `baltoro serve`."""

    popen: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def engine_pid(self) -> int:
        """The engine is the only child that is no resource tracker."""
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        found = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        assert len(found) == 1, children
        return found[0]

    def stats(self) -> dict[str, float]:
        numbers: dict[str, float] = self.http.get("/server_info").json()["state"]
        return numbers

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Signal it and wait; its exit code."""
        self.popen.send_signal(signum)
        return self.popen.wait(timeout_s)


@contextmanager
def serving(model: Path | None, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    """A server until the end of the block, whatever happens in it."""
    command = [sys.executable, "-m", "baltoro", "serve", *([str(model)] if model else []), "--port", "0", *arguments]
    popen = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"BALTORO_THREADS": "1"} | (env or {}),
    )
    process = Process(popen)
    try:
        _wait_ready(process)
        yield process
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait(30)


def _wait_ready(process: Process) -> None:
    stdout = process.popen.stdout
    assert stdout is not None
    is_ready = threading.Event()

    def read() -> None:
        for line in stdout:
            process.lines.append(line)
            found = re.search(r"http://\S+", line)
            if line.startswith(READY) and found:
                process.url = found[0]
                is_ready.set()
        is_ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert is_ready.wait(START_S) and process.url, "".join(process.lines)


def until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until something is so, by asking again and again."""
    deadline = time.monotonic() + timeout_s
    pause = selectors.DefaultSelector()
    while not is_so():
        assert time.monotonic() < deadline, "it did not come true in time"
        pause.select(0.02)
