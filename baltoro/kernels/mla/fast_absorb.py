"""`absorb.enter` and `absorb.leave` on a GPU, one launch each. FP64 and gradients go to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.device import has_dependent_launch
from baltoro.kernels.mla import absorb

ROWS = 16
"""Tokens of a program: what a matrix instruction takes; one weight tile is read once for so many."""
ENTER_COLUMNS = 64
"""Of the latent width: 16 kB of weights a program, 8 programs a head and one for the rest at K3's width."""
LEAVE_COLUMNS = 16
"""Values of a program: 16 kB of weights, 8 programs a head."""


def enter(
    q: Tensor,
    row: Tensor,
    gain: Tensor,
    eps: float,
    kv_b: Tensor,
    kv: Tensor,
    places: tuple[Tensor, Tensor],
) -> Tensor:
    """As `absorb.enter`."""
    if not _is_plain(q, row, kv_b, kv):
        return absorb.enter(q, row, gain, eps, kv_b, kv, places)
    from triton import cdiv, knobs, next_power_of_2

    from baltoro.kernels.mla.absorb_kernels import enter_kernel

    (num, heads, _), (_, both, rank) = q.shape, kv_b.shape
    shared = row.shape[1] - rank
    keys = q.shape[2] - shared
    query = torch.empty(num, heads, rank + shared, dtype=q.dtype, device=q.device)
    if num:
        columns = min(ENTER_COLUMNS, max(16, next_power_of_2(rank)))
        blocks = cdiv(rank, columns)
        enter_kernel[(blocks + 1, heads, cdiv(num, ROWS))](
            q, row, gain, kv_b, kv, *places, query, num, eps,
            q.stride(0), q.stride(1), row.stride(0), kv.stride(0), kv.stride(1),
            H=heads, K=keys, BOTH=both, R=rank, S=shared, BLOCK_K=max(16, next_power_of_2(keys)),
            BLOCK_R=next_power_of_2(rank), BLOCK_S=next_power_of_2(shared), COLUMNS=columns, ROWS=ROWS,
            INTERPRET=knobs.runtime.interpret, num_warps=4, **_dependence(q),
        )  # fmt: skip
    return query


def leave(out: Tensor, kv_b: Tensor, values: int, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `absorb.leave`."""
    if not _is_plain(out, out if gate is None else gate, kv_b, kv_b) or dtype == torch.float64:
        return absorb.leave(out, kv_b, values, gate, dtype)
    from triton import cdiv, knobs, next_power_of_2

    from baltoro.kernels.mla.absorb_kernels import leave_kernel

    num, heads, rank = out.shape
    result = torch.empty(num, heads * values, dtype=dtype, device=out.device)
    if num:
        out = out.contiguous()
        leave_kernel[(cdiv(values, LEAVE_COLUMNS), heads, cdiv(num, ROWS))](
            out, kv_b, out if gate is None else gate, result, num, 0 if gate is None else gate.stride(0),
            H=heads, V=values, BOTH=kv_b.shape[1], R=rank, BLOCK_R=max(16, next_power_of_2(rank)),
            COLUMNS=LEAVE_COLUMNS, ROWS=ROWS, HAS_GATE=gate is not None,
            INTERPRET=knobs.runtime.interpret, num_warps=4, **_dependence(out),
        )  # fmt: skip
    return result


def _dependence(tensor: Tensor) -> dict[str, bool]:
    """Both ends overlap their neighbours, where the device can: 49.8 us of 52.9 with 131,072 keys between them."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(tensor) else {"PDL": False}


def _is_plain(first: Tensor, second: Tensor, kv_b: Tensor, kv: Tensor) -> bool:
    """Whether the kernels take it: no gradients, 2 or 4 bytes a value, rows without holes, kv_b whole."""
    known = (torch.bfloat16, torch.float32)
    is_known = all(x.dtype in known for x in (first, second, kv_b, kv))
    has_rows = first.stride(-1) == 1 and second.stride(-1) == 1 and kv.stride(-1) == 1
    return is_known and has_rows and kv_b.is_contiguous() and not torch.is_grad_enabled()
