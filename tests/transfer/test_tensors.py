"""Tensors as bytes and back, for every dtype that has a name."""

from __future__ import annotations

import pytest
import torch

from baltoro.errors import TransferError
from baltoro.transfer.manifest import DTYPE_BYTES
from baltoro.transfer.tensors import DTYPES, to_raw, to_raws, to_tensor


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_comes_back_bit_for_bit(name: str) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(DTYPES[name])
    raw = to_raw(tensor)
    assert (raw.dtype, raw.shape, raw.data.nbytes) == (name, (2, 3, 4), 24 * DTYPE_BYTES[name])
    assert to_tensor(raw).view(torch.uint8).equal(tensor.view(torch.uint8))


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(3)
    raw = to_raw(tensor)
    tensor[1] = 7.0
    assert to_tensor(raw).tolist() == [0.0, 7.0, 0.0]


def test_scalars_empty_and_transposed_tensors() -> None:
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "turned": torch.arange(6.0).reshape(2, 3).T}
    for name, raw in to_raws(tensors).items():
        assert torch.equal(to_tensor(raw), tensors[name])


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(TransferError, match="complex"):
        to_raw(torch.zeros(1, dtype=torch.complex64))
