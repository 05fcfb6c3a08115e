"""The depth mix on a GPU, without gradients: one launch for decode, bank pass and fold for prefill.

In and out: as `reference.mix` and the functions of `fused.py`. FP64, and what a gradient is wanted of, go there.
Source: spec/kernels.md D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.attnres import fused, reference
from baltoro.kernels.device import HOPPER, has_dependent_launch, machine
from baltoro.kernels.precision import wants_gradient


@dataclass(frozen=True, slots=True)
class Scan:
    """How the bank pass is cut: tokens of a program and channels of a tile for the scores, channels for the sums."""

    tokens: int = 8  # with 8 sources the 64 rows of a warp group
    score_block: int = 128
    score_warps: int = 4
    score_stages: int = 3
    sum_block: int = 512
    sum_warps: int = 4


SCAN = Scan()
CHUNK = 256
"""Channels of all sources that a program which has a token to itself loads at a time; with so few, 80 registers do."""
READ_WARPS = 8
"""Of such a program: three share a processor, so that one loads while another reduces."""
MAX_SOURCES = 16
FEW_TOKENS = 16
"""Up to here a row is shared out over programs in two launches, where no cluster does it; above, there are programs
enough without (1 / 8 / 32 tokens of 9 sources: 4.5 / 4.7 / 10.4 us, a program a token 8.1 / 8.4 / 9.2)."""
SHARE_BLOCK = 512
"""Channels of a program then: 14 programs a row at K3's width. The fewer, the less the second launch has to add up."""
SHARE_WARPS = 4


@dataclass(frozen=True, slots=True)
class Cluster:
    """How a Hopper cluster shares a row out, in one launch (`cluster_kernels.py`): channels are cut over both."""

    programs: int = 8  # as many as any card has room for; 16 need one that allows it
    warps: int = 4


CLUSTER: Cluster | None = Cluster()
"""None: never. 1 / 8 / 32 / 64 / 512 tokens: 2.1 / 2.1 / 3.8 / 5.1 / 33 us, other shapes more; a program a token takes
9.6 of 64 and 43.8 of 512."""
CLUSTER_TOKENS = 512
"""Up to here; more were not tried."""
CLUSTER_WIDTHS = (1, 16)
"""Channels of a source that a thread may keep, in registers."""


