"""One base on a GPU for an engine and a trainer of two processes: CUDA IPC itself, and what stands on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baltoro.errors import DigestMismatch, WorkerLost
from baltoro.model.build import new_model
from baltoro.model.context import train_context
from baltoro.model.lora import add_adapters
from baltoro.model.weights import save_model
from baltoro.rl.engine_process import EnginePolicy
from tests.contract.tree import ROOT
from tests.rl.engines import CONFIG, PROMPT, adapter, ask, engine_config, finish, start, tensors, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TRAINER = """
import sys, torch
from baltoro.model.config import K3Config
from baltoro.model.context import train_context
from baltoro.rl.base import open_model
folder, path, digest = sys.argv[1:]
model, base = open_model(K3Config.load(folder), path, digest, device="cuda")
model(train_context(torch.arange(6, device="cuda"), (6,)))
base.check()
print("open", flush=True)
word = sys.stdin.readline().strip()
if word == "write":
    base.content[5000] ^= 1
    torch.cuda.synchronize()
    print("written", flush=True)
    sys.stdin.readline()
"""


class Trainer:
    """Another process on the base."""

    def __init__(self, policy: EnginePolicy, folder: Path) -> None:
        facts = policy.info["base"]
        command = [sys.executable, "-c", TRAINER, str(folder), facts["path"], facts["digest"]]
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline() == "open\n"

    def say(self, word: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_model(new_model(CONFIG, std=0.15, seed=3, decay="slow"), place)
    return place


@pytest.fixture
def policy(folder: Path) -> Iterator[EnginePolicy]:
    config = engine_config(device="cuda", dtype="float32", memory_bytes=32 << 20, graph_batch=4)
    with start(folder, config=config) as made:
        yield made


def test_the_trainer_computes_on_the_engines_bytes(policy: EnginePolicy) -> None:
    """It allocates next to nothing, scores as the engine does with an adapter, and so does a captured step."""
    before = torch.cuda.memory_allocated()
    model = policy.trainer_model()
    held = torch.cuda.memory_allocated() - before
    assert model.device.type == "cuda" and held < 0.05 * policy.info["base"]["num_bytes"]
    policy.publish(1, tensors(1))
    bank = add_adapters(model, 1, 2)
    bank.install(1, adapter(1))
    policy.submit(ask("r", max_tokens=12))
    deltas = finish(policy, "r")["r"]
    output = tokens(deltas)
    told = [value for delta in deltas for value in delta.logprobs or ()]
    ids = torch.tensor((*PROMPT, *output), device="cuda")
    with torch.no_grad():
        logits = model(train_context(ids, (len(ids),), adapters=(1,))).log_softmax(-1)
    own = logits[len(PROMPT) - 1 : -1].gather(-1, ids[len(PROMPT) :, None])[:, 0].tolist()
    scored = policy.score(PROMPT, output)
    for engine, again, trainer in zip(told, scored, own, strict=True):
        assert engine == pytest.approx(trainer, abs=2e-3) and again == pytest.approx(trainer, abs=2e-3)
    del model, bank, logits


def test_a_trainer_that_is_killed_takes_nothing_along(policy: EnginePolicy, folder: Path) -> None:
    policy.submit(ask("a"))
    expected = tokens(finish(policy, "a")["a"])
    trainer = Trainer(policy, folder)
    trainer.process.kill()
    trainer.process.wait()
    policy.submit(ask("b", (*PROMPT,)))
    assert tokens(finish(policy, "b")["b"]) == expected
    second = Trainer(policy, folder)
    second.say("go")
    second.process.wait(30)


def test_a_flipped_byte_is_found_by_both_ends(policy: EnginePolicy, folder: Path) -> None:
    policy.publish(1, tensors(1))
    model = policy.trainer_model()
    writer = Trainer(policy, folder)
    assert writer.say("write") == "written\n"
    with pytest.raises(DigestMismatch, match="was written to"):
        policy.publish(2, tensors(2))
    del model
    policy._bases.clear()  # the engine's own look at it, then
    with pytest.raises(Exception, match=r"install|peer|timeout|gone"):
        policy.publish(2, tensors(2))
    with pytest.raises(WorkerLost, match="DigestMismatch"):
        for _ in range(100):
            policy.stats()
    writer.say("go")
    writer.process.wait(30)


def test_sleep_and_wake_return_to_the_same_bytes(policy: EnginePolicy) -> None:
    policy.submit(ask("a"))
    expected = tokens(finish(policy, "a")["a"])
    for _ in range(3):
        policy.sleep()
        assert policy.given_back["given_back_bytes"] > 0, "graphs are captured, and the addresses stay"
        policy.wake()
        policy.submit(ask("b"))
        assert tokens(finish(policy, "b")["b"]) == expected
