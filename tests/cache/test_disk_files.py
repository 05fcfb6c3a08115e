"""Files of the disk tier: altered, strange, interrupted ones are misses, and those of others are left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baltoro.cache.disk import DiskTier
from baltoro.cache.disk_files import SUFFIX, UNFINISHED, file_bytes
from baltoro.cache.tier import Landed
from baltoro.errors import ConfigError
from tests.cache.disk_fakes import make_record, wait_for


@pytest.mark.parametrize("where", [0, 8, 24, 40, 52, 70, 90, -1])
def test_one_altered_byte_is_a_miss(tmp_path: Path, where: int) -> None:
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    record = make_record(1)
    assert tier.put(record)
    (path,) = tmp_path.glob("*" + SUFFIX)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    assert tier.get(record.digest) is None
    assert not path.exists() and tier.lookup(record.digest) is None
    assert tier.stats().num_bad_total == 1 and tier.stats().num_bytes == 0
    assert tier.put(record) and tier.get(record.digest) == record, "a lost record can come again"
    tier.close()


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("fault", ["short", "long", "empty", "other name", "fingerprint", "version"])
def test_a_file_that_is_not_right_is_a_miss(tmp_path: Path, fault: str, is_open: bool) -> None:
    """Found out when it is opened, or when it is read if it went wrong after that."""
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    record, other = make_record(1), make_record(2)
    assert tier.put(record) and tier.put(other)
    if not is_open:
        tier.close()
    path = tmp_path / (record.digest.hex() + SUFFIX)
    content = path.read_bytes()
    if fault == "other name":
        content = (tmp_path / (other.digest.hex() + SUFFIX)).read_bytes()
    if fault == "fingerprint":
        strange = DiskTier.open(tmp_path / "strange", 10_000, b"model of yesterday")
        assert strange.put(record)
        strange.close()
        content = (tmp_path / "strange" / path.name).read_bytes()
    changed = {"short": content[:-1], "long": content + b"x", "empty": b"", "version": b"baltkv00" + content[8:]}
    path.write_bytes(changed.get(fault, content))
    if not is_open:
        tier = DiskTier.open(tmp_path, 10_000, b"model")
        assert tier.lookup(record.digest) is None
    assert tier.get(record.digest) is None
    assert not path.exists()
    assert tier.stats().num_bad_total == 1 and tier.stats().num_bytes == file_bytes(other)
    assert tier.get(other.digest) == other
    tier.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ("folder" + SUFFIX)).mkdir()
    tier = DiskTier.open(tmp_path, 0, b"model")
    assert not tier.put(make_record(1))
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / ("folder" + SUFFIX)).is_dir()
    assert tier.stats().num_bad_total == 1
    tier.close()


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    record = make_record(1)
    assert tier.put(record)
    (tmp_path / (record.digest.hex() + SUFFIX)).unlink()
    assert tier.prefetch(record.digest)
    put, got = wait_for(tier, 2)
    assert put.is_ok and got == Landed("get", record.digest, False)
    assert tier.lookup(record.digest) is None
    tier.close()


KILLED = """
import os, sys
from pathlib import Path
from baltoro.cache.disk import DiskTier
from baltoro.cache.tier import TierRecord
assert "torch" not in sys.modules, "the disk tier alone needs no torch"
tier = DiskTier.open(Path(sys.argv[1]), 10_000, b"model")
assert tier.put(TierRecord(b"whole", b"", 64, b"block" * 50, None))
os.fsync = lambda descriptor: os._exit(9)  # power goes before the bytes are safe
tier.put(TierRecord(b"half", b"whole", 128, b"block" * 50, None))
"""


def test_a_process_killed_while_it_writes_leaves_nothing_to_believe(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == 9, done.stderr
    assert len(list(tmp_path.glob("*" + UNFINISHED))) == 1
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    assert not list(tmp_path.glob("*" + UNFINISHED))
    assert tier.lookup(b"half") is None
    whole = tier.get(b"whole")
    assert whole is not None and whole.block == b"block" * 50
    assert tier.stats().num_bad_total == 0
    tier.close()


def test_a_directory_has_one_process(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    with pytest.raises(ConfigError, match="a directory of its own"):
        DiskTier.open(tmp_path, 10_000, b"model")
    tier.close()
    DiskTier.open(tmp_path, 10_000, b"model").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        DiskTier.open(tmp_path / "file", 10_000, b"model")
