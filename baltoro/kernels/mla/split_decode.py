"""Absorbed attention for a GPU: the keys of each request in a fixed number of splits, then a merge by log-sum-exp.

In and out: as `reference.attend_absorbed`, and a window of query tokens besides (verify). Graph-safe: the number of
splits depends on shapes alone, the length of each is worked out on the device; nothing is read by the host.
FP64 goes to the reference. Offsets are 64 bits wide.
Source: spec/kernels.md C.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.device import machine
from baltoro.kernels.mla import reference

MAX_WINDOW = 8
KEYS = 64
"""Keys of one tile in a 16-bit dtype; half of them in FP32, which shared memory holds."""
MAX_SPLITS = 256
MIN_TILES = 2
"""Tiles that are worth a split of their own: below, the merge costs more than it saves."""


def row_block(num_rows: int) -> int:
    """Query rows of one program: what the matrix units take at least, more where many rows share the keys."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def num_splits(num_requests: int, num_rows: int, max_keys: int, num_units: int) -> int:
    """Splits that fill `num_units` processors once, if the keys are enough: a function of shapes alone."""
    programs = max(1, num_requests * -(-num_rows // row_block(num_rows)))
    wanted = max(1, num_units // programs)
    worth = max(1, -(-max_keys // KEYS) // MIN_TILES)
    return min(wanted, worth, MAX_SPLITS)


def attend_absorbed(
    q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, *, latent: int, scale: float, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """q [N, H, R+Dr] or a window [N, W, H, R+Dr]; kv [P, page, R+Dr]; page_table [N, Pmax]; lengths int64 [N].

    `lengths` counts the keys that the last token of the window sees; the one before it sees one less, and so on.
    Returns out [N, (W,) H, R] and log-sum-exp [N, (W,) H] in FP32 (FP64: the reference's). `splits` overrides the
    planner's number. Rows past the length are never read. Errors: ShapeError for a window over MAX_WINDOW.
    """
    window = q.shape[1] if q.dim() == 4 else 1
    if window > MAX_WINDOW:
        raise ShapeError(f"a window of {window} query tokens; at most {MAX_WINDOW}")
    if q.dtype == torch.float64:
        return attend_window(q, kv, page_table, lengths, latent=latent, scale=scale)
    heads, rows = q.shape[-2], window * q.shape[-2]
    if splits is None:
        units = machine(q.device.type, q.device.index or 0).num_units
        splits = num_splits(q.shape[0], rows, page_table.shape[1] * kv.shape[1], units)
    flat = q.reshape(q.shape[0], rows, q.shape[-1]).contiguous()
    out, lse = _launch(flat, kv, page_table, lengths, (heads, window, splits, latent), scale)
    return out.view(*q.shape[:-1], latent), lse.view(q.shape[:-1])


def attend_window(
    q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, *, latent: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The same in plain torch: each token of a window is a request of its own with fewer keys."""
    if q.dim() == 3:
        return reference.attend_absorbed(q, kv, page_table, lengths, latent=latent, scale=scale)
    window = q.shape[1]
    before = torch.arange(window - 1, -1, -1, device=q.device)
    seen = (lengths.unsqueeze(1) - before).clamp_min(0).flatten()
    table = page_table.repeat_interleave(window, 0)
    out, lse = reference.attend_absorbed(q.flatten(0, 1), kv, table, seen, latent=latent, scale=scale)
    return out.view(-1, window, *out.shape[1:]), lse.view(-1, window, *lse.shape[1:])


def _launch(
    q: Tensor, kv: Tensor, table: Tensor, lengths: Tensor, sizes: tuple[int, int, int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """q [N, rows, R+Dr] -> out [N, rows, R], lse [N, rows]."""
    import triton  # absent on machines without a GPU; the row needs it

    from baltoro.kernels.mla.triton_decode import merge_kernel, split_kernel

    heads, window, splits, latent = sizes
    (num, rows, width), block_r = q.shape, triton.next_power_of_2(latent)
    shared = width - latent
    parts = torch.empty(num, splits, rows, latent, dtype=torch.float32, device=q.device)
    sums = torch.empty(num, splits, rows, dtype=torch.float32, device=q.device)
    if not num:
        return parts.view(num, rows, latent), sums.view(num, rows)
    block = row_block(rows)
    split_kernel[(num, splits, -(-rows // block))](
        q, kv, table, lengths, parts, sums, scale / math.log(2.0),
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), table.stride(0),
        heads, rows, window, kv.shape[1],
        R=latent, D=shared, BLOCK_R=max(16, block_r), BLOCK_D=max(16, triton.next_power_of_2(shared)),
        ROWS=block, KEYS=KEYS if q.dtype.itemsize == 2 else KEYS // 2, SPLITS=splits, INTERP=q.device.type == "cpu",
        num_warps=4 if block == 16 else 8, num_stages=2 if block < 64 and q.dtype.itemsize == 2 else 1,
    )  # fmt: skip
    if splits == 1:
        return parts.view(num, rows, latent), sums.view(num, rows)
    out, lse = torch.empty_like(parts[:, 0]), torch.empty_like(sums[:, 0])
    merge_kernel[(num, rows)](
        parts, sums, out, lse, rows,
        R=latent, BLOCK_R=block_r, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out, lse
