"""What stands before and behind KDA's chunk form, on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baltoro.kernels.kda import enter, fast_enter
from baltoro.kernels.spans import Spans
from tests.kernels.mixing import CASES, Case, check_enter, check_gated, strided, weights_of

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
SIZES = {
    "a prompt": Case((4096,), None, ((0, 2048),), 12, 128),
    "a chunk of four": Case((1000, 1024, 7, 2065), (64, 0, 640, 128), ((3, 64), (0, 960)), 12, 128),
    "many short": Case((1, 2, 3, 4, 5) * 40, (9,) * 200, ((3, 1), (199, 4)), 12, 128),
    "softplus": Case((333,), (64,), (), 32, 128, bound=None),
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*CASES, *SIZES])
def test_what_enters_the_chunk_form(name: str, dtype: torch.dtype) -> None:
    check_enter((CASES | SIZES)[name], dtype, "cuda")


@pytest.mark.parametrize(("tokens", "heads", "width"), [(5, 2, 16), (4096, 12, 128), (1, 12, 128), (33, 3, 20)])
@pytest.mark.parametrize("dtypes", [(F32, BF16, BF16), (BF16, BF16, BF16), (F32, F32, F32)], ids=str)
def test_gated_norm(tokens: int, heads: int, width: int, dtypes: tuple[torch.dtype, ...]) -> None:
    check_gated(tokens, heads, width, dtypes, "cuda")


def test_bf16_rounds_where_the_reference_rounds() -> None:
    """The last bit differs where the values before it lie on the border between two: seldom."""
    case = Case((1000, 1000), (9, 64), (), 12, 128)
    x, raw, b = (strided(2000, width, BF16, "cuda") for width in (3 * 12 * 128, 12 * 128, 12))
    raw, history = raw.unflatten(-1, (12, 128)), torch.randn(2, 3, 3 * 12 * 128, device="cuda", dtype=BF16)
    weights, spans = weights_of(case, "cuda"), Spans.build(case.lengths, case.starts, "cuda")
    got, _ = fast_enter.enter(x, raw, b, weights, spans=spans, history=history)
    expected, _ = enter.enter(x, raw, b, weights, spans=spans, history=history)
    for name in ("q", "k", "v"):
        one, other = getattr(got, name), getattr(expected, name)
        assert float((one != other).float().mean()) < 1e-3, name
        assert bool(((one.float() - other.float()).abs() <= other.float().abs() * 2**-6 + 1e-5).all()), name
