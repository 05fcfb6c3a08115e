"""Norm, gated activations, and what stands before and behind latent attention, on a CUDA device at K3's widths too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.small import SHAPES, check_enter, check_glu, check_leave, check_norm

pytestmark = pytest.mark.gpu
K3 = {"one token": (1, 12, 128, 128, 512, 64), "64 tokens": (64, 12, 128, 128, 512, 64)}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 7168), (64, 3584), (5, 96)])
def test_norm_and_activations(rows: int, width: int, dtype: torch.dtype) -> None:
    check_norm(rows, width, dtype, "cuda")
    check_glu(rows, width, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("name", [*SHAPES, *K3])
def test_what_enters_and_leaves_latent_attention(name: str, dtype: torch.dtype) -> None:
    shape = (SHAPES | K3)[name]
    check_enter(shape, dtype, "cuda")
    check_leave(shape, dtype, "cuda")
