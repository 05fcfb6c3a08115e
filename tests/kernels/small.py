"""Random problems of the small one-launch operations, for the interpreter and for a GPU: checked against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.mla import absorb, fast_absorb
from baltoro.kernels.moe import fast_glu
from baltoro.kernels.moe import reference as moe
from baltoro.kernels.norm import fast as fast_norm
from baltoro.kernels.norm import reference as norm
from tests.kernels.tolerances import TOLERANCES

EPS = 1e-5
# (tokens, heads, K, V, R, Dr)
SHAPES = {"tiny": (3, 4, 32, 32, 64, 16), "many": (35, 3, 32, 16, 64, 16), "uneven": (17, 2, 24, 20, 48, 8)}


def assert_near(got: Tensor, expected: Tensor, op: str) -> None:
    gap = float((got.double() - expected).norm() / expected.norm())
    assert gap < TOLERANCES[op][str(got.dtype).removeprefix("torch.")], gap


def check_norm(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(rows, width + 5, device=device).to(dtype)[:, :width]
    weight = torch.rand(width, device=device).to(dtype) + 0.5
    assert_near(fast_norm.rms_norm(x, weight, EPS), norm.rms_norm(x.double(), weight.double(), EPS), "rms_norm")


def check_glu(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    gate, up = (torch.randn(rows, 2 * width, device=device) * 8).to(dtype).chunk(2, dim=-1)
    for linear_beta in (25.0, None):
        got = fast_glu.situ_glu(gate, up, beta=4.0, linear_beta=linear_beta)
        assert_near(got, moe.situ_glu(gate.double(), up.double(), beta=4.0, linear_beta=linear_beta), "glu")
    assert_near(fast_glu.silu_glu(gate, up), moe.silu_glu(gate.double(), up.double()), "glu")


def check_enter(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """The query, and every row of the cache: those named, and no other."""
    num, heads, keys, values, rank, shared = shape
    q = torch.randn(num, heads, keys + shared, device=device).to(dtype)
    row = torch.randn(num, rank + shared + 7, device=device).to(dtype)[:, : rank + shared]
    gain = (torch.rand(rank, device=device) + 0.5).to(dtype)
    kv_b = torch.randn(heads, keys + values, rank, device=device).to(dtype)
    kv = torch.randn(num + 3, 4, 2, rank + shared, device=device).to(dtype)[:, :, 1]
    places = torch.randperm(num + 3, device=device)[:num], torch.randint(0, 4, (num,), device=device)
    wide = kv.double().clone()
    expected = absorb.enter(q.double(), row.double(), gain.double(), EPS, kv_b.double(), wide, places)
    untouched = torch.ones(kv.shape[:2], dtype=torch.bool, device=device)
    untouched[places] = False
    before = kv.clone()
    got = fast_absorb.enter(q, row, gain, EPS, kv_b, kv, places)
    assert_near(got, expected, "mla_enter")
    assert_near(kv[places], wide[places], "rms_norm")
    assert torch.equal(kv[untouched], before[untouched])


def check_leave(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    num, heads, keys, values, rank, _ = shape
    out = torch.randn(num, heads, rank, device=device)
    kv_b = torch.randn(heads, keys + values, rank, device=device).to(dtype)
    gate = torch.randn(num, heads * values + 9, device=device).to(dtype)[:, : heads * values]
    for one in (gate, None):
        wide = None if one is None else one.double()
        expected = absorb.leave(out.double(), kv_b.double(), values, wide, torch.float64)
        assert_near(fast_absorb.leave(out, kv_b, values, one, dtype), expected, "mla_leave")
