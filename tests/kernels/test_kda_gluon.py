"""The KDA chunk form in Gluon: what its kernels compute, against float64. How they do it a GPU has to show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baltoro.kernels.kda import prefill
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


def merge(state: Tensor, spans: tuple[tuple[int, int], ...], fragments: Tensor) -> Tensor:
    """States that enter the segments."""
    entering = torch.empty(len(fragments), H, K, K)
    for n, (first, count) in enumerate(spans):
        now = state[n]
        for segment in range(first, first + count):
            entering[segment] = now
            now = now @ fragments[segment, :, K:] + fragments[segment, :, :K]
    return entering


@pytest.mark.parametrize(("segment_chunks", "is_early"), [(None, True), (2, False)])
# the stronger the gates, the more of an output are few pairs, whose factors are rounded to BF16
@pytest.mark.parametrize(("strength", "bound"), [(3.0, 4e-3), (-1.0, 1e-2)])
def test_gluon_kernels(segment_chunks: int | None, is_early: bool, strength: float, bound: float) -> None:
    torch.manual_seed(0)
    lengths, starts, borders = LAYOUT
    num = sum(lengths)
    q, k = (l2_norm(torch.randn(num, H, K)).bfloat16() for _ in range(2))
    v, g = torch.randn(num, H, K).bfloat16(), -5 * torch.sigmoid(torch.randn(num, H, K) - strength)
    g[150:200] = -5.0
    beta, state = torch.rand(num, H), torch.randn(len(lengths), H, K, K)
    plan, tables = prefill._tables(LAYOUT, C, segment_chunks, torch.device("cpu"))
    kind = torch.float32 if is_early else torch.bfloat16
    (w, u, k_out, q_in, a), gamma = prepare(
        [q.to(kind), k.to(kind), v, g, beta], tables["chunks"], len(plan.chunks), is_early
    )
    rows = [t.view(-1, t.shape[-1]) for t in (w, u, k_out, q_in, a)]
    scan, entering = kernels(FOLDER / "gluon_scan.py"), state
    if plan.fragments:
        fragments = blank(len(plan.segments), H, 2 * K, K, dtype=torch.float32)
        grid = (2, H, len(plan.fragments))
        scan["column_fragment_kernel"](grid, *rows[:3], gamma, tables["segments"], tables["fragments"], fragments)
        entering = merge(state, plan.spans, fragments)
    out, after = blank(num, H, K), blank(len(lengths) + len(borders), H, K, K, dtype=torch.float32)
    scan["column_scan_kernel"](
        (H, len(plan.segments)), *rows, gamma, tables["chunks"], tables["segments"], tables["order"], entering,
        out, after, len(lengths), H, 0, bool(plan.fragments), is_early,
    )  # fmt: skip
    doubles = [t.double() for t in (q, k, v, g, beta)]
    spans = Spans.build(lengths, starts)
    exact = recurrent(*doubles, spans=spans, state=state.double(), scale=K**-0.5, borders=borders)
    for got, expected in zip((out, after), exact, strict=True):
        assert float((got.double() - expected).norm() / expected.norm()) < bound
