"""Transactions with faults put in between the ends: each is caught, by the check that the docs name, and the old
version serves on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import msgspec
import pytest
import torch

from baltoro.errors import TransferError
from baltoro.transfer.channel import MAX_IN_FLIGHT
from baltoro.transfer.local import Listener, LocalChannel, pair
from baltoro.transfer.manifest import Manifest, Raw, raws
from baltoro.transfer.messages import Abort, Bucket, Commit, Prepare
from baltoro.transfer.tensors import to_raws, to_tensor
from baltoro.transfer.transaction import HostCopy, Receipt, Receiver, send

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rooms" / "transfer.md"
BUCKET_BYTES = 256
EXPERTS = "layers.1.experts.w1.lora_B"


def adapter(version: int) -> dict[str, Raw]:
    """Four experts with distinct constants, and a few factors of other shapes: 1.5 KiB in 256-byte buckets."""
    number = float(version)
    experts = torch.arange(4.0).reshape(4, 1, 1).expand(4, 16, 3) + number
    tensors = {
        "layers.0.o_proj.lora_A": torch.full((3, 20), number),
        EXPERTS: experts,
        "layers.1.q_proj.lora_B": torch.full((7, 3), -number, dtype=torch.bfloat16),
    }
    return to_raws(tensors)


KINDS = {name: (raw.dtype, raw.shape) for name, raw in adapter(1).items()}
Change = Callable[[msgspec.Struct, bytes], Sequence[tuple[bytes, bytes]]]


class Faulty:
    """An end whose frames go through `change`: what is sent in the place of each message."""

    def __init__(self, inner: LocalChannel, change: Change) -> None:
        self._inner, self._change = inner, change

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, header: bytes, pieces: Sequence[memoryview] = (), *, timeout_s: float) -> None:
        message = msgspec.json.decode(header, type=Prepare | Bucket | Commit | Abort)
        for changed, body in self._change(message, b"".join(pieces)):
            self._inner.put(changed, [memoryview(body)] if body else [], timeout_s=timeout_s)


@dataclass
class Rig:
    """A receiver with version 1 installed, and a way to send it more."""

    near: LocalChannel
    far: LocalChannel
    target: HostCopy
    receiver: Receiver

    def deliver(self, version: int, change: Change | None = None, tensors: Mapping[str, Raw] | None = None) -> Receipt:
        """Send, while a thread receives. Errors: the sender's, once both ends agree on the check."""
        heard: list[str | Manifest] = []

        def receive() -> None:
            try:
                heard.append(self.receiver.receive(idle_s=5, timeout_s=1))
            except TransferError as error:
                heard.append(error.check)

        thread = Thread(target=receive)
        thread.start()
        channel = Faulty(self.near, change) if change else self.near
        try:
            receipt = send(channel, version, adapter(version) if tensors is None else tensors, timeout_s=3)  # type: ignore[arg-type]
        except TransferError as error:
            thread.join()
            assert heard == [error.check], "the two ends name different checks"
            raise
        thread.join()
        assert heard == [receipt.manifest]
        return receipt

    def serves(self, version: int) -> bool:
        """Is it this version, to the last byte, and not paused?"""
        assert self.target.manifest
        found = {name: bytes(raw.data) for name, raw in raws(self.target.manifest, self.target.content).items()}
        wanted = {name: bytes(raw.data) for name, raw in adapter(version).items()}
        return self.target.version == version and found == wanted and not self.target.is_paused


@pytest.fixture
def rig() -> Iterator[Rig]:
    near, far = pair(BUCKET_BYTES)
    target = HostCopy(KINDS)
    made = Rig(near, far, target, Receiver(far, target))
    made.deliver(1)
    yield made
    near.close()
    far.close()


def plain(message: msgspec.Struct, body: bytes) -> tuple[bytes, bytes]:
    return msgspec.json.encode(message), body


def on_bucket(index: int, change: Callable[[Bucket, bytes], Sequence[tuple[bytes, bytes]]]) -> Change:
    def changed(message: msgspec.Struct, body: bytes) -> Sequence[tuple[bytes, bytes]]:
        if isinstance(message, Bucket) and message.index == index:
            return change(message, body)
        return [plain(message, body)]

    return changed


def drop(message: Bucket, body: bytes) -> Sequence[tuple[bytes, bytes]]:
    return []


def twice(message: Bucket, body: bytes) -> Sequence[tuple[bytes, bytes]]:
    return [plain(message, body)] * 2


def truncate(message: Bucket, body: bytes) -> Sequence[tuple[bytes, bytes]]:
    return [plain(message, body[:-8])]