def mix(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """sources [L, T, D], query [D] -> [T, D] in sources.dtype."""
    if torch.is_grad_enabled() or sources.dtype == torch.float64:
        return reference.mix(sources, query, eps)
    return _read(sources, None, None, query, None, eps, 0.0)[1]


def read(
    bank: Tensor, prefix: Tensor | None, update: Tensor | None, query: Tensor, gain: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """As `fused.read`. The first of the pair is new memory only if there was something to add."""
    if wants_gradient(bank, prefix, update, query, gain) or bank.dtype == torch.float64:
        return fused.read(bank, prefix, update, query, gain, eps, norm_eps)
    total, out = _read(bank, prefix, update, query, gain, eps, norm_eps)
    assert total is not None, "neither a running sum nor an update"
    return total, out


def scan_bank(bank: Tensor, queries: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `fused.scan_bank`. Errors: ShapeError for more than MAX_SOURCES rows."""
    if wants_gradient(bank, queries) or bank.dtype == torch.float64:
        return fused.scan_bank(bank, queries, eps)
    if len(bank) > MAX_SOURCES:
        raise ShapeError(f"a bank of {len(bank)} rows; at most {MAX_SOURCES}")
    part = bank.new_empty(len(queries), *bank.shape[1:])
    lse = torch.empty(part.shape[:2], dtype=torch.float32, device=bank.device)
    if lse.numel():
        _scan(_rows(bank), queries, part, lse, eps)
    return part, lse


def _scan(bank: Tensor, queries: Tensor, part: Tensor, lse: Tensor, eps: float) -> None:
    """Shares of the sources, then the sums: the first reads the bank for many tokens at a time, the second for one."""
    import triton  # absent on machines without a GPU; the row needs it

    from baltoro.kernels.attnres.triton_kernels import scores_kernel, sums_kernel

    num, tokens, width = bank.shape
    is_split = bank.is_cuda and bank.dtype == torch.bfloat16  # the interpreter has no bf16 products
    halves = _halves(queries) if is_split else queries.float().contiguous().unsqueeze(0)
    share = torch.empty(tokens, len(queries), num, dtype=torch.float32, device=bank.device)
    cut: dict[str, int] = {
        "L": num, "Q": len(queries), "D": width, "BLOCK_L": max(8, triton.next_power_of_2(num)),
        "BLOCK_Q": max(16, triton.next_power_of_2(len(queries))),
    }  # fmt: skip
    scores_kernel[(-(-tokens // SCAN.tokens),)](
        bank, halves, share, lse, bank.stride(0), bank.stride(1), tokens, eps,
        PARTS=len(halves), TOKENS=SCAN.tokens, BLOCK_D=SCAN.score_block,
        num_warps=SCAN.score_warps, num_stages=SCAN.score_stages if is_split else 1, **cut,
    )  # fmt: skip
    sums_kernel[(tokens,)](
        bank, share, part, bank.stride(0), bank.stride(1), tokens,
        BLOCK_D=SCAN.sum_block, IS_SPLIT=is_split, num_warps=SCAN.sum_warps, num_stages=3, **cut,
    )  # fmt: skip


def _halves(queries: Tensor) -> Tensor:
    """[Q, D] -> bf16 [1 or 2, Q, D] whose sum it is, to 2^-17 of it."""
    if queries.dtype == torch.bfloat16:
        return queries.contiguous().unsqueeze(0)
    high = queries.bfloat16()
    return torch.stack([high, (queries.float() - high.float()).bfloat16()])


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
    if wants_gradient(part, lse, prefix, update, query, gain) or part.dtype == torch.float64:
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
    total = _total(prefix, update)
    rows, count = (_rows(bank), _packed(prefix), _packed(update)), len(bank) + (total is not None)
    out = torch.empty(bank.shape[1:], dtype=bank.dtype, device=bank.device)
    launch = _read_whole
    if count <= MAX_SOURCES and len(out) <= CLUSTER_TOKENS and _thread_width(out):
        launch = _read_clustered
    elif count <= MAX_SOURCES and len(out) <= FEW_TOKENS:
        launch = _read_shared
    if len(out):
        launch(rows, query, gain, (total, out), (eps, norm_eps))
    return total, out


def _read_whole(
    rows: tuple[Tensor, Tensor | None, Tensor | None],
    query: Tensor,
    gain: Tensor | None,
    results: tuple[Tensor | None, Tensor],
    eps: tuple[float, float],
) -> None:
    """One program a token."""
    import triton

    from baltoro.kernels.attnres.triton_kernels import read_kernel

    bank, prefix, update = rows
    num, tokens, width = bank.shape
    read_kernel[(tokens,)](
        *rows, query, gain, *results, bank.stride(0), bank.stride(1), *eps,
        L=num, D=width, BLOCK_L=triton.next_power_of_2(num), BLOCK_D=triton.next_power_of_2(width),
        CHUNK=min(CHUNK, triton.next_power_of_2(width)),
        HAS_PREFIX=prefix is not None, HAS_UPDATE=update is not None, HAS_NORM=gain is not None,
        num_warps=min(READ_WARPS, _warps(width)),
    )  # fmt: skip


def _read_shared(
    rows: tuple[Tensor, Tensor | None, Tensor | None],
    query: Tensor,
    gain: Tensor | None,
    results: tuple[Tensor | None, Tensor],
    eps: tuple[float, float],
) -> None:
    """Many programs a token, in two launches of which the second starts to load while the first still runs."""
    import triton

    from baltoro.kernels.attnres.decode_kernels import blend_kernel, products_kernel

    (bank, prefix, update), (total, out) = rows, results
    num, tokens, width = bank.shape
    blocks = -(-width // SHARE_BLOCK)
    products = torch.empty(tokens, blocks, MAX_SOURCES, MAX_SOURCES, dtype=torch.float32, device=bank.device)
    dots = torch.empty(tokens, blocks, MAX_SOURCES, dtype=torch.float32, device=bank.device)
    is_dependent = has_dependent_launch(bank)
    cut = {"L": num, "D": width, "BLOCK_L": MAX_SOURCES, "BLOCK_D": SHARE_BLOCK, "PDL": is_dependent}
    cut |= {"num_warps": SHARE_WARPS, "HAS_PREFIX": prefix is not None, "HAS_UPDATE": update is not None}
    strides = (bank.stride(0), bank.stride(1))
    launch = {"launch_pdl": True} if is_dependent else {}
    products_kernel[(blocks, tokens)](
        *rows, query, total, products, dots, *strides, INTERP=bank.device.type == "cpu", **cut, **launch
    )
    blend_kernel[(blocks, tokens)](
        *rows, gain, products, dots, out, *strides, *eps,
        BLOCKS=blocks, BLOCK_B=triton.next_power_of_2(blocks), HAS_NORM=gain is not None, **cut, **launch,
    )  # fmt: skip


def _thread_width(out: Tensor) -> int:
    """Channels of a thread of CLUSTER; 0 where that form is off or does not fit."""
    if CLUSTER is None or machine(out.device.type, out.device.index or 0).capability not in HOPPER:
        return 0
    wide = (1 << (out.shape[1] - 1).bit_length()) // (32 * CLUSTER.programs * CLUSTER.warps)
    return wide if CLUSTER_WIDTHS[0] <= wide <= CLUSTER_WIDTHS[1] else 0


def _read_clustered(
    rows: tuple[Tensor, Tensor | None, Tensor | None],
    query: Tensor,
    gain: Tensor | None,
    results: tuple[Tensor | None, Tensor],
    eps: tuple[float, float],
) -> None:
    """A cluster of programs a token, in one launch."""
    from baltoro.kernels.attnres.cluster_kernels import cluster_mix_kernel, row_layout
    from baltoro.kernels.attnres.cluster_text import lane_sums, opening, warp_sums

    assert CLUSTER is not None
    (bank, prefix, update), (programs, warps) = rows, (CLUSTER.programs, CLUSTER.warps)
    num, tokens, width = bank.shape
    wide = _thread_width(results[1])
    cluster_mix_kernel[(tokens,)](
        *rows, query, gain, *results, bank.stride(0), bank.stride(1), *eps,
        L=num, D=width, PROGRAMS=programs, WARPS=warps, WIDE=wide, ROW=row_layout(programs, warps, wide),
        OPENING=opening(programs, warps), LANE_SUMS=lane_sums(programs, warps), WARP_SUMS=warp_sums(programs, warps),
        HAS_PREFIX=prefix is not None, HAS_UPDATE=update is not None, HAS_NORM=gain is not None,
        PDL=True,
        num_warps=warps, num_ctas=programs, launch_pdl=True,
    )  # fmt: skip


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
