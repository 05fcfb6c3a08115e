"""A base in one allocation of a device that others map: here the device is the CPU, and the map that of a shared file.

What CUDA itself does is tested by `tests/rl/test_base_on_gpu.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baltoro.errors import ConfigError, DigestMismatch
from baltoro.transfer import device_base
from baltoro.transfer.device_base import DeviceBase, Ticket, fingerprint, open_device_base, write_device_base
from baltoro.transfer.tensors import to_raws


class SharedFile:
    """A `Sharing` by file descriptor: another map of the same memory."""

    def share(self, whole: Tensor) -> Ticket:
        descriptor, size = whole.untyped_storage()._share_fd_cpu_()
        return Ticket(0, str(descriptor).encode(), size, 0, b"", 0, b"", False)

    def open(self, ticket: Ticket) -> Tensor:
        storage = torch.UntypedStorage._new_shared_fd_cpu(os.dup(int(ticket.handle)), ticket.num_bytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (ticket.num_bytes,), (1,))


TENSORS = {
    "a": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "empty": torch.empty(0, 4),
    "codes": torch.arange(100, dtype=torch.uint8),
    "wide": torch.linspace(-1, 1, 7),
}


def written(folder: Path) -> DeviceBase:
    return write_device_base(folder / "base", to_raws(TENSORS), "cpu", SharedFile())


def test_both_ends_have_one_memory(tmp_path: Path) -> None:
    owner = written(tmp_path)
    opened = open_device_base(tmp_path / "base", owner.digest, SharedFile())
    for base in (owner, opened):
        views = base.views()
        assert all(torch.equal(views[name], tensor) for name, tensor in TENSORS.items())
        assert len({view.untyped_storage().data_ptr() for view in views.values() if view.numel()}) == 1
    assert owner.content.data_ptr() != opened.content.data_ptr()
    assert len(owner.content) == device_base.LEAST_BYTES, "smaller ones share a segment with other tensors"
    owner.check()
    opened.check()
    opened.views()["codes"][3] += 1
    assert owner.views()["codes"][3] == 4
    for base in (owner, opened):
        with pytest.raises(DigestMismatch, match="was written to"):
            base.check()
        with pytest.raises(DigestMismatch, match="not what was written: codes"):
            base.verify()
    with pytest.raises(DigestMismatch, match="codes"):
        open_device_base(tmp_path / "base", owner.digest, SharedFile())
    opened.views()["codes"][3] -= 1
    owner.check()


def test_the_notice_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    owner = written(tmp_path)
    assert (tmp_path / "base").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="written once"):
        written(tmp_path)
    with pytest.raises(DigestMismatch, match="wanted 0000"):
        open_device_base(tmp_path / "base", "0" * 64, SharedFile())
    owner.remove()
    with pytest.raises(ConfigError, match="no base"):
        open_device_base(tmp_path / "base", owner.digest, SharedFile())
    owner.close()
    with pytest.raises(ConfigError, match="closed"):
        owner.views()


def test_a_fingerprint_sees_every_bit_and_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_base, "CHUNK_WORDS", 7)  # three pieces, the last not full
    words = torch.randint(-(2**63), 2**63 - 1, (17,), dtype=torch.int64)
    whole = words.view(torch.uint8)
    mark = fingerprint(whole)
    assert mark == sum(word * (2 * place + 1) for place, word in enumerate(words.tolist())) % 2**64
    for place in range(0, len(whole), 3):
        for bit in range(8):
            whole[place] ^= 1 << bit
            assert fingerprint(whole) != mark
            whole[place] ^= 1 << bit
    for first, second in ((0, 1), (3, 12), (6, 7)):
        swapped = words.clone()
        swapped[[first, second]] = words[[second, first]]
        assert fingerprint(swapped.view(torch.uint8)) != mark
    assert fingerprint(whole) == mark