def truncate_and_say_so(message: Bucket, body: bytes) -> Sequence[tuple[bytes, bytes]]:
    return [plain(msgspec.structs.replace(message, num_bytes=message.num_bytes - 8), body[:-8])]


def flip(message: Bucket, body: bytes) -> Sequence[tuple[bytes, bytes]]:
    return [plain(message, body[:40] + bytes([body[40] ^ 4]) + body[41:])]


def of_another(message: Bucket, body: bytes) -> Sequence[tuple[bytes, bytes]]:
    return [plain(msgspec.structs.replace(message, transfer="0123456789abcdef"), body)]


def change_manifest(change: Callable[[Manifest], Manifest]) -> Change:
    def changed(message: msgspec.Struct, body: bytes) -> Sequence[tuple[bytes, bytes]]:
        if isinstance(message, Prepare):
            message = msgspec.structs.replace(message, manifest=change(message.manifest))
        return [plain(message, body)]

    return changed


def swapped_experts() -> Change:
    """Bytes of experts 1 and 2 exchanged on their way: the same sizes, sums and names."""
    size = 16 * 3 * 4
    manifest_at = {"offset": -1}

    def changed(message: msgspec.Struct, body: bytes) -> Sequence[tuple[bytes, bytes]]:
        if isinstance(message, Prepare):
            manifest_at["offset"] = next(t.offset for t in message.manifest.tensors if t.name == EXPERTS)
        if isinstance(message, Bucket):
            whole = b"".join(bytes(raw.data) for name, raw in adapter(2).items() if name == EXPERTS)
            parts = [whole[i * size : (i + 1) * size] for i in range(4)]
            parts[1], parts[2] = parts[2], parts[1]
            start = manifest_at["offset"]
            places = range(message.offset, message.offset + len(body))
            swapped = b"".join(parts)
            body = bytes(
                swapped[p - start] if 0 <= p - start < len(swapped) else b for p, b in zip(places, body, strict=True)
            )
        return [plain(message, body)]

    return changed


def swap_digests(manifest: Manifest) -> Manifest:
    one, two, *rest = manifest.tensors
    replace = msgspec.structs.replace
    return replace(manifest, tensors=(replace(one, sha256=two.sha256), replace(two, sha256=one.sha256), *rest))


def without_last(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, tensors=manifest.tensors[:-1])


def named_twice(manifest: Manifest) -> Manifest:
    one, two, *rest = manifest.tensors
    return msgspec.structs.replace(manifest, tensors=(one, msgspec.structs.replace(two, name=one.name), *rest))


