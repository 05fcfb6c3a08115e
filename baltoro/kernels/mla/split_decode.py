"""Absorbed attention for a GPU: the keys of each request in a fixed number of splits, then a merge by log-sum-exp.

In and out: as `reference.attend_absorbed`, windows of query tokens (verify) too. Graph-safe: the number of
splits depends on shapes alone, the length of each is worked out on the device; nothing is read by the host.
FP64 goes to the reference. Offsets are 64 bits wide.
Source: spec/kernels.md C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.device import has_dependent_launch, machine
from baltoro.kernels.mla import reference

MAX_WINDOW = 8
MAX_SPLITS = 264
MERGE_VALUES, MERGE_WARPS = 8192, 8
"""Values that a program of the merge loads at a time, 32 a thread; the fewer, the more programs share the read. Of 128
splits 2.4 us, of 16,384 values 3.5. Four warps: 2.0 alone, but 51 us instead of 47.9 for the whole of 131,072 keys, in
one run, together with a merge that lets the next kernel start before the splits have ended."""
MIN_KEYS = 128
"""Keys that are worth a split of their own: below, the merge costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the split kernel is cut.

    rows      query rows of a program, the columns of both products
    keys      of a tile; 64 is what a warp group takes from shared memory, 32 goes through registers in one of the two
    stages    tiles that are being fetched or multiplied at a time
    flip      the first product has the query rows on the left
    bulk      the Hopper form with the bulk copy engine, where `bulk_fits`
    per_unit  programs that share a processor, by shared memory and registers
    """

    rows: int
    keys: int
    stages: int
    warps: int
    flip: bool = False
    per_unit: int = 1
    bulk: bool = False


def choose_tiles(num_rows: int, itemsize: int, page: int, *, is_large: bool) -> Tiles:
    """By shape alone. Measured on an H200 by scripts/gpu/lab_mla.py; bytes of shared memory at K3's widths beside.

    `is_large`: a program may have 227 kB of shared memory.
    """
    if itemsize > 2:  # FP32 has no matrix unit here; this is for tests and small models
        return Tiles(16, 32, 1, 8)  # 111 kB
    if not is_large or page % 64:  # a tile over several pages needs a page number a key, and registers for them
        return Tiles(16, 32, 3, 4, per_unit=2)  # 93 kB, 158 registers: two programs a processor
    if num_rows <= 32:  # 45.6 us for 12 heads x 131,072 keys, 53.7 with (16, 32, 3, 4, per_unit=2)
        return Tiles(16, 64, 2, 4, bulk=True)
    return Tiles(64, 64, 2, 8, bulk=True)  # 96 heads 115 us, 192 with (64, 32, 4, 8, flip)


def num_splits(num_requests: int, num_rows: int, max_keys: int, num_units: int, tiles: Tiles) -> int:
    """Splits that fill `num_units` processors once, if the keys are enough: a function of shapes alone.

    No more than share out the tiles of the longest request as evenly: the merge reads less.
    """
    programs = max(1, num_requests * -(-num_rows // tiles.rows))
    wanted = max(1, num_units * tiles.per_unit // programs)
    wanted = min(wanted, max(1, max_keys // MIN_KEYS), MAX_SPLITS)
    num_tiles = max(1, -(-max_keys // tiles.keys))
    return -(-num_tiles // -(-num_tiles // wanted))


def attend_absorbed(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    latent: int,
    scale: float,
    splits: int | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """q [N, H, R+Dr] or a window [N, W, H, R+Dr]; kv [P, page, R+Dr]; page_table [N, Pmax]; lengths int64 [N].

    `lengths` counts the keys that the last token of the window sees; the one before it sees one less, and so on.
    Returns out [N, (W,) H, R] and log-sum-exp [N, (W,) H] in FP32 (FP64: the reference's). `splits` and `tiles`
    override the planner's. Rows past the length change nothing, even if they hold NaN.
    Errors: ShapeError for a window over MAX_WINDOW.
    """
    window = q.shape[1] if q.dim() == 4 else 1
    if window > MAX_WINDOW:
        raise ShapeError(f"a window of {window} query tokens; at most {MAX_WINDOW}")
    if q.dtype == torch.float64:
        return reference.attend_absorbed(q, kv, page_table, lengths, latent=latent, scale=scale)
    heads, rows = q.shape[-2], window * q.shape[-2]
    facts = machine(q.device.type, q.device.index or 0)
    if tiles is None:
        is_large = facts.capability is not None and facts.capability[0] in (9, 10)
        tiles = choose_tiles(rows, q.dtype.itemsize, kv.shape[1], is_large=is_large)
    if splits is None:
        splits = num_splits(q.shape[0], rows, page_table.shape[1] * kv.shape[1], facts.num_units, tiles)
    flat = q.reshape(q.shape[0], rows, q.shape[-1]).contiguous()
    out, lse = _launch(flat, kv, page_table, lengths, (heads, window, splits, latent), scale, tiles)
    return out.view(*q.shape[:-1], latent), lse.view(q.shape[:-1])


def _launch(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    lengths: Tensor,
    sizes: tuple[int, int, int, int],
    scale: float,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """q [N, rows, R+Dr] -> out [N, rows, R], lse [N, rows]."""
    heads, window, splits, latent = sizes
    num, rows = q.shape[:2]
    if tiles.bulk and not bulk_fits(q, kv, latent):
        tiles = Tiles(16, 32, 3, 4, per_unit=2)
    is_alone = splits == 1  # then an empty request has to write its zeros: nobody merges
    parts = torch.empty(num, splits, rows, latent, dtype=torch.float32, device=q.device)
    sums = torch.empty(num, splits, rows, dtype=torch.float32, device=q.device)
    if not num:
        return parts.view(num, rows, latent), sums.view(num, rows)
    is_dependent = has_dependent_launch(q)
    launch = _launch_bulk if tiles.bulk else _launch_plain
    launch((q, kv, table, lengths, parts, sums), (heads, window, splits), scale / math.log(2.0), tiles, is_dependent)
    if is_alone:
        return parts.view(num, rows, latent), sums.view(num, rows)
    return _merge(parts, sums, is_dependent)


def _launch_plain(
    tensors: tuple[Tensor, ...], sizes: tuple[int, int, int], scale2: float, tiles: Tiles, is_dependent: bool
) -> None:
    """q [N, rows, R+Dr], kv, table, lengths, parts [N, splits, rows, R], sums. sizes: heads, window, splits."""
    import triton  # absent on machines without a GPU; the row needs it

    from baltoro.kernels.mla.triton_decode import split_kernel

    q, kv, table, _, parts, _ = tensors
    (num, rows), latent = q.shape[:2], parts.shape[-1]
    shared = q.shape[2] - latent
    launch = {"launch_pdl": True} if is_dependent else {}
    split_kernel[(num, sizes[2], -(-rows // tiles.rows))](
        *tensors, scale2, q.stride(0), q.stride(1), kv.stride(0), table.stride(0), sizes[0], rows, *sizes[1:],
        KV_ROW=kv.stride(1), R=latent, D=shared,
        BLOCK_R=max(16, triton.next_power_of_2(latent)), BLOCK_D=max(16, triton.next_power_of_2(shared)),
        ROWS=tiles.rows, KEYS=tiles.keys, PAGE=kv.shape[1], STAGES=tiles.stages, FLIP=tiles.flip,
        WRITES_EMPTY=sizes[2] == 1, PDL=is_dependent, INTERP=q.device.type == "cpu", num_warps=tiles.warps, **launch,
    )  # fmt: skip


def bulk_fits(q: Tensor, kv: Tensor, latent: int) -> bool:
    """Whether the Hopper form takes it: BF16, pages of 64 keys, 512 + 64 values, rows at a multiple of 16 bytes."""
    facts = machine(q.device.type, q.device.index or 0)
    is_right = facts.capability is not None and facts.capability[0] == 9 and q.dtype == kv.dtype == torch.bfloat16
    shape = (latent, q.shape[-1] - latent, kv.shape[1], kv.stride(2))
    lies = kv.stride(1) % 8 == 0 and kv.data_ptr() % 16 == 0 and kv.stride(0) % kv.stride(1) == 0
    return is_right and shape == (512, 64, 64, 1) and lies and len(kv) * kv.stride(0) // kv.stride(1) < 2**31


def _launch_bulk(
    tensors: tuple[Tensor, ...], sizes: tuple[int, int, int], scale2: float, tiles: Tiles, is_dependent: bool
) -> None:
    """As `_launch_plain`. To the copy engine the arena is one table of rows, of which a page has `page_rows`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from baltoro.kernels.mla.bulk_decode import bulk_split_kernel

    q, kv, table, lengths, parts, sums = tensors
    rows, page_rows, page, width = q.shape[1], kv.stride(0) // kv.stride(1), kv.shape[1], kv.shape[2]
    shape, layout = [(len(kv) - 1) * page_rows + page, width], gl.NVMMASharedLayout(128, 16, 2)
    halves = [TensorDescriptor(kv, shape, [kv.stride(1), 1], [page, n], layout) for n in (512, 64)]
    launch = {"launch_pdl": True} if is_dependent else {}
    bulk_split_kernel[(len(q), sizes[2], -(-rows // tiles.rows))](
        q, *halves, table, lengths, parts, sums, scale2,
        q.stride(0), q.stride(1), page_rows, table.stride(0), sizes[0], rows, *sizes[1:], table.shape[1],
        ROWS=tiles.rows, BUFFERS=tiles.stages, WRITES_EMPTY=sizes[2] == 1, PDL=is_dependent,
        num_warps=tiles.warps, **launch,
    )  # fmt: skip


def _merge(parts: Tensor, sums: Tensor, is_dependent: bool) -> tuple[Tensor, Tensor]:
    """parts [N, splits, rows, R], sums [N, splits, rows] -> [N, rows, R], [N, rows]."""
    import triton

    from baltoro.kernels.mla.triton_decode import merge_kernel

    num, splits, rows, latent = parts.shape
    out, lse = torch.empty_like(parts[:, 0]), torch.empty_like(sums[:, 0])
    block_s = triton.next_power_of_2(splits)
    block_r = min(triton.next_power_of_2(latent), max(16, MERGE_VALUES // block_s))
    launch = {"launch_pdl": True} if is_dependent else {}
    merge_kernel[(num, rows, -(-latent // block_r))](
        parts, sums, out, lse, rows, splits,
        R=latent, BLOCK_R=block_r, BLOCK_S=block_s, PDL=is_dependent, num_warps=MERGE_WARPS, **launch,
    )  # fmt: skip
    return out, lse
