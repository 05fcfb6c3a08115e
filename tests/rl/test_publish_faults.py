"""Faults on the way of a version, between this process and a real engine: each is caught, by the check that the page
names; the old version then answers as before, and the next one goes through."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baltoro.errors import TransferError, WorkerLost
from baltoro.model.adapter import Adapter, SiteFactors
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.model.lora import add_adapters
from baltoro.rl.engine_process import EnginePolicy
from baltoro.transfer.channel import Channel
from baltoro.transfer.manifest import Manifest, Raw, describe
from baltoro.transfer.messages import Abort, Bucket, Commit, Prepare
from baltoro.transfer.tensors import to_raws
from tests.model.adapters import random_adapter
from tests.rl.engines import (
    CONFIG,
    EXPERTS,
    PROMPT,
    Here,
    adapter,
    ask,
    broken_main,
    finish,
    forgetful_main,
    start,
    tensors,
    tokens,
)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ideas" / "one-base.md"
Frames = list[tuple[msgspec.Struct, bytes]]
Change = Callable[[msgspec.Struct, bytes], Frames]


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[EnginePolicy]:
    with start(folder) as made:
        made.publish(1, tensors(1))
        yield made


class Faulty:
    """A channel whose frames go through `change`."""

    def __init__(self, inner: Channel, change: Change) -> None:
        self._inner, self._change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, header: bytes, pieces: Sequence[memoryview] = (), *, timeout_s: float) -> None:
        message = msgspec.json.decode(header, type=Prepare | Bucket | Commit | Abort)
        for changed, body in self._change(message, b"".join(pieces)):
            self._inner.put(msgspec.json.encode(changed), [memoryview(body)] if body else [], timeout_s=timeout_s)


def content_of(manifest: Manifest, found: Mapping[str, Raw]) -> bytearray:
    """All bytes as they travel."""
    content = bytearray(manifest.num_bytes)
    for entry in manifest.tensors:
        content[entry.offset : entry.end] = found[entry.name].data
    return content


@dataclass(frozen=True)
class Fault:
    """What is done to a version: to its tensors, to its number, or to what is under way."""

    check: str
    tensors: Callable[[int], Mapping[str, Raw]] = tensors
    number: Callable[[int], int] = lambda version: version
    change: Callable[[int], Change] | None = None


def bucket(index: int, change: Callable[[Bucket, bytes], Frames]) -> Callable[[int], Change]:
    return lambda _: (
        lambda message, body: (
            change(message, body) if isinstance(message, Bucket) and message.index == index else [(message, body)]
        )
    )


def rewritten(edit: Callable[[bytearray, Manifest], None]) -> Callable[[int], Change]:
    """Other bytes under the right manifest."""

    def make(version: int) -> Change:
        found = tensors(version)
        manifest = describe(version, found)
        wrong = content_of(manifest, found)
        edit(wrong, manifest)

        def change(message: msgspec.Struct, body: bytes) -> Frames:
            if isinstance(message, Bucket):
                body = bytes(wrong[message.offset : message.offset + message.num_bytes])
            return [(message, body)]

        return change

    return make


def swap_experts(content: bytearray, manifest: Manifest) -> None:
    """Experts 2 and 5 of one matrix change places."""
    entry = next(entry for entry in manifest.tensors if entry.name == EXPERTS)
    size = entry.num_bytes // entry.shape[0]
    a, b = entry.offset + 2 * size, entry.offset + 5 * size
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]


def flip(content: bytearray, manifest: Manifest) -> None:
    content[manifest.tensors[-1].end - 2] ^= 1


def lower_rank(version: int) -> Mapping[str, Raw]:
    """One of its ranks is missing everywhere."""
    return to_raws(random_adapter(CONFIG, 1, seed=version).tensors(CONFIG))


def changed(version: int, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Mapping[str, Raw]:
    found = adapter(version).tensors(CONFIG)
    return to_raws({**found, name: edit(found[name].clone())})


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3] = torch.nan
    return tensor


FAULTS = {
    "a chunk is dropped": Fault("order", change=bucket(1, lambda message, body: [])),
    "a chunk comes twice": Fault("order", change=bucket(1, lambda message, body: [(message, body)] * 2)),
    "a chunk is cut short": Fault("length", change=bucket(1, lambda message, body: [(message, body[:-8])])),
    "two experts are swapped": Fault("digest", change=rewritten(swap_experts)),
    "a byte is flipped": Fault("digest", change=rewritten(flip)),
    "a rank is truncated": Fault("shapes", tensors=lower_rank),
    "a tensor is left out": Fault("names", lambda v: {n: raw for n, raw in tensors(v).items() if n != EXPERTS}),
    "an old version is sent again": Fault("version", tensors=lambda v: tensors(v - 1), number=lambda v: v - 1),
    "an old version is sent under a new number": Fault("unchanged", tensors=lambda v: tensors(v - 1)),
    "the base without an adapter is sent": Fault("empty", tensors=lambda v: {}),
    "a factor is not finite": Fault("install", tensors=lambda v: changed(v, EXPERTS, with_nan)),
    "the sender breaks off": Fault("aborted", change=bucket(1, lambda message, body: [(Abort(message.transfer), b"")])),
}
OTHERS = {  # in tests of their own
    "the sender is killed in the middle": "peer",
    "the cache flush is skipped (the old namespace is kept)": "install",
    "the engine dies in the middle": "peer",
}


def serves(policy: EnginePolicy, here: Here, version: int) -> None:
    """It answers as this version, and says so."""
    name = policy._link.name()
    policy.submit(ask(name, (*PROMPT, 7)))
    found = finish(policy, name)[name]
    assert tokens(found) == here.generate(version, (*PROMPT, 7))
    assert {delta.version for delta in found} == {version} == {policy.version}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_changes_nothing(
    policy: EnginePolicy, here: Here, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, old = FAULTS[name], policy.version
    policy.submit(ask(f"runs-{name}", max_tokens=30))
    with monkeypatch.context() as patch:
        if fault.change is not None:
            connect, change = policy._connect, fault.change(old + 1)
            patch.setattr(policy, "_connect", lambda: Faulty(connect(), change))
        with pytest.raises(TransferError) as caught:
            policy.publish(fault.number(old + 1), fault.tensors(old + 1))
    assert caught.value.check == fault.check
    ran = finish(policy, f"runs-{name}")[f"runs-{name}"]
    assert tokens(ran) == here.generate(old, PROMPT, max_tokens=30) and {delta.version for delta in ran} == {old}
    serves(policy, here, old)
    policy.publish(old + 1, tensors(old + 1))
    serves(policy, here, old + 1)
    assert policy.stats()["num_aborted_reqs"] == 0


KILLED = """
import sys
from baltoro.transfer.local import connect
from baltoro.transfer.transaction import send
from tests.rl.engines import tensors

