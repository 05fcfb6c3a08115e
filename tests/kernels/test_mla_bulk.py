"""Latent attention by bulk copies: which rows come into which buffer and what is made of them, against the reference.

That a copy has ended before its buffer is used, and the other way round, a GPU shows.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from baltoro.kernels.mla import reference, split_decode
from tests.kernels.gluon_by_torch import Pointer, kernels

FILE = Path(split_decode.__file__).with_name("bulk_decode.py")
R, D, PAGE, PAGES = 512, 64, 64, 12


@pytest.mark.parametrize(("splits", "window"), [(1, 1), (2, 1), (3, 2), (5, 8)])
def test_splits_of_bulk_copies(splits: int, window: int) -> None:
    """Queries and the rows of the window are there once the kernel in front has ended; before, they are NaN."""
    torch.manual_seed(0)
    heads, lengths = 6 if window < 8 else 2, torch.tensor([PAGE * 5 - 30, window, PAGE * 4])
    num, rows = len(lengths), heads * window
    kv = torch.randn(PAGES, PAGE, R + D).bfloat16()
    pages, clean = torch.randperm(PAGES), kv.clone()
    table = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 1, 2, 3, 4, 5], [3, 2, 1, 7, 3, 2]])  # no two write to one page
    table = pages[table]
    kv[table[0, 4], 34:], kv[table[0, 5:]], kv[table[1, 0], window:] = torch.nan, torch.nan, torch.nan
    q = torch.randn(num, rows, R + D).bfloat16()
    parts, sums = torch.full((num, splits, rows, R), torch.nan), torch.full((num, splits, rows), torch.nan)
    flat, full_q, full_kv = kv.view(-1, R + D), q.clone(), kv.clone()

    def start() -> None:
        q.fill_(torch.nan)
        for n, length in enumerate(lengths.tolist()):
            for place in range(length - window, length):
                kv[table[n, place // PAGE], place % PAGE] = torch.nan

    def come() -> None:
        q.copy_(full_q), kv.copy_(full_kv)

    kernels(FILE, start, come)["bulk_split_kernel"](
        (num, splits, 1), Pointer(q), flat, flat, Pointer(table), Pointer(lengths), Pointer(parts), Pointer(sums),
        0.05 / math.log(2.0), q.stride(0), q.stride(1), PAGE, table.stride(0), heads, rows, window, splits,
        table.shape[1], 16, 2, splits == 1, True, 4,
    )  # fmt: skip
    shape = (num, window, heads, R + D)
    exact, exact_lse = reference.attend_absorbed(
        full_q.double().view(shape), clean.double(), table, lengths, latent=R, scale=0.05
    )
    weight = torch.softmax(sums, 1).nan_to_num()
    out = torch.where(weight[..., None] > 0, parts, 0.0).mul(weight[..., None]).sum(1).view(num, window, heads, R)
    assert float((out.double() - exact).norm() / exact.norm()) < 6e-3
    lse, seen = sums.logsumexp(1).view(exact_lse.shape).double(), exact_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen) and float((lse - exact_lse)[seen].abs().max()) < 1e-3
