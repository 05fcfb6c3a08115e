"""Torch tensors as named bytes, and back.

In: tensors, or `Raw`. Out: the other. Invariants: a contiguous tensor on the CPU is not copied in either direction; a
tensor over read-only bytes must not be written: there is no copy to fall back on, the process ends (SIGSEGV).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from baltoro.errors import TransferError
from baltoro.transfer.manifest import Manifest, Raw

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8_e4m3": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def to_raw(tensor: torch.Tensor) -> Raw:
    """The bytes of a tensor; of a copy where it is not contiguous or not on the CPU. Errors: TransferError(shapes)."""
    if tensor.dtype not in NAMES:
        raise TransferError(f"{tensor.dtype} has no name here; known are {', '.join(DTYPES)}", check="shapes")
    plain = tensor.detach().to("cpu").contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")
    return Raw(NAMES[tensor.dtype], tuple(tensor.shape), data)


def to_tensor(raw: Raw) -> torch.Tensor:
    """A tensor over the bytes, which must be aligned to the dtype as those of a manifest are."""
    dtype = DTYPES[raw.dtype]
    if not raw.data.nbytes:
        return torch.zeros(raw.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # meant: see the module
        return torch.frombuffer(raw.data, dtype=dtype).reshape(raw.shape)


def views_of(manifest: Manifest, content: memoryview) -> dict[str, torch.Tensor]:
    """Name -> tensor, all of them views of one, so that neighbours can be joined; nothing is copied."""
    return views_on(manifest, to_tensor(Raw("uint8", (len(content),), content)))


def views_on(manifest: Manifest, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """`views_of` on uint8 [N] wherever it lies; bytes behind the last tensor are let be."""
    found = {}
    for entry in manifest.tensors:
        found[entry.name] = whole[entry.offset : entry.end].view(DTYPES[entry.dtype]).view(entry.shape)
    return found


def to_raws(tensors: Mapping[str, torch.Tensor]) -> dict[str, Raw]:
    """All of them, in their order."""
    return {name: to_raw(tensor) for name, tensor in tensors.items()}
