# mypy: ignore-errors
"""Small kernels of the pieces that the first compiled KDA prefill was built of, each against float64: which was wrong?

scans      sums within groups by scans of three dimensions, forward and reversed
turned     a sum of products, transposed in registers, as the left factor of the next product
computed   a computed left factor in registers, as the next product's
table      sums as products with a matrix from memory, as they are made now
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def scan_sums(x_ptr, before_ptr, after_ptr, C: tl.constexpr, HALF: tl.constexpr, BK: tl.constexpr):
    at = tl.arange(0, C)[:, None] * BK + tl.arange(0, BK)[None, :]
    grouped = tl.reshape(tl.load(x_ptr + at), [C // HALF, HALF, BK])
    before = tl.cumsum(grouped, axis=1)
    after = tl.cumsum(grouped, axis=1, reverse=True) - grouped
    tl.store(before_ptr + at, tl.reshape(before, [C, BK]))
    tl.store(after_ptr + at, tl.reshape(after, [C, BK]))


@triton.jit
def chained(a_ptr, b_ptr, c_ptr, out_ptr, N: tl.constexpr, IS_TURNED: tl.constexpr, IS_TF32: tl.constexpr):
    """(a b)' c or (a b) c, a [64, 64], b [64, N], c [64 or N, 128]."""
    i, n, k = tl.arange(0, 64), tl.arange(0, N), tl.arange(0, 128)
    kind = tl.float32 if IS_TF32 else tl.bfloat16
    a = tl.load(a_ptr + i[:, None] * 64 + i[None, :]).to(kind)
    made = tl.dot(a, tl.load(b_ptr + i[:, None] * N + n[None, :]).to(kind))
    if IS_TURNED:
        c = tl.load(c_ptr + i[:, None] * 128 + k[None, :]).to(kind)
        tl.store(out_ptr + n[:, None] * 128 + k[None, :], tl.dot(tl.trans(made).to(kind), c))
    else:
        c = tl.load(c_ptr + n[:, None] * 128 + k[None, :]).to(kind)
        tl.store(out_ptr + i[:, None] * 128 + k[None, :], tl.dot(made.to(kind), c))


@triton.jit
def table_sums(m_ptr, x_ptr, out_ptr, BK: tl.constexpr):
    i = tl.arange(0, 64)
    at = i[:, None] * BK + tl.arange(0, BK)[None, :]
    x = tl.load(x_ptr + at).to(tl.float16)
    tl.store(out_ptr + at, tl.dot(tl.load(m_ptr + i[:, None] * 64 + i[None, :]), x))


def gap(got: torch.Tensor, exact: torch.Tensor) -> str:
    return f"{float((got.double() - exact.double()).norm() / exact.double().norm()):.1e}"


def main(say: Callable[..., None] = print) -> None:
    """One line a piece."""
    for half in (16, 32, 64):
        for warps in (4, 8):
            x = torch.rand(64, 64, device="cuda")
            before, after = torch.empty_like(x), torch.empty_like(x)
            scan_sums[(1,)](x, before, after, C=64, HALF=half, BK=64, num_warps=warps)
            groups = x.double().view(-1, half, 64)
            up = groups.cumsum(1)
            rest = (groups.sum(1, keepdim=True) - up).view(64, 64)
            say(
                f"scans {half} of 64, {warps} warps: forward {gap(before, up.view(64, 64))} reversed {gap(after, rest)}"
            )
    for n, is_turned, is_tf32 in ((32, True, False), (64, True, False), (64, False, False), (64, False, True)):
        a, b = torch.randn(64, 64, device="cuda") / 8, torch.randn(64, n, device="cuda")
        c, out = torch.randn(64, 128, device="cuda") / 8, torch.empty(n if is_turned else 64, 128, device="cuda")
        chained[(1,)](a, b, c, out, N=n, IS_TURNED=is_turned, IS_TF32=is_tf32, num_warps=4)
        made = a.double() @ b.double()
        say(f"{'turned' if is_turned else 'computed'} {n}, {'tf32' if is_tf32 else 'bf16'}: "
            f"{gap(out, (made.T if is_turned else made) @ c.double())} (rounding: bf16 5e-3, tf32 6e-4)")  # fmt: skip
    from baltoro.kernels.kda.launch import sum_matrices

    matrices, x = sum_matrices(64, 16, "fp16", torch.device("cuda")), -torch.rand(64, 64, device="cuda")
    for n, matrix in enumerate(matrices):
        out = torch.empty_like(x)
        table_sums[(1,)](matrix, x, out, BK=64, num_warps=4)
        say(f"table {n}: {gap(out, matrix.double() @ x.double())} (rounding: 3e-4)")