channel, sent = connect(sys.argv[1], 16 << 10), []

def put(header, pieces=(), *, timeout_s):
    if len(sent) == 3:
        print("in the middle", flush=True)
        sys.stdin.readline()
    sent.append(header)
    plain(header, pieces, timeout_s=timeout_s)

plain, channel.put = channel.put, put
send(channel, 99, tensors(99))
"""


def test_a_sender_that_is_killed_in_the_middle_leaves_the_old_version(policy: EnginePolicy, here: Here) -> None:
    old = policy.version
    command = [sys.executable, "-c", KILLED, str(policy.folder / "versions")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    sender = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert sender.stdout is not None and sender.stdout.readline() == "in the middle\n"
    serves(policy, here, old)  # meanwhile too
    sender.kill()
    sender.communicate()
    serves(policy, here, old)
    policy.publish(old + 1, tensors(old + 1))
    serves(policy, here, old + 1)


def test_a_namespace_that_was_kept_is_refused(folder: Path, here: Here) -> None:
    """An engine that would find prefixes of the old version under the new one does not take the new one at all."""
    with start(folder, entry=forgetful_main) as policy:
        policy.publish(1, tensors(1))
        with pytest.raises(TransferError, match="namespace of its own") as caught:
            policy.publish(2, tensors(2))
        assert caught.value.check == "install"
        serves(policy, here, 1)


def test_an_engine_that_dies_in_the_middle_says_so(folder: Path) -> None:
    with start(folder, entry=broken_main, running="carry") as policy:
        with pytest.raises((TransferError, WorkerLost)):
            policy.publish(1, tensors(1))
        with pytest.raises(WorkerLost, match="leaked"):
            for _ in range(1000):
                policy.poll(1.0)


def test_each_expert_arrives_as_itself(folder: Path) -> None:
    """What no digest can see: experts that changed places before the manifest was made. With factors for one expert
    alone the engine scores as this process does with the same expert, and otherwise with another."""
    site = "model.layers.2.block_sparse_moe.experts.w1"
    full = random_adapter(CONFIG, 2, seed=1, std=0.5, wants=lambda one: one.module.startswith(site[:-1]))
    told, own = [], []
    with start(folder, expected=None) as policy:
        model = policy.trainer_model()
        bank = add_adapters(model, 1, 2)
        for version, expert in enumerate((2, 5), start=1):
            only = {m: SiteFactors(f.a, torch.zeros_like(f.b), f.scale) for m, f in full.factors.items()}
            only[site].b[expert] = full.factors[site].b[expert]
            one = Adapter(full.settings, only)
            policy.publish(version, to_raws(one.tensors(CONFIG)))
            bank.install(1, one)
            told.append(policy.score(PROMPT, IDS))
            own.append(scores_here(model, (*PROMPT, *IDS))[-len(IDS) :])
    for n in range(2):
        assert told[n] == pytest.approx(own[n], abs=1e-5)
        assert told[n] != pytest.approx(own[1 - n], abs=1e-4)


IDS = tuple(range(20, 90))


@torch.inference_mode()
def scores_here(model: K3Model, ids: tuple[int, ...]) -> list[float]:
    """Logprobs of ids 1.. by the trainer's own forward."""
    logits = model(train_context(torch.tensor(ids), (len(ids),), adapters=(1,)))
    picked: list[float] = torch.log_softmax(logits.double(), -1)[torch.arange(len(ids) - 1), ids[1:]].tolist()
    return picked


def test_the_page_lists_every_fault_with_its_check() -> None:
    page = PAGE.read_text().partition("## Faults")[2]
    rows = dict(re.findall(r"^\| ([^|]+?) \| `(\w+)` \|", page, re.MULTILINE))
    assert rows == {name: fault.check for name, fault in FAULTS.items()} | OTHERS
