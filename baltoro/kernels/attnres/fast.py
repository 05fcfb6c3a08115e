"""The depth mix on a GPU, without gradients: one launch for decode, bank pass and fold for prefill.

In and out: as `reference.mix` and the functions of `fused.py`. FP64, and `mix` under autograd, go there.
Source: spec/kernels.md D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.attnres import fused, reference

SCAN_BLOCK = 128
"""Channels of one tile of the bank pass."""
MAX_SOURCES = 16


def mix(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """sources [L, T, D], query [D] -> [T, D] in sources.dtype."""
    if torch.is_grad_enabled() or sources.dtype == torch.float64:
        return reference.mix(sources, query, eps)
    return _read(sources, None, None, query, None, eps, 0.0)[1]


def read(
    bank: Tensor, prefix: Tensor | None, update: Tensor | None, query: Tensor, gain: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """As `fused.read`. The first of the pair is new memory only if there was something to add."""
    if bank.dtype == torch.float64:
        return fused.read(bank, prefix, update, query, gain, eps, norm_eps)
    total, out = _read(bank, prefix, update, query, gain, eps, norm_eps)
    assert total is not None, "neither a running sum nor an update"
    return total, out


def scan_bank(bank: Tensor, queries: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `fused.scan_bank`. Errors: ShapeError for more than MAX_SOURCES rows."""
    if bank.dtype == torch.float64:
        return fused.scan_bank(bank, queries, eps)
    import triton  # absent on machines without a GPU; the row needs it

    from baltoro.kernels.attnres.triton_kernels import scan_kernel

    (num, tokens, width), bank = bank.shape, _rows(bank)
    if num > MAX_SOURCES:
        raise ShapeError(f"a bank of {num} rows; at most {MAX_SOURCES}")
    part = torch.empty(len(queries), tokens, width, dtype=bank.dtype, device=bank.device)
    lse = torch.empty(len(queries), tokens, dtype=torch.float32, device=bank.device)
    if tokens:
        scan_kernel[(tokens,)](
            bank, queries.contiguous(), part, lse, bank.stride(0), bank.stride(1), tokens, eps,
            L=num, Q=len(queries), D=width, BLOCK_L=MAX_SOURCES,
            BLOCK_Q=max(16, triton.next_power_of_2(len(queries))), BLOCK_D=SCAN_BLOCK, num_warps=4,
        )  # fmt: skip
    return part, lse


def fold(
    part: Tensor,
    lse: Tensor,
    prefix: Tensor | None,
    update: Tensor | None,
    query: Tensor,
    gain: Tensor,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """As `fused.fold`."""
    if part.dtype == torch.float64:
        return fused.fold(part, lse, prefix, update, query, gain, eps, norm_eps)
    import triton

    from baltoro.kernels.attnres.triton_kernels import fold_kernel

    tokens, width = part.shape
    total, out = _total(prefix, update), torch.empty_like(part)
    assert total is not None, "neither a running sum nor an update"
    if tokens:
        fold_kernel[(tokens,)](
            part.contiguous(), lse.contiguous(), _packed(prefix), _packed(update), query, gain, total, out,
            eps, norm_eps, D=width, BLOCK_D=triton.next_power_of_2(width),
            HAS_PREFIX=prefix is not None, HAS_UPDATE=update is not None, num_warps=_warps(width),
        )  # fmt: skip
    return total, out


def _read(
    bank: Tensor,
    prefix: Tensor | None,
    update: Tensor | None,
    query: Tensor,
    gain: Tensor | None,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor | None, Tensor]:
    """(the sum if there is one, the mix or its norm)."""
    import triton

    from baltoro.kernels.attnres.triton_kernels import read_kernel

    (num, tokens, width), bank = bank.shape, _rows(bank)
    total, out = _total(prefix, update), torch.empty(tokens, width, dtype=bank.dtype, device=bank.device)
    if tokens:
        read_kernel[(tokens,)](
            bank, _packed(prefix), _packed(update), query, gain, total, out, bank.stride(0), bank.stride(1),
            eps, norm_eps, L=num, D=width, BLOCK_D=triton.next_power_of_2(width),
            HAS_PREFIX=prefix is not None, HAS_UPDATE=update is not None, HAS_NORM=gain is not None,
            num_warps=_warps(width),
        )  # fmt: skip
    return total, out


def _total(prefix: Tensor | None, update: Tensor | None) -> Tensor | None:
    """Where the running sum goes: new memory if two are added, else the one that is there."""
    if prefix is not None and update is not None:
        return torch.empty(prefix.shape, dtype=prefix.dtype, device=prefix.device)
    return update if prefix is None else prefix


def _packed(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.contiguous()


def _rows(bank: Tensor) -> Tensor:
    """The kernels step by source and token, not inside a row."""
    return bank if bank.stride(-1) == 1 else bank.contiguous()


def _warps(width: int) -> int:
    """16 channels a thread at full width."""
    return 16 if width > 4096 else 8 if width > 1024 else 4
