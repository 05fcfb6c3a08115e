"""Products of few rows in Triton: each weight is read once, in wide loads, and summed in fp32.

In and out: as `reference`. For bf16 (and float32) rows without gradients; more rows than MAX_ROWS of a plain product go
to the framework's matrix product, which is bound by bytes there too. Source: spec/kernels.md E.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baltoro.kernels.device import has_dependent_launch
from baltoro.kernels.linear import reference, stream
from baltoro.kernels.norm import fast as norm

# To be set by `baltoro bench kernels` on the device: the spec expects a gain up to about 4 rows.
MAX_ROWS = 4
# Wider rows are normed in a launch of their own: every program of the product would norm all of x again (7168 x 3584,
# one row: 29.8 us with the norm inside, 17.7 without).
MAX_NORMED = 1024
# Rows of one launch that only computes sums of products; sums of 8 rows still fit the registers.
FEW_ROWS = 8
# Columns of a program that only copies: 16 bytes of sums four times a thread.
CUT_COLUMNS = 1024
# Rows beside which a tile of the weight is still most of what a program reads.
THIN_ROWS = 16
# Above, logits and the rest are one product of the framework with fp32 results, on a GPU, else two. Then one launch
# copies the logits and rounds the rest: 31.9 us for 256 rows, of which the product is 30.4; by the framework's copies
# 34.4, as two products side by side 34.6, by tiles dealt out (`stream`) 39.5.
MAX_MERGED_ROWS = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows of x, rows n of the weight and width k of a tile; stages: tiles under way, or steps unrolled (one row)."""

    rows: int
    n: int
    k: int
    stages: int
    warps: int


def choose_tiles(num_rows: int) -> Tiles:
    """By the number of rows of x; set by scripts/gpu/lab_mla.py on an H200 for 4480 x 7168 (router + latent down)."""
    if num_rows == 1:
        # whole rows, asked for before the kernel in front has ended: K3's rank slice in 216 us, 233 in steps of 1024
        return Tiles(1, 2, 8192, 1, 4)
    if num_rows <= THIN_ROWS:
        return Tiles(8 if num_rows <= 8 else 16, 16, 256, 5, 2)  # 280 programs, all at once, 32 kB under way in each
    return Tiles(64, 64, 64, 5, 4)  # 82 kB: two programs a processor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> [T, O]."""
    if x.dim() != 2 or len(x) > MAX_ROWS or not _fits(x, weight):
        return reference.linear(x, weight)
    out = x.new_empty(len(x), len(weight))
    if len(x) > 1 and x.dtype == torch.bfloat16:
        many_rows(x, weight, out, out, 0)
    else:
        few_rows(x, weight, out, out, 0)
    return out


def norm_linear(x: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, I], gain [I], weight [O, I] -> [T, O]. Up to MAX_NORMED wide the normed x is never rounded, nor written."""
    if x.dim() != 2 or len(x) > MAX_ROWS or not _fits(x, weight):
        return reference.linear(norm.rms_norm(x, gain, eps), weight)
    if weight.shape[1] > MAX_NORMED:
        return linear(norm.rms_norm(x, gain, eps), weight)
    out = x.new_empty(len(x), len(weight))
    few_rows(x, weight, out, out, 0, gain=gain, eps=eps)
    return out


def router_linear(x: Tensor, weight: Tensor, num_logits: int) -> tuple[Tensor, Tensor]:
    """x [T, D], weight [num_logits + O, D] -> fp32 logits [T, num_logits], [T, O] in x.dtype: one launch."""
    if x.dim() != 2 or not _fits(x, weight):
        return reference.router_linear(x, weight, num_logits)
    if len(x) > MAX_MERGED_ROWS:
        if x.is_cuda and x.dtype == torch.bfloat16:
            return one_product(x, weight, num_logits)
        return reference.router_linear(x, weight, num_logits)
    logits = torch.empty(len(x), num_logits, dtype=torch.float32, device=x.device)
    rest = x.new_empty(len(x), len(weight) - num_logits)
    is_few = len(x) <= (1 if x.dtype == torch.bfloat16 else FEW_ROWS)
    product = few_rows if is_few else stream.product if _streams(x, weight) else many_rows
    product(x, weight, logits, rest, num_logits)
    return logits, rest


def _streams(x: Tensor, weight: Tensor) -> bool:
    """Whether the work is to be dealt out: tiles alone would leave processors idle."""
    tiles = stream.choose_tiles(len(x))
    is_right = x.dtype == torch.bfloat16 and len(x) > THIN_ROWS
    return is_right and stream.fits(len(x), len(weight), tiles, stream.programs(x, tiles))


def one_product(x: Tensor, weight: Tensor, num_logits: int) -> tuple[Tensor, Tensor]:
    """`router_linear` by the framework's product of bf16 with fp32 results: sums of exact products, as in fp32."""
    return cut_sums(torch.mm(x, weight.T, out_dtype=torch.float32), num_logits, x.dtype)


