"""The KDA chunk form in Gluon: what its kernels compute, against float64. How they do it a GPU has to show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baltoro.kernels.kda import prefill
from baltoro.kernels.kda.plan import ChunkPlan
from baltoro.kernels.kda.reference import l2_norm, recurrent
from baltoro.kernels.spans import Spans
from tests.kernels.gluon_by_torch import kernels

FOLDER = Path(prefill.__file__).parent
H, K, C = 2, 128, 64
LAYOUT = (1, 63, 200, 17), (0, 64, 5, 60), ((2, 123),)


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def prepare(tensors: list[Tensor], chunks: Tensor, num: int, heads_first: bool) -> tuple[list[Tensor], Tensor]:
    """w, u, k R, q P, A_qk, P_C."""
    made = [blank(num, H, C, n) for n in (K, K, K, K, C)]
    gamma, strides = blank(num, H, K, dtype=torch.float32), [t.stride(0) for t in tensors]
    launch = kernels(FOLDER / "gluon_prepare.py")["column_kernel"]
    grid = (H, num) if heads_first else (num, H)
    launch(grid, *tensors, None, chunks, *made, gamma, *strides, 0, K**-0.5, heads_first)
    return made, gamma


def enter(state: Tensor, plan: ChunkPlan, made: list[Tensor], gamma: Tensor) -> Tensor:
    """States that enter the segments."""
    w, u, k_out = (t.float() for t in made[:3])
    entering, now = [], state[0]
    for span, first, count, _ in plan.segments:
        now = state[span] if not entering or plan.segments[len(entering) - 1][0] != span else now
        entering.append(now)
        for c in range(first, first + count):
            now = now * gamma[c, :, None] + (u[c] - w[c] @ now.mT).mT @ k_out[c]
    return torch.stack(entering)


@pytest.mark.parametrize(("segment_chunks", "is_early"), [(None, True), (2, False)])
# gates near 0, near 2.5, near the bound; a factor that leaves FP32 shows with strong ones alone
@pytest.mark.parametrize("strength", [3.0, 0.0, -1.0])
def test_gluon_kernels(segment_chunks: int | None, is_early: bool, strength: float) -> None:
    torch.manual_seed(0)
    lengths, starts, borders = LAYOUT
    num = sum(lengths)
    q, k = (l2_norm(torch.randn(num, H, K)).bfloat16() for _ in range(2))
    v, g = torch.randn(num, H, K).bfloat16(), -5 * torch.sigmoid(torch.randn(num, H, K) - strength)
    g[150:200] = -5.0
    beta, state = torch.rand(num, H), torch.randn(len(lengths), H, K, K)
    plan, tables = prefill._tables(LAYOUT, C, segment_chunks, torch.device("cpu"))
    kind = torch.float32 if is_early else torch.bfloat16
    made, gamma = prepare([q.to(kind), k.to(kind), v, g, beta], tables["chunks"], len(plan.chunks), is_early)
    rows, scan = [t.view(-1, t.shape[-1]) for t in made], kernels(FOLDER / "gluon_scan.py")
    entering = enter(state, plan, made, gamma) if plan.fragments else state
    out, after = blank(num, H, K), blank(len(lengths) + len(borders), H, K, K, dtype=torch.float32)
    scan["column_scan_kernel"](
        (H, len(plan.segments)), *rows, gamma, tables["chunks"], tables["segments"], tables["order"], entering,
        out, after, len(lengths), H, 0, bool(plan.fragments), is_early,
    )  # fmt: skip
    doubles = [t.double() for t in (q, k, v, g, beta)]
    spans = Spans.build(lengths, starts)
    exact = recurrent(*doubles, spans=spans, state=state.double(), scale=K**-0.5, borders=borders)
    for got, expected in zip((out, after), exact, strict=True):
        assert float((got.double() - expected).norm() / expected.norm()) < 4e-3
