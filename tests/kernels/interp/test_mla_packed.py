"""Expanded attention of packed spans under the interpreter against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.mla.expanded import by_padding, by_reference
from baltoro.kernels.mla.packed import LONG, SHORT, Tiles, attend
from baltoro.kernels.spans import Spans
from tests.kernels.tolerances import TOLERANCES

HEADS, SCALE = 3, 0.2
SMALL = Tiles(16, 16, 2, 4)


def inputs(spans: Spans, own: int, common: int, value: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, expanded and shared in bf16; slices of wider rows, NaN beside them."""

    def slice_of(*shape: int) -> Tensor:
        wide = torch.full((*shape[:-1], shape[-1] + 5), float("nan"), dtype=torch.bfloat16)
        wide[..., 2 : 2 + shape[-1]] = torch.randn(shape)
        return wide[..., 2 : 2 + shape[-1]]

    num = sum(spans.ends)
    return (
        slice_of(spans.num_tokens, HEADS, own + common),
        slice_of(num, HEADS, own + value),
        slice_of(num, common),
    )


@torch.no_grad()
@pytest.mark.parametrize(("own", "common", "value"), [(16, 16, 16), (24, 8, 40)])
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ((1,), (0,)), ((40,), (0,)), ((5, 1, 33, 16), (0, 0, 0, 0)), ((1, 17, 3), (15, 16, 70)),
        ((16, 2, 50), (0, 31, 7)), ((33,), (100,)), ((2, 20), (14, 30)),
    ],
)  # fmt: skip
def test_equals_the_reference(
    lengths: tuple[int, ...], starts: tuple[int, ...], own: int, common: int, value: int
) -> None:
    spans = Spans.build(lengths, starts)
    q, expanded, shared = inputs(spans, own, common, value)
    got = attend(q, expanded, shared, spans=spans, scale=SCALE, out_dtype=torch.bfloat16, tiles=SMALL)
    exact = by_reference(
        q.double(), expanded.double(), shared.double(), spans=spans, scale=SCALE, out_dtype=torch.float64
    )
    assert got.shape == exact.shape and got.dtype == torch.bfloat16 and got.isfinite().all()
    assert float((got.double() - exact).norm() / exact.norm()) < TOLERANCES["mla_attend_expanded"]["bfloat16"]
    worst = (got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(worst.max()) < 3 * TOLERANCES["mla_attend_expanded"]["bfloat16"]


@torch.no_grad()
@pytest.mark.parametrize("tiles", [LONG, SHORT])
def test_the_cuts_of_the_device(tiles: Tiles) -> None:
    spans = Spans.build((130, 3, 64), (0, 200, 65))
    q, expanded, shared = inputs(spans, 16, 16, 16)
    got = attend(q, expanded, shared, spans=spans, scale=SCALE, out_dtype=torch.bfloat16, tiles=tiles)
    exact = by_reference(
        q.double(), expanded.double(), shared.double(), spans=spans, scale=SCALE, out_dtype=torch.float64
    )
    assert float((got.double() - exact).norm() / exact.norm()) < TOLERANCES["mla_attend_expanded"]["bfloat16"]


@torch.no_grad()
def test_other_dtypes_are_padded() -> None:
    spans = Spans.build((5, 9), (0, 0))
    some = [x.float() for x in inputs(spans, 16, 16, 16)]
    options = {"spans": spans, "scale": SCALE, "out_dtype": torch.float32}
    assert torch.equal(attend(*some, **options), by_padding(*some, **options))  # type: ignore[arg-type]


@torch.no_grad()
def test_keys_that_do_not_fit_the_spans_are_refused() -> None:
    spans = Spans.build((4,), (3,))
    q, expanded, shared = inputs(spans, 16, 16, 16)
    with pytest.raises(ShapeError, match="6"):
        attend(q, expanded[:6], shared, spans=spans, scale=SCALE, out_dtype=torch.bfloat16)