def cut_sums(sums: Tensor, num_logits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp32 [T, O] -> the first columns, and the others in `dtype`."""
    from triton import cdiv

    from baltoro.kernels.linear import kernels

    num_rows, num_columns = sums.shape
    logits, rest = sums.new_empty(num_rows, num_logits), sums.new_empty(num_rows, num_columns - num_logits, dtype=dtype)
    is_dependent = has_dependent_launch(sums)
    launch = {"launch_pdl": True} if is_dependent else {}
    kernels.cut_sums[(num_rows, cdiv(num_columns, CUT_COLUMNS))](
        sums,
        logits,
        rest,
        num_rows,
        num_logits,
        num_columns,
        BLOCK=CUT_COLUMNS,
        PDL=is_dependent,
        num_warps=4,
        **launch,
    )
    return logits, rest


def few_rows(
    x: Tensor,
    weight: Tensor,
    first: Tensor,
    rest: Tensor,
    num_first: int,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    tiles: Tiles | None = None,
) -> None:
    """Write the first `num_first` columns of the product to `first`, the others to `rest`. At most FEW_ROWS rows."""
    from triton import cdiv, next_power_of_2

    from baltoro.kernels.linear import kernels

    if not len(x):
        return
    norm = x if gain is None else gain
    if len(x) == 1:
        tiles, is_dependent = tiles or choose_tiles(1), has_dependent_launch(x)
        launch = {"launch_pdl": True} if is_dependent else {}
        kernels.one_row[(cdiv(len(weight), tiles.n),)](
            x, weight, norm, first, rest, num_first, *weight.shape, eps,
            BLOCK_N=tiles.n, BLOCK_K=min(tiles.k, next_power_of_2(weight.shape[1])), UNROLL=tiles.stages,
            HAS_NORM=gain is not None, IS_EARLY=tiles.k >= weight.shape[1], PDL=is_dependent,
            num_warps=tiles.warps, **launch,
        )  # fmt: skip
        return
    rows = next_power_of_2(len(x))
    block_n = 8 if rows <= 2 else 4
    kernels.few_rows[(cdiv(len(weight), block_n),)](
        x, weight, norm, first, rest, len(x), num_first, *weight.shape, x.stride(0), eps,
        ROWS=rows, BLOCK_N=block_n, BLOCK_K=min(512, next_power_of_2(weight.shape[1])),
        HAS_NORM=gain is not None, num_warps=4,
    )  # fmt: skip


def many_rows(
    x: Tensor, weight: Tensor, first: Tensor, rest: Tensor, num_first: int, *, tiles: Tiles | None = None
) -> None:
    """As `few_rows`, through the matrix unit, for any number of rows."""
    from triton import cdiv, knobs, next_power_of_2

    from baltoro.kernels.linear import kernels

    if not len(x):
        return
    tiles = tiles or choose_tiles(max(2, len(x)))
    if x.dtype.itemsize > 2:  # without a matrix unit, and shared memory holds half as much
        tiles = replace(tiles, k=32, stages=2, warps=4)
    sizes = (len(x), num_first, *weight.shape, x.stride(0))
    cut = {"BLOCK_N": tiles.n, "STAGES": tiles.stages, "INTERPRET": knobs.runtime.interpret, "num_warps": tiles.warps}
    cut["BLOCK_K"] = min(tiles.k, max(16, next_power_of_2(weight.shape[1])))
    columns = cdiv(len(weight), tiles.n)
    if tiles.rows <= THIN_ROWS:
        is_dependent = has_dependent_launch(x)
        launch = {"launch_pdl": True} if is_dependent else {}
        kernels.thin[(columns,)](x, weight, first, rest, *sizes, ROWS=tiles.rows, PDL=is_dependent, **cut, **launch)
    else:
        kernels.many_rows[(cdiv(len(x), tiles.rows), columns)](
            x, weight, first, rest, *sizes, BLOCK_M=tiles.rows, **cut
        )


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take it: no gradients wanted, one dtype of 2 or 4 bytes, rows without holes."""
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    is_plain = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float32)
    return not wants_gradient and is_plain and x.stride(-1) == 1 and weight.is_contiguous()
