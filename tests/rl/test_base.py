"""One base, two processes: an engine that owns it, a trainer that maps it. Measured, not assumed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baltoro.engine.base import share_model
from baltoro.errors import DigestMismatch
from baltoro.model.build import new_model
from baltoro.model.weights import save_model
from baltoro.rl.engine_process import EnginePolicy
from baltoro.transfer.manifest import decode
from baltoro.transfer.shared_base import share_of
from tests.rl.engines import Here, ask, engine_config, finish, start, tokens
from tests.tiny import tiny_k3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="proportional memory: Linux alone"),
]
ROOT = Path(__file__).resolve().parents[2]
# 64 MiB of float32 weights, and MXFP4 experts
WIDE = tiny_k3(
    vision=None,
    media_token_id=None,
    num_layers=4,
    mla_layers=(3,),
    hidden_size=512,
    vocab_size=15000,
    latent_size=256,
    expert_intermediate_size=128,
    are_experts_packed=True,
)

TRAINER = """
import sys
import torch
from pathlib import Path
from baltoro.model.config import K3Config
from baltoro.model.context import train_context
from baltoro.model.lora import add_adapters
from baltoro.rl.base import open_model
from tests.model.adapters import random_adapter

def anonymous():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))

torch.set_num_threads(1)
folder, path, digest = sys.argv[1:]
config = K3Config.load(folder)
(torch.ones(300, 300, requires_grad=True) @ torch.ones(300, 300)).sum().backward()  # what torch itself takes
before = anonymous()
model, base = open_model(config, path, digest)
bank = add_adapters(model, 1, 2)
bank.install(1, random_adapter(config, 2))
for parameter in bank.parameters():
    parameter.requires_grad_(True)
logits = model(train_context(torch.arange(12), (5, 7), adapters=(1, 1)))
logits.square().mean().backward()
changed = sum(p.grad is not None and bool(p.grad.any()) for p in bank.parameters())
grads = sum(p.grad.nbytes for p in bank.parameters())
base.verify()  # reads all of it
del logits
print(changed, anonymous() - before - bank.num_bytes - grads, flush=True)
if sys.stdin.readline() == "write\\n":
    next(model.parameters()).data[0] = 1
    print("written", flush=True)
"""


class Trainer:
    """The other process, as far as its first step."""

    def __init__(self, folder: Path, facts: dict[str, str]) -> None:
        command = [sys.executable, "-c", TRAINER, str(folder), facts["path"], facts["digest"]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        line = self.process.stdout.readline().split()
        assert len(line) == 2, "the trainer failed"
        self.num_changed, self.own_bytes = map(int, line)

    def end(self, word: str = "") -> tuple[str, int]:
        out, _ = self.process.communicate(f"{word}\n")
        return out, self.process.returncode


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wide")
    save_model(new_model(WIDE, std=0.02), place)
    return place


@pytest.fixture
def policy(folder: Path) -> Iterator[EnginePolicy]:
    with start(folder) as made:
        yield made


def anonymous(process_id: int) -> int:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_engine_and_trainer_hold_the_base_once(wide: Path) -> None:
    """Their proportional shares of the map add up to one base, and neither has a copy beside it."""
    config = engine_config(memory_bytes=8 << 20, max_context=64)
    with start(wide, config=config, is_base_shared=False, expected=None) as alone:
        alone.submit(ask("r"))
        finish(alone, "r")
        own = anonymous(alone.process_id)
        assert "base" not in alone.info
    with start(wide, config=config, expected=None) as policy:
        facts = policy.info["base"]
        size = facts["num_bytes"]
        assert size > 60 << 20
        policy.submit(ask("r"))
        finish(policy, "r")
        # what is left of the difference is heap that glibc keeps: which tensors there are is told exactly below
        assert own - anonymous(policy.process_id) > 0.7 * size, "the engine has a copy of its own"
        trainer = Trainer(wide, facts)
        assert trainer.num_changed > 10
        assert trainer.own_bytes < 0.05 * size + (8 << 20), "the trainer has a copy, or keeps one for backward"
        shares = [share_of(facts["path"], pid) for pid in (policy.process_id, trainer.process.pid)]
        assert all(share.resident_bytes == pytest.approx(size, rel=0.01) for share in shares)
        assert sum(share.proportional_bytes for share in shares) / size == pytest.approx(1.0, abs=0.01)
        trainer.end()


def test_every_tensor_of_the_engine_lies_in_the_map(tmp_path: Path) -> None:
    """Parameters, buffers, and what merging made: nothing of the base has memory of its own."""
    model, base = share_model(new_model(WIDE, std=0.02), tmp_path / "base")
    whole = torch.frombuffer(base.content, dtype=torch.uint8)
    found = list(model.state_dict().values())
    for module in model.modules():
        found += [t for t in (getattr(module, "_merged", None), getattr(module, "_conv_weight", None)) if t is not None]
    assert len(found) > len(model.state_dict())
    assert all(t.untyped_storage().data_ptr() == whole.data_ptr() for t in found)


def test_nobody_can_write_to_it(policy: EnginePolicy, folder: Path) -> None:
    out, code = Trainer(folder, policy.info["base"]).end("write")
    assert (out, code) == ("", -signal.SIGSEGV)
    policy.trainer_model()  # compares every byte


def test_a_changed_byte_and_another_base_are_refused(policy: EnginePolicy) -> None:
    path = Path(policy.info["base"]["path"])
    path.chmod(0o600)
    place = decode(path.with_name(path.name + ".json").read_bytes()).tensors[-1].offset  # between two there is padding
    with path.open("r+b") as file:
        old = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([old[0] ^ 4]), place)
        with pytest.raises(DigestMismatch, match="is not what was written"):
            policy.trainer_model()
        os.pwrite(file.fileno(), old, place)
    policy.trainer_model()
    policy.info["base"]["digest"] = "0" * 64
    with pytest.raises(DigestMismatch, match="wanted 0000"):
        policy.trainer_model()


def test_the_engine_outlives_a_trainer_that_is_killed(policy: EnginePolicy, folder: Path) -> None:
    trainer = Trainer(folder, policy.info["base"])
    trainer.process.kill()
    trainer.process.wait()
    policy.submit(ask("r"))
    assert tokens(finish(policy, "r")["r"]) == Here(folder).generate(0)
    assert Trainer(folder, policy.info["base"]).num_changed > 10, "the next trainer finds it"


def test_the_names_go_with_the_engine_and_the_map_stays(folder: Path) -> None:
    policy = start(folder)
    model = policy.trainer_model()
    path = Path(policy.info["base"]["path"])
    before = model.lm_head.weight.clone()
    descriptor = os.pidfd_open(policy.process_id)
    policy.close()
    assert select.select([descriptor], [], [], 10)[0] and not path.exists()
    os.close(descriptor)
    assert torch.equal(model.lm_head.weight, before)
