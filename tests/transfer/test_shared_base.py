"""A base that several processes map: one set of bytes, read-only, and the right one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baltoro.errors import ConfigError, DigestMismatch
from baltoro.transfer.shared_base import SharedBase, open_base, share_of, write_base
from baltoro.transfer.tensors import to_raws, to_tensor

ROOT = Path(__file__).resolve().parents[2]
TENSORS = {"packed": torch.arange(100, dtype=torch.uint8).reshape(4, 25), "norm": torch.linspace(0, 1, 7)}
needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="proportional memory: Linux alone")


@pytest.fixture
def folder() -> Iterator[Path]:
    """In RAM where there is such a place."""
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        yield Path(name)


@pytest.fixture
def base(folder: Path) -> Iterator[SharedBase]:
    with write_base(folder / "base", to_raws(TENSORS)) as made:
        yield made


def test_tensors_are_read_where_they_lie(base: SharedBase) -> None:
    with open_base(base.path, base.digest) as other:
        for name, tensor in TENSORS.items():
            found = to_tensor(other.tensors[name])
            assert torch.equal(found, tensor)
            assert other.tensors[name].data.readonly
            del found


@pytest.mark.slow
def test_nobody_can_write_through_it(base: SharedBase) -> None:
    with pytest.raises(TypeError):
        base.tensors["norm"].data[0] = 1
    assert base.path.stat().st_mode & 0o222 == 0
    write = (
        "import sys; from baltoro.transfer.shared_base import open_base\n"
        "from baltoro.transfer.tensors import to_tensor\n"
        "to_tensor(open_base(sys.argv[1], sys.argv[2]).tensors['norm'])[0] = 1\n"
    )
    done = subprocess.run([sys.executable, "-c", write, str(base.path), base.digest], cwd=ROOT, capture_output=True)
    assert done.returncode == -11, done.stderr
    base.verify()


def test_another_base_is_refused(base: SharedBase, folder: Path) -> None:
    other = write_base(folder / "other", to_raws({**TENSORS, "norm": torch.zeros(7)}))
    with pytest.raises(DigestMismatch, match="wanted"):
        open_base(other.path, base.digest)
    other.close()


@pytest.mark.parametrize("at", [0, 99, 128])
def test_a_changed_byte_is_seen_at_the_opening_and_later(base: SharedBase, at: int) -> None:
    base.path.chmod(0o644)
    with base.path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))
    with pytest.raises(DigestMismatch, match="digest"):
        open_base(base.path, base.digest)
    with pytest.raises(DigestMismatch, match="not what was written"):
        base.verify()


def test_a_cut_file_and_a_missing_one_are_refused(base: SharedBase, folder: Path) -> None:
    copy = folder / "copy"
    copy.write_bytes(base.path.read_bytes()[:-1])
    Path(f"{copy}.json").write_bytes(base.manifest.encode())
    with pytest.raises(DigestMismatch):
        open_base(copy, base.digest)
    with pytest.raises(ConfigError, match="no base"):
        open_base(folder / "nothing", base.digest)


def test_it_is_written_once(base: SharedBase) -> None:
    with pytest.raises(ConfigError, match="written once"):
        write_base(base.path, to_raws(TENSORS))
    assert sorted(p.name for p in base.path.parent.iterdir()) == ["base", "base.json"]


def test_who_has_it_mapped_keeps_it_when_its_name_is_gone(base: SharedBase) -> None:
    with open_base(base.path, base.digest) as other:
        base.remove()
        assert list(base.path.parent.iterdir()) == []
        other.verify()


READER = """
import sys
from baltoro.transfer.shared_base import open_base, share_of
base = open_base(sys.argv[1], sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
share = share_of(sys.argv[1])
print(share.resident_bytes, share.proportional_bytes, flush=True)
sys.stdin.readline()
"""


@needs_smaps
@pytest.mark.slow
def test_two_processes_hold_one_set_of_bytes(folder: Path) -> None:
    """Owner and reader have each read all of it; their proportional shares add up to one base, not two."""
    size = 8 << 20
    with write_base(folder / "base", to_raws({"w": torch.arange(size, dtype=torch.int64).to(torch.uint8)})) as base:
        assert share_of(base.path).proportional_bytes == pytest.approx(size, rel=0.01)
        command = [sys.executable, "-c", READER, str(base.path), base.digest]
        reader = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert reader.stdin and reader.stdout
        assert reader.stdout.readline() == "ready\n"
        reader.stdin.write("\n")
        reader.stdin.flush()
        resident, proportional = map(int, reader.stdout.readline().split())
        mine = share_of(base.path)
        reader.communicate("\n")
    assert resident == pytest.approx(size, rel=0.01) and mine.resident_bytes == pytest.approx(size, rel=0.01)
    assert (proportional + mine.proportional_bytes) / size == pytest.approx(1.0, rel=0.01)
