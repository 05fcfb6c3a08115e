"""What stands before and behind KDA's chunk form in one launch each, under the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baltoro.kernels.kda import enter, fast_enter
from baltoro.kernels.norm import fast as fast_norm
from baltoro.kernels.spans import Spans
from tests.kernels.mixing import CASES, Case, check_enter, check_gated, weights_of

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(CASES))
def test_what_enters_the_chunk_form(name: str, dtype: torch.dtype) -> None:
    check_enter(CASES[name], dtype, "cpu")


@pytest.mark.parametrize(
    "tile", [fast_enter.Tile(8, 1, 4), fast_enter.Tile(4, 4, 4), fast_enter.Tile(1, 16, 1)], ids=str
)
def test_tokens_of_a_program_in_any_shape(tile: fast_enter.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_enter, "TILE", tile)
    check_enter(CASES["ragged with a past"], F32, "cpu")
    check_enter(CASES["some with a past"], F32, "cpu")


@pytest.mark.parametrize(("tokens", "heads", "width"), [(5, 2, 16), (3, 12, 128), (33, 3, 20)])
@pytest.mark.parametrize("dtypes", [(F32, BF16, BF16), (BF16, BF16, BF16), (F32, F32, F32)], ids=str)
def test_gated_norm_of_rows_with_a_stride(tokens: int, heads: int, width: int, dtypes: tuple[torch.dtype, ...]) -> None:
    check_gated(tokens, heads, width, dtypes, "cpu")


def test_gradients_float64_and_other_widths_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((4, 2), None, (), 2, 16)
    weights, spans = weights_of(case, "cpu"), Spans.build(case.lengths)

    def forbidden(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(fast_enter, "launch", forbidden)
    monkeypatch.setattr(fast_norm, "gated_launch", forbidden)
    x, raw, b = torch.randn(6, 96), torch.randn(6, 2, 16), torch.randn(6, 2)
    with torch.enable_grad():
        needs = x.clone().requires_grad_()
        mixed, _ = fast_enter.enter(needs, raw, b, weights, spans=spans, history=None)
        out = fast_norm.gated_rms_norm(mixed.v, raw, weights.norm, 1e-5, F32)
        (gradient,) = torch.autograd.grad(out.sum() + mixed.q.sum(), needs)
        assert gradient.shape == x.shape
    mixed, _ = fast_enter.enter(x.double(), raw.double(), b.double(), weights, spans=spans, history=None)
    assert mixed.q.dtype == torch.float64
    with pytest.raises(AssertionError):
        fast_enter.enter(x, raw, b, weights, spans=spans, history=None)
    assert enter.enter(x, raw, b, weights, spans=spans, history=None)[1].shape == (2, 3, 96)