# fault, as the docs name it -> (what happens on the way, the check that catches it)
FAULTS: dict[str, tuple[Change, str]] = {
    "a bucket is dropped": (on_bucket(1, drop), "order"),
    "the last bucket is dropped": (on_bucket(4, drop), "count"),
    "a bucket comes twice": (on_bucket(1, twice), "order"),
    "a bucket is cut short": (on_bucket(2, truncate), "length"),
    "a bucket is cut short and says so": (on_bucket(2, truncate_and_say_so), "order"),
    "the last bucket is cut short and says so": (on_bucket(4, truncate_and_say_so), "count"),
    "a byte is flipped": (on_bucket(2, flip), "digest"),
    "two experts are swapped": (swapped_experts(), "digest"),
    "two names are swapped": (change_manifest(swap_digests), "digest"),
    "a bucket of an older transfer is sent again": (on_bucket(1, of_another), "transfer"),
    "a tensor is left out": (change_manifest(without_last), "names"),
    "a tensor is named twice": (change_manifest(named_twice), "names"),
    "another format": (change_manifest(lambda m: msgspec.structs.replace(m, format=9)), "format"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_is_caught_and_the_old_version_serves(rig: Rig, fault: str) -> None:
    change, check = FAULTS[fault]
    with pytest.raises(TransferError) as caught:
        rig.deliver(2, change)
    assert caught.value.check == check
    assert rig.serves(1)
    rig.deliver(2)  # and the next attempt goes through
    assert rig.serves(2)


def test_a_version_arrives_bit_for_bit(rig: Rig) -> None:
    receipt = rig.deliver(2)
    assert rig.serves(2) and receipt.num_buckets == 5
    assert rig.near.most_in_flight <= MAX_IN_FLIGHT


@pytest.mark.parametrize("version", [0, 1])
def test_an_old_version_is_refused(rig: Rig, version: int) -> None:
    with pytest.raises(TransferError, match=r"^version: "):
        rig.deliver(version)
    assert rig.serves(1)


def test_a_version_without_a_change_is_refused(rig: Rig) -> None:
    """B.2 7: a run that only ever sent the same bytes."""
    with pytest.raises(TransferError, match=r"^unchanged: "):
        rig.deliver(2, tensors=adapter(1))
    assert rig.serves(1)


def test_an_empty_version_is_refused(rig: Rig) -> None:
    with pytest.raises(TransferError, match=r"^empty: "):
        rig.deliver(2, tensors={})


def test_tensors_of_another_shape_are_refused(rig: Rig) -> None:
    wrong = adapter(2) | {EXPERTS: to_raws({"x": torch.zeros(4, 3, 16)})["x"]}
    with pytest.raises(TransferError, match=r"^shapes: "):
        rig.deliver(2, tensors=wrong)


def test_a_sender_that_breaks_off_is_heard(rig: Rig) -> None:
    def give_up(message: Bucket, body: bytes) -> Sequence[tuple[bytes, bytes]]:
        raise TransferError("the export failed", check="aborted")

    with pytest.raises(TransferError, match="the export failed"):
        rig.deliver(2, on_bucket(2, give_up))
    assert rig.serves(1)


def test_an_end_that_dies_in_the_middle_leaves_the_old_version(rig: Rig) -> None:
    def die(message: Bucket, body: bytes) -> Sequence[tuple[bytes, bytes]]:
        rig.near.close()
        raise TransferError("killed", check="peer")

    with pytest.raises(TransferError):
        rig.deliver(2, on_bucket(2, die))
    assert rig.serves(1)


def test_a_sender_that_falls_silent_is_not_waited_for(rig: Rig) -> None:
    """The receiver gives up and serves; what comes later is no transfer."""
    rig.near.put(
        msgspec.json.encode(Prepare("x", msgspec.structs.replace(rig.receiver.installed, version=2))), timeout_s=1
    )  # type: ignore[type-var]
    with pytest.raises(TransferError):
        rig.receiver.receive(idle_s=1, timeout_s=0.05)
    assert rig.serves(1)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from baltoro.transfer.local import LocalChannel, connect
from baltoro.transfer.transaction import send
from tests.transfer.test_transaction import adapter

class Killed(LocalChannel):
    def put(self, header, pieces=(), *, timeout_s):
        super().put(header, pieces, timeout_s=timeout_s)
        if b'"index":3' in header:
            os.kill(os.getpid(), signal.SIGKILL)

channel = connect(sys.argv[1], 256)
channel.__class__ = Killed
send(channel, 2, adapter(2))
"""


@pytest.mark.slow
def test_a_sender_killed_in_the_middle_leaves_the_old_version(rig: Rig, tmp_path: Path) -> None:
    """kill -9 of a real process, after three of five buckets and a half."""
    listener = Listener(tmp_path / "socket")
    root = Path(__file__).resolve().parents[2]
    sender = subprocess.Popen([sys.executable, "-c", KILLED, str(listener.path), str(root)], cwd=root)
    channel = listener.accept(timeout_s=30)
    receiver = Receiver(channel, rig.target)
    with pytest.raises(TransferError, match=r"^peer: "):
        receiver.receive(idle_s=30)
    assert sender.wait() == -9
    assert rig.serves(1)
    channel.close()
    listener.close()


class Stubborn(HostCopy):
    """Fails to install version 2."""

    def install(self, manifest: Manifest, staged: memoryview) -> None:
        assert self.is_paused
        if manifest.version == 2:
            raise RuntimeError("no slot")
        super().install(manifest, staged)


def test_a_failed_install_resumes_the_old_version_and_is_told() -> None:
    """B.2 13: the pause is over whatever happens."""
    near, far = pair(BUCKET_BYTES)
    target = Stubborn(KINDS)
    receiver = Receiver(far, target)
    errors: list[str] = []

    def serve() -> None:
        for _ in range(3):
            try:
                receiver.receive(idle_s=5)
            except RuntimeError as error:
                errors.append(str(error))

    thread = Thread(target=serve)
    thread.start()
    send(near, 1, adapter(1))
    with pytest.raises(TransferError, match=r"^install: "):
        send(near, 2, adapter(2))
    assert target.version == 1 and not target.is_paused
    send(near, 3, adapter(3))
    thread.join()
    assert errors == ["no slot"] and target.version == 3 and not target.is_paused


def test_each_expert_arrives_as_itself(rig: Rig) -> None:
    """B.2 9: the fingerprint of an expert is the constant that only it has."""
    rig.deliver(2)
    assert rig.target.manifest
    experts = to_tensor(raws(rig.target.manifest, rig.target.content)[EXPERTS])
    assert experts[:, 0, 0].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_the_table_of_the_docs_is_this_one() -> None:
    rows = dict(re.findall(r"^\| ([^|]+?) \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    for fault, (_, check) in FAULTS.items():
        assert rows.get(fault) == check, fault
